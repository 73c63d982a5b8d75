"""Cold models go to the worker that is readiest: what it saves against taking turns."""

from __future__ import annotations

import random
from math import prod

import pytest

from qworker.policy.choice import POLICIES
from qworker.simulate.fleet import Fleet
from qworker.simulate.replay import replay
from qworker.simulate.trace import Cost, make_trace
from tests.simulate.workloads import daily, drifting, zipf

WORKERS = 3


def load_seconds(make: object, seed: int, share: float) -> tuple[float, float]:
    """Of the same trace with placement at random and by readiness, with memory for ``share`` of the models."""
    assert callable(make)
    requests, chance = make(seed, requests=5_000), random.Random(seed)
    sizes = {model: int(chance.lognormvariate(5.5, 1.0)) + 20 for model in sorted({model for _, model in requests})}
    costs = {model: Cost(size, 0.5 + size / 100 * chance.uniform(0.5, 2.0)) for model, size in sizes.items()}
    budget = max(int(sum(sizes.values()) * share / WORKERS), *sizes.values())
    trace = make_trace(requests, costs)
    at_random, ready = (
        replay(trace, Fleet(budget, workers=WORKERS, placement=placement), POLICIES["gdsf"], "gdsf").load_seconds
        for placement in ("random", "ready")
    )
    return at_random, ready


@pytest.mark.parametrize(("share", "most"), [(0.9, 0.95), (0.5, 1.0)])
def test_placement_saves_load_seconds(share: float, most: float) -> None:
    """Most where nearly everything fits: a model goes where there is room, and pushes nobody out."""
    ratios = [
        ready / at_random
        for make in (zipf, drifting, daily)
        for seed in range(2)
        for at_random, ready in [load_seconds(make, seed, share)]
    ]
    assert prod(ratios) ** (1 / len(ratios)) <= most, ratios


def test_without_a_choice_it_changes_nothing() -> None:
    """One worker is always the readiest."""
    requests = zipf(1, requests=1_000)
    trace = make_trace(requests, {model: Cost(100, 2.0) for _, model in requests})
    by = [replay(trace, Fleet(2_000, placement=each), POLICIES["gdsf"], "gdsf") for each in ("random", "ready")]
    assert by[0].load_seconds == by[1].load_seconds
    assert list(by[0].cold_waits) == list(by[1].cold_waits)
