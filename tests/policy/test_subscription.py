"""When a consumer is made anew, and how many jobs a model may have in hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.subscription import SHARE_OF_ACK_TIMEOUT, Doubt, fitting_prefetch, outlasts


def test_a_consumer_that_is_not_counted() -> None:
    """Two looks in a row, and not one, nor two with a good one between them."""
    doubt = Doubt()
    looks = [doubt.look(ready=0, consumers=count, in_hand=0, done=0) for count in (0, 1, 0, 0)]
    assert [look is not None for look in looks] == [False, False, False, True]


def test_jobs_that_are_ready_and_do_not_come() -> None:
    """The broker counts the consumer and sends nothing: RabbitMQ 4.3 does so after its consumer timeout."""
    doubt = Doubt()
    assert doubt.look(ready=3, consumers=1, in_hand=0, done=7) is None
    assert doubt.look(ready=3, consumers=1, in_hand=0, done=7) is None
    assert doubt.look(ready=3, consumers=1, in_hand=0, done=7) is not None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5))))
def test_progress_is_no_doubt(looks: list[tuple[int, int, int, int]]) -> None:
    """While the consumer is counted and jobs get done, whatever else the looks say, it is left alone."""
    doubt, done = Doubt(), 0
    for ready, consumers, in_hand, more in looks:
        done += more
        assert doubt.look(ready=ready, consumers=consumers, in_hand=in_hand, done=done) is None


@given(
    st.integers(1, 1000),
    st.none() | st.floats(1e-6, 1e5),
    st.integers(1, 64),
    st.floats(1.0, 1e5),
)
def test_prefetch_fits_the_ack_timeout(wanted: int, seconds: float | None, lanes: int, timeout: float) -> None:
    """Never less than one or more than wanted; with more than one, the last is settled in time."""
    fitting = fitting_prefetch(wanted, seconds, lanes, timeout)
    assert 1 <= fitting <= wanted
    if seconds is None:
        assert fitting == wanted
    elif fitting > 1:
        assert fitting * seconds / lanes <= timeout * SHARE_OF_ACK_TIMEOUT * (1 + 1e-9)
    if outlasts(seconds, timeout):
        assert fitting <= lanes
