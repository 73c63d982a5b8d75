"""Quarantine of digests that do not load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.backoff import LoadHistory, PutOff, after_kills, wait_after


def test_waits_double_from_one_second_to_five_minutes() -> None:
    """And stay there, however often it fails."""
    assert [wait_after(n) for n in range(1, 11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert wait_after(10_000) == 300


def test_a_failed_digest_waits_and_is_tried_again() -> None:
    """Not before its time, and its jobs keep waiting while attempts are left."""
    history = LoadHistory(max_attempts=3)
    assert history.may_try("d", 0.0)
    history.failed("d", 10.0, refuse=False)
    assert (history.may_try("d", 10.9), history.may_try("d", 11.0)) == (False, True)
    history.failed("d", 11.0, refuse=False)
    assert (history.may_try("d", 12.9), history.may_try("d", 13.0)) == (False, True)
    assert not history.refused("d")


def test_used_up_attempts_refuse_jobs_but_still_try_now_and_then() -> None:
    """A store that was away for an hour heals by itself."""
    history = LoadHistory(max_attempts=2)
    history.failed("d", 0.0, refuse=False, reason="the store is away")
    failed = history.failed("d", 1.0, refuse=False, reason="the store is still away")
    assert history.refused("d")
    assert not history.may_try("d", 1.5)
    assert history.may_try("d", failed.retry_at)
    assert history.quarantine("d") == failed
    assert failed.reason == "the store is still away"
    history.succeeded("d")
    assert (history.may_try("d", 1.5), history.refused("d"), history.quarantine("d")) == (True, False, None)


def test_bytes_at_fault_refuse_jobs_at_once_and_are_tried_again() -> None:
    """Somebody may repair the file; a failure of another kind meanwhile does not end the refusing."""
    history = LoadHistory()
    history.failed("d", 0.0, refuse=True)
    assert history.refused("d")
    assert (history.may_try("d", 0.9), history.may_try("d", 1.0)) == (False, True)
    history.failed("d", 1.0, refuse=False)
    assert history.refused("d")
    assert (history.may_try("d", 2.9), history.may_try("d", 3.0)) == (False, True)


def test_new_bytes_start_afresh() -> None:
    """The history is of a digest, not of a name."""
    history = LoadHistory()
    history.failed("old", 0.0, refuse=True)
    assert history.may_try("new", 0.0)
    assert not history.refused("new")


def test_no_attempts_at_all_make_no_sense() -> None:
    """The error says what is expected."""
    with pytest.raises(ValueError, match="at least 1"):
        LoadHistory(max_attempts=0)


def test_the_first_loads_that_end_workers_only_keep_jobs_waiting() -> None:
    """Workers are killed for many reasons: nothing at first, then waits that grow, and no job is refused."""
    assert [after_kills(n, 6) for n in range(6)] == [PutOff(s, refusing=False) for s in (0, 0, 1, 4, 16, 64)]


def test_a_build_that_ends_each_of_its_workers_is_refused() -> None:
    """From the allowed number on, and tried ever more rarely: each try may cost one more worker."""
    assert [after_kills(n, 4) for n in range(4, 10)] == [
        PutOff(s, refusing=True) for s in (30, 120, 480, 1920, 3600, 3600)
    ]
    assert after_kills(10_000, 4) == PutOff(3600, refusing=True)


@given(st.integers(2, 20))
def test_waits_never_shrink(allowed: int) -> None:
    """However many deaths the operator allows."""
    waits = [after_kills(n, allowed).seconds for n in range(70)]
    assert waits == sorted(waits)
    assert sum(wait < 3600 for wait in waits) <= allowed + 5, "deaths before it is tried once an hour only"


def test_a_place_where_loads_fail_is_known_and_recovers() -> None:
    """By failures in a row, of any builds; one load that goes well ends it, and so does time."""
    history = LoadHistory()
    assert not history.failing(0.0)
    history.failed("bad", 0.0, refuse=True)
    assert history.failing(29.0)
    assert not history.failing(30.0), "one bad model, which is never loaded, does not count for ever"
    history.failed("other", 40.0, refuse=True)
    assert history.failing(99.0)
    history.succeeded("good")
    assert not history.failing(99.0)
    for _ in range(50):
        history.failed("bad", 100.0, refuse=True)
    assert history.failing(399.0)
    assert not history.failing(400.0)
