"""Traces that are made, each from its seed alone: shapes of traffic that an eviction policy has to live with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import accumulate

from qworker.simulate.trace import Trace, make_trace

DAY = 86_400.0

Requests = list[tuple[float, str]]


def zipf(
    seed: int, *, requests: int = 10_000, models: int = 100, seconds: float = 7 * DAY, slope: float = 1.0
) -> Requests:
    """Independent requests with a popularity that never changes."""
    chance = random.Random(f"zipf {seed}")
    weights = list(accumulate(1.0 / (rank + 1) ** slope for rank in range(models)))
    names = [f"m{rank:03d}" for rank in range(models)]
    who = chance.choices(names, cum_weights=weights, k=requests)
    return list(zip(sorted(chance.uniform(0.0, seconds) for _ in range(requests)), who, strict=True))


def drifting(seed: int, *, requests: int = 10_000, models: int = 100, days: int = 10) -> Requests:
    """Popularity is dealt anew for a tenth of the models each day, as when customers come and go."""
    chance = random.Random(f"drifting {seed}")
    ranks = list(range(models))
    out: Requests = []
    weights = list(accumulate(1.0 / (rank + 1) for rank in range(models)))
    for day in range(days):
        moved = chance.sample(range(models), models // 10)
        for place, model in zip(moved, chance.sample([ranks[i] for i in moved], len(moved)), strict=True):
            ranks[place] = model
        for rank in chance.choices(range(models), cum_weights=weights, k=requests // days):
            out.append((day * DAY + chance.uniform(0.0, DAY), f"m{ranks[rank]:03d}"))
    return sorted(out)


def bursty(seed: int, *, sessions: int = 1_500, models: int = 100, seconds: float = 7 * DAY) -> Requests:
    """Sessions: somebody works with a rare model for some minutes and is gone for hours."""
    chance = random.Random(f"bursty {seed}")
    weights = list(accumulate(1.0 / (rank + 1) ** 0.8 for rank in range(models)))
    out: Requests = []
    for _ in range(sessions):
        at, model = chance.uniform(0.0, seconds), chance.choices(range(models), cum_weights=weights)[0]
        for _ in range(1 + int(chance.expovariate(1 / 7.0))):
            out.append((at, f"m{model:03d}"))
            at += chance.expovariate(1 / 90.0)
    return sorted(out)


def daily(seed: int, *, requests: int = 10_000, models: int = 100, days: int = 10) -> Requests:
    """Each model has an hour of the day around which it is asked for."""
    chance = random.Random(f"daily {seed}")
    weights = list(accumulate(1.0 / (rank + 1) ** 0.8 for rank in range(models)))
    peaks = [chance.uniform(0.0, DAY) for _ in range(models)]
    out: Requests = []
    for rank in chance.choices(range(models), cum_weights=weights, k=requests):
        at = peaks[rank] + chance.gauss(0.0, 2.5 * 3_600.0)
        out.append((chance.randrange(days) * DAY + at % DAY, f"m{rank:03d}"))
    return sorted(out)


def scanned(seed: int, *, requests: int = 10_000, models: int = 60, one_offs: int = 120) -> Requests:
    """A stable hot set, and models that are asked for once and never again."""
    chance = random.Random(f"scanned {seed}")
    once = [(chance.uniform(0.0, 7 * DAY), f"once{i:04d}") for i in range(one_offs)]
    return sorted(zipf(seed, requests=requests, models=models) + once)


def clockwork(*, models: int = 24, days: int = 14, per_day: int = 40) -> Requests:
    """Each model is asked for in its own hour, every day at the same time: what a forecast can see coming."""
    return sorted(
        (day * DAY + (model % 24) * 3_600.0 + 3_600.0 * i / per_day, f"m{model:02d}")
        for day in range(days)
        for model in range(models)
        for i in range(per_day)
    )


WORKLOADS: dict[str, Callable[[int], Requests]] = {
    "zipf": zipf,
    "drifting": drifting,
    "bursty": bursty,
    "daily": daily,
    "scanned": scanned,
}


def synthetic(name: str, seed: int) -> Trace:
    """One workload of the set, with sizes and load seconds drawn."""
    return make_trace(WORKLOADS[name](seed), seed=seed)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
