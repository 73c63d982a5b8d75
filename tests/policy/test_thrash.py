"""The thrash detector and the hold that it asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.grouping import DEADLINE_MARGIN, Want, claim_at
from qworker.policy.thrash import Thrash, ThrashDetector

MIB = 1 << 20


def alternate(detector: ThrashDetector, seconds: float, *, load: float = 4.0, pause: float = 5.0) -> list[Thrash]:
    """Two models push each other out of one place, no faster than the brake allows."""
    now, events, turn = 0.0, [], 0
    while now < seconds:
        model, other = ("a", "b") if turn % 2 else ("b", "a")
        detector.used(model, now)
        detector.evicted(other, now)
        now += load
        if (event := detector.loaded(model, load, 100 * MIB, now)) is not None:
            events.append(event)
        now += max(pause, detector.hold)
        turn += 1
    return events


def test_two_that_push_each_other_out_trip_the_brake() -> None:
    """One event, which names both, says what it costs and what would end it."""
    detector = ThrashDetector(100 * MIB, slots=1)
    (event,) = alternate(detector, 600.0)
    assert event.braking
    assert set(event.models) == {"a", "b"}
    assert event.working_set == 200 * MIB
    assert detector.hold == event.hold > 0.0
    assert "a budget of 200 MiB would end it" in event.reason


def test_it_stays_on_while_the_cause_lasts_and_comes_off_after() -> None:
    """No flapping while models alternate; off when the loads have stopped for a window."""
    detector = ThrashDetector(100 * MIB, slots=1, window=300.0)
    assert len(alternate(detector, 3_000.0)) == 1
    event = detector.tick(3_000.0 + 400.0)
    assert event is not None
    assert not event.braking
    assert detector.hold == 0.0
    assert detector.tick(3_500.0) is None


def test_first_loads_and_late_returns_are_no_thrash() -> None:
    """Models that come for the first time, or long after they left, load without a brake."""
    detector = ThrashDetector(100 * MIB, slots=1)
    now = 0.0
    for i in range(200):
        now += 5.0
        assert detector.loaded(f"m{i}", 4.0, 100 * MIB, now) is None
        detector.evicted(f"m{i}", now)
    for i in range(200):
        now += 5.0
        assert detector.loaded(f"m{i}", 4.0, 100 * MIB, now) is None


def test_the_hold_has_a_limit() -> None:
    """However many models thrash, no claim is held for longer than the limit."""
    detector = ThrashDetector(100 * MIB, slots=1, max_hold=7.0)
    alternate(detector, 600.0, load=30.0)
    assert detector.hold == 7.0


@given(
    oldest=st.floats(0, 1e6),
    window=st.floats(0, 600),
    load=st.floats(0, 60),
    deadline=st.none() | st.floats(-1e3, 2e6),
    fits=st.booleans(),
)
def test_a_hold_is_bounded(oldest: float, window: float, load: float, deadline: float | None, fits: bool) -> None:
    """Never before the job came, never past the window, never into a deadline, never where bytes are free."""
    at = claim_at(Want(oldest, load, fits, deadline), window)
    assert oldest <= at <= oldest + window
    if fits:
        assert at == oldest
    if deadline is not None and at > oldest:
        assert at <= deadline - DEADLINE_MARGIN * load
