"""Whom the sweeper wakes."""

from __future__ import annotations

import pytest

from qworker.policy.sweep import Sweep, needs_wake


@pytest.mark.parametrize(
    ("lanes", "wake"),
    [
        ([], False),
        ([(0, 0), (0, 0)], False),
        ([(3, 0)], True),
        ([(0, 0), (1, 0)], True),
        ([(3, 1)], False),
        ([(3, 0), (0, 1)], False),  # one consumer serves all lanes of a model
    ],
)
def test_jobs_without_a_consumer_deserve_a_wake(lanes: list[tuple[int, int]], wake: bool) -> None:
    """Ready jobs over all lanes, consumers over all lanes."""
    assert needs_wake(lanes) is wake


def test_a_wake_is_repeated_but_not_in_each_sweep() -> None:
    """A model has no consumer while it loads; yet any wake may be lost."""
    sweep = Sweep(gap=5.0)
    dark, fine = {"m": [(1, 0)]}, {"m": [(1, 1)]}
    assert [sweep.wakes(dark, now) for now in (0.0, 2.0, 4.0, 6.0, 8.0)] == [("m",), (), (), ("m",), ()]
    assert sweep.wakes(fine, 9.0) == ()
    assert sweep.wakes(dark, 10.0) == ("m",)


def test_the_longest_waiting_comes_first() -> None:
    """The queue of hints is bounded: who has waited longest must not be the one that is dropped."""
    sweep = Sweep(gap=0.0)
    sweep.wakes({"z": [(1, 0)], "a": [(0, 0)]}, 0.0)
    assert sweep.wakes({"z": [(1, 0)], "a": [(1, 0)]}, 2.0) == ("z", "a")


def test_a_model_that_is_gone_is_forgotten() -> None:
    """A removed and re-registered model is woken at once."""
    sweep = Sweep(gap=100.0)
    assert sweep.wakes({"m": [(1, 0)]}, 0.0) == ("m",)
    assert sweep.wakes({}, 1.0) == ()
    assert sweep.wakes({"m": [(1, 0)]}, 2.0) == ("m",)
