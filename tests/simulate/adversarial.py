"""Traces made to hurt, and the bounds that hold for any trace."""

from __future__ import annotations

import math
import random

from qworker.simulate.fleet import Fleet
from qworker.simulate.trace import Cost, Trace, make_trace

MIB = 1 << 20
LOAD = 4.0


def unit_costs(models: int, *, load_seconds: float = LOAD) -> dict[str, Cost]:
    return {f"m{i}": Cost(100 * MIB, load_seconds) for i in range(models)}


def round_robin(models: int, *, every: float, seconds: float) -> Trace:
    """ABAB or ABCABC: one request of each in turn."""
    count = int(seconds / every)
    return make_trace([(i * every, f"m{i % models}") for i in range(count)], unit_costs(models))


def scan_through_hot_set(*, seconds: float = 7_200.0) -> Trace:
    """Four models asked for every two seconds, and once in 20 s one that never comes back."""
    hot = [(i * 0.5, f"m{i % 4}") for i in range(int(seconds / 0.5))]
    once = [(i * 20.0 + 7.0, f"m{100 + i}") for i in range(int(seconds / 20.0))]
    return make_trace(hot + once, unit_costs(100 + len(once)))


def flash_crowd() -> Trace:
    """A cold model is suddenly asked for 200 times a second, while eight others go on."""
    chance = random.Random("flash crowd")
    steady = [(i * 0.25, f"m{chance.randrange(8)}") for i in range(4 * 600)]
    crowd = [(300.0 + i / 200.0, "m8") for i in range(200 * 30)]
    return make_trace(steady + crowd, unit_costs(9))


def too_big() -> Trace:
    """One model does not fit at all; nobody else may feel it."""
    costs = {**unit_costs(3), "huge": Cost(10_000 * MIB, 60.0)}
    requests = [(i * 1.0, f"m{i % 3}") for i in range(900)] + [(i * 10.0 + 0.5, "huge") for i in range(90)]
    return make_trace(requests, costs)


def tiny_beside_huge() -> Trace:
    """Fifty tiny models keep coming, and one that needs nearly all of the budget wants in now and then."""
    chance = random.Random("tiny beside huge")
    costs = {f"t{i}": Cost(10 * MIB, 0.5) for i in range(50)} | {"huge": Cost(390 * MIB, 8.0)}
    tiny = [(i * 0.2, f"t{chance.randrange(50)}") for i in range(5 * 1_800)]
    return make_trace(tiny + [(i * 120.0 + 60.0, "huge") for i in range(15)], costs)


def crowd_of_cold(models: int = 40) -> Trace:
    """All models are asked for at one instant, again and again."""
    return make_trace([(round_ * 900.0, f"m{i}") for round_ in range(4) for i in range(models)], unit_costs(models))


def longest_cold_wait(trace: Trace, fleet: Fleet, most_cold: int, *, longest_run: float = 0.0) -> float:
    """The bound on any wait for a load (docs/eviction.md), when at most ``most_cold`` models wait at once.

    A worker takes ``load_slots`` hints at a time, the oldest first. Of these claims, each is admitted at the
    latest ``max_cold_wait`` after it came plus, for each one before it, what a newcomer keeps: its load,
    ``min_residency`` and its first job, and what is in hand. The brake, or a window, holds a model's first
    claim for at most ``hold`` more.
    """
    load = max(trace.costs[model].load_seconds for model in trace.models)
    hold = max(fleet.group_window, fleet.max_cold_wait if fleet.brake else 0.0)
    newcomer = load + fleet.min_residency + longest_run + fleet.unload_seconds
    turn = fleet.max_cold_wait + fleet.load_slots * newcomer + load
    return hold + math.ceil(most_cold / (fleet.load_slots * fleet.workers)) * turn


def twelve_models(load: float, rate: float) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    """A quarter of an hour of requests of twelve models, each at ``rate`` a second, and those of the first eight.

    ``load`` only chooses the random numbers.
    """
    chance = random.Random(f"{load} {rate}")
    requests: list[tuple[float, str]] = []
    for i in range(12):
        at = chance.expovariate(rate)
        while at < 900.0:
            requests.append((at, f"m{i}"))
            at += chance.expovariate(rate)
    fixed = [(at, model) for at, model in requests if int(model[1:]) < 8]
    return requests, fixed
