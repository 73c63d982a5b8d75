"""Whom the sweeper wakes."""

from __future__ import annotations

import pytest

from qworker.policy.sweep import Schedule, Sweep, needs_wake


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


def test_lively_models_are_looked_at_each_time_and_quiet_ones_in_turn() -> None:
    """A thousand quiet models cost a few looks a sweep, and none of them waits for long."""
    schedule = Schedule(interval=3.0, slow=30.0, linger=60.0)
    models = [f"m{number:03d}" for number in range(1000)]
    assert sorted(schedule.due(models, 0.0)) == models
    schedule.stir("m500", 1.0)
    looks = [schedule.due(models, 3.0 * sweep) for sweep in range(1, 11)]
    assert all("m500" in due for due in looks)
    assert all(len(due) == 101 for due in looks)
    assert {model for due in looks for model in due} == set(models)


def test_a_model_with_jobs_or_consumers_is_lively_until_it_has_had_none_for_a_while() -> None:
    """What was busy at the last look may have been let go of since."""
    schedule = Schedule(interval=1.0, slow=1000.0, linger=10.0)
    models = ["a", "b", "c"]
    schedule.due(models, 0.0)
    schedule.saw("b", [(0, 1)], 0.0)
    schedule.saw("c", [(0, 0)], 0.0)
    assert [schedule.due(models, now).count("b") for now in (1.0, 9.0)] == [1, 1]
    assert len(schedule.due(models, 10.0)) == 1  # the one quiet model whose turn it is


def test_a_new_model_is_looked_at_first() -> None:
    """Its first job may have come before we knew it."""
    schedule = Schedule(interval=1.0, slow=1000.0)
    schedule.due(["a", "b"], 0.0)
    assert schedule.due(["a", "b", "new"], 1.0)[0] == "new"
