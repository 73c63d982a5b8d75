"""Which fault happens when: drawn from a seed, so that a run can be had again. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

WORKER_FAULTS = ("kill", "pause", "hang", "terminate", "evictions", "malformed")
"""One after the other, beside the others."""
PLATFORM_FAULTS = (
    "broker_restart",
    "connection_close",
    "disk_full",
    "model_corrupt",
    "model_truncated",
    "store_slow",
    "memory_alarm",
    "clock_jump",
)


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault, so many seconds after the end of the one before it in its lane.

    ``draws`` are numbers from 0 to 1 for what else is left to chance: which worker, which model, how long.
    """

    kind: str
    pause: float
    draws: tuple[float, float, float]


def plan(seed: int, lane: str, kinds: Sequence[str], count: int, shortest: float, longest: float) -> list[Planned]:
    """``count`` faults of these kinds. Each kind comes once before any of them comes again."""
    chance = random.Random(f"{seed}/{lane}")
    planned: list[Planned] = []
    bag: list[str] = []
    for _ in range(count):
        if not bag:
            bag = list(kinds)
            chance.shuffle(bag)
        draws = (chance.random(), chance.random(), chance.random())
        planned.append(Planned(bag.pop(), chance.uniform(shortest, longest), draws))
    return planned
