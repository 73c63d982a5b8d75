"""Traces made to hurt: nobody starves, and swaps stay within what the brake promises."""

from __future__ import annotations

import pytest

from qworker.policy.choice import POLICIES
from qworker.simulate.fleet import Fleet
from qworker.simulate.replay import replay
from qworker.simulate.trace import Trace, make_trace
from tests.simulate.adversarial import (
    LOAD,
    MIB,
    crowd_of_cold,
    flash_crowd,
    longest_cold_wait,
    round_robin,
    scan_through_hot_set,
    tiny_beside_huge,
    too_big,
    twelve_models,
    unit_costs,
)

CASES: dict[str, tuple[Trace, int]] = {
    "ABAB": (round_robin(2, every=1.0, seconds=1_800.0), 100 * MIB),
    "ABAB, slowly": (round_robin(2, every=7.0, seconds=3_600.0), 100 * MIB),
    "ABCABC": (round_robin(3, every=1.0, seconds=1_800.0), 200 * MIB),
    "scan": (scan_through_hot_set(), 500 * MIB),
    "flash crowd": (flash_crowd(), 800 * MIB),
    "too big": (too_big(), 200 * MIB),
    "tiny beside huge": (tiny_beside_huge(), 400 * MIB),
    "crowd of cold": (crowd_of_cold(), 200 * MIB),
}


@pytest.mark.parametrize("brake", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_nobody_starves(case: str, slots: int, brake: bool) -> None:
    """Under each policy all are answered within the bound, and only what is too big is refused."""
    trace, budget = CASES[case]
    for name, make in POLICIES.items():
        fleet = Fleet(budget, load_slots=slots, brake=brake)
        outcome = replay(trace, fleet, make, name)
        assert outcome.longest_wait <= longest_cold_wait(trace, fleet, outcome.most_cold), name
        assert outcome.refused == (90 if case == "too big" else 0)
        assert outcome.timeouts == 0


@pytest.mark.parametrize("models", [2, 3])
def test_swaps_are_bounded(models: int) -> None:
    """Without a brake a place turns over once per load and minimum residency; with it, each model once a hold."""
    trace = round_robin(models, every=1.0, seconds=1_800.0)
    places = models - 1
    loose = replay(trace, Fleet(places * 100 * MIB, load_slots=1, brake=False), POLICIES["gdsf"])
    assert loose.evictions <= places * (1_800.0 / (LOAD + 5.0) + 1.0)
    braked = replay(trace, Fleet(places * 100 * MIB, load_slots=1), POLICIES["gdsf"])
    (at, event) = braked.thrash[0]
    assert event.hold == 30.0
    assert set(event.models) == {f"m{i}" for i in range(models)}
    assert braked.evictions <= at / LOAD + models * ((1_800.0 - at) / event.hold + 1.0)
    assert braked.evictions < 0.4 * loose.evictions


def test_a_scan_does_not_touch_the_hot_set() -> None:
    """One-offs push out each other, never one of the four that are in use: each of those loads once."""
    trace, budget = CASES["scan"]
    for name in ("gdsf", "rate", "s3fifo"):
        outcome = replay(trace, Fleet(budget), POLICIES[name], name)
        assert [outcome.models[f"m{i}"].loads for i in range(4)] == [1, 1, 1, 1], name


def test_a_crowd_waits_for_one_load() -> None:
    """Thousands of requests for one cold model cause one load at first, and all wait for that one."""
    trace, budget = CASES["flash crowd"]
    outcome = replay(trace, Fleet(budget), POLICIES["gdsf"])
    assert outcome.models["m8"].requests == 6_000
    assert outcome.models["m8"].loads <= 2
    assert outcome.models["m8"].misses < 6_000 * 0.3


def test_a_model_that_cannot_fit_costs_the_others_nothing() -> None:
    """With and without the requests that are refused, the others load and wait the same."""
    trace, budget = CASES["too big"]
    names = [trace.models[i] for i in trace.which]
    without = make_trace(
        [(at, name) for at, name in zip(trace.times, names, strict=True) if name != "huge"], trace.costs
    )
    both = [replay(each, Fleet(budget), POLICIES["gdsf"]) for each in (trace, without)]
    assert both[0].loads == both[1].loads
    assert sorted(both[0].cold_waits) == sorted(both[1].cold_waits)


@pytest.mark.parametrize("load", [2.0, 10.0])
@pytest.mark.parametrize("rate", [1.0, 8.0])
def test_the_brake_keeps_throughput(load: float, rate: float) -> None:
    """Twelve models where eight fit: at least 70 % of what serving only the best eight would answer in time."""
    requests, fixed = twelve_models(load, rate)
    costs = unit_costs(12, load_seconds=load)
    answered = [
        outcome.requests - outcome.late
        for outcome in (
            replay(make_trace(these, costs, run_seconds=0.1), Fleet(800 * MIB, prefetch=1), POLICIES["gdsf"])
            for these in (fixed, requests)
        )
    ]
    assert answered[1] >= 0.7 * answered[0]
