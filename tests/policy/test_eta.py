"""Estimates of loads: where they come from, and that they behave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.eta import STAGES, Loading, LoadTimes

SECONDS = st.floats(0.0, 1e4)
STAGED = st.dictionaries(st.sampled_from(STAGES), SECONDS)


def test_a_model_that_was_loaded_here_is_expected_to_take_what_it_took() -> None:
    """Whatever its card says; and a new measurement moves the estimate by a part of the difference."""
    times = LoadTimes()
    times.loaded("a", {"fetch": 1.0, "room": 0.0, "slot": 0.0, "load": 4.0}, card_seconds=2.0, nbytes=100)
    assert times.expect("a", card_seconds=2.0, nbytes=100).seconds == {"fetch": 1.0, "room": 0, "slot": 0, "load": 4.0}
    times.loaded("a", {"fetch": 1.0, "load": 14.0}, card_seconds=2.0, nbytes=100)
    assert times.expect("a", card_seconds=2.0, nbytes=100).seconds["load"] == pytest.approx(7.0)
    assert times.again("a") == pytest.approx(8.0)


def test_a_new_model_is_expected_to_take_what_this_machine_makes_of_cards() -> None:
    """Twice as slow as the card of one says: so will the next one be, and its file is read at the rate of the first."""
    times = LoadTimes()
    assert times.expect("b", card_seconds=3.0, nbytes=0).seconds["load"] == 3.0
    times.loaded("a", {"fetch": 1.0, "load": 4.0}, card_seconds=2.0, nbytes=100)
    told = times.expect("b", card_seconds=3.0, nbytes=300)
    assert told.seconds["load"] == pytest.approx(6.0)
    assert told.seconds["fetch"] == pytest.approx(3.0)
    assert times.again("b") is None


def test_what_was_measured_before_a_restart_is_better_than_a_card() -> None:
    """And worse than what was measured since."""
    times = LoadTimes()
    assert times.expect("a", card_seconds=1.0, nbytes=0, measured=5.0).seconds["load"] == 5.0
    times.loaded("a", {"load": 7.0}, card_seconds=1.0, nbytes=0)
    assert times.expect("a", card_seconds=1.0, nbytes=0, measured=5.0).seconds["load"] == 7.0


def test_a_wait_for_memory_counts_only_where_there_will_be_one() -> None:
    """By the waits that there were; before there was any, as long as the load."""
    times = LoadTimes()
    assert times.expect("a", card_seconds=2.0, nbytes=0, must_wait=True).total == pytest.approx(4.0)
    times.loaded("a", {"room": 10.0, "load": 2.0}, card_seconds=2.0, nbytes=0)
    assert times.expect("a", card_seconds=2.0, nbytes=0, must_wait=True).total == pytest.approx(12.0)
    assert times.expect("a", card_seconds=2.0, nbytes=0).total == pytest.approx(2.0)


def test_what_overruns_is_expected_to_overrun_as_much_again() -> None:
    """So an estimate is never zero for long, nor does it jump."""
    load = Loading({"fetch": 1.0, "room": 0.0, "slot": 0.0, "load": 4.0})
    assert load.left("fetch", 0.0) == 5.0
    assert load.left("fetch", 1.0) == 4.0
    assert load.left("load", 3.0) == 1.0
    assert load.left("load", 6.0) == 2.0
    assert load.share("load", 3.0) == pytest.approx(0.8)
    assert load.share("room", 50.0) == pytest.approx(0.2), "waits are no work"
    assert load.share("load", 60.0) < 1.0, "it is not done until it is"


@given(STAGED, st.lists(SECONDS, min_size=2, max_size=6))
def test_the_share_only_grows(seconds: dict[str, float], passed: list[float]) -> None:
    """Through all stages in their order, and within each; between 0 and 1; and what is left is no negative time."""
    load = Loading(seconds)
    told = [load.share(stage, each) for stage in STAGES for each in sorted(passed)]
    assert told == sorted(told)
    assert all(0.0 <= share < 1.0 for share in told)
    assert all(load.left(stage, each) >= 0.0 for stage in STAGES for each in passed)


@given(st.lists(st.tuples(STAGED, SECONDS, st.integers(0, 1 << 40)), max_size=8), SECONDS)
def test_estimates_are_finite_whatever_was_measured(
    loads: list[tuple[dict[str, float], float, int]], card_seconds: float
) -> None:
    """Clocks that stand still, cards that say nothing, empty files."""
    times = LoadTimes()
    for stages, card, nbytes in loads:
        times.loaded("a", stages, card_seconds=card, nbytes=nbytes)
    for model in ("a", "b"):
        told = times.expect(model, card_seconds=card_seconds, nbytes=1000, must_wait=True)
        assert all(0.0 <= each < 1e9 for each in told.seconds.values())
