"""Offline runs on a worker: all threads in the gaps, a share while online jobs never cease."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.lane import Share


def test_all_threads_while_nobody_calls_and_none_once_somebody_does() -> None:
    """With no share, what runs is finished, and nothing begins until the online jobs are done."""
    share = Share(0.0, 2)
    for _ in range(2):
        assert share.next_at(0, 5.0) == 5.0
        share.began()
    assert share.next_at(0, 5.0) is None, "every thread has one"
    share.ended(0.1, 1, 5.1)
    assert share.next_at(1, 5.1) is None
    assert share.next_at(0, 5.1) == 5.1


@given(st.floats(0.05, 1.0), st.lists(st.floats(0.001, 0.5), min_size=20, max_size=60))
def test_the_share_is_kept(part: float, runs: list[float]) -> None:
    """While online jobs never cease, offline runs take their part of the time: not more, and not much less."""
    share, now, taken = Share(part, 4), 0.0, 0.0
    for seconds in runs:
        at = share.next_at(3, now)
        assert at is not None
        share.began()
        assert share.next_at(3, at) is None, "one at a time"
        now = at + seconds
        taken += seconds
        share.ended(seconds, 3, now)
    last = share.next_at(3, now)
    assert last is not None
    assert taken <= part * last + 1e-6
    assert taken >= part * last - 1e-6 - max(runs)
