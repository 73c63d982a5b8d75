"""What the demo asks for: a fixed, seeded sequence of calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SEED = 857  # puts small models first and the largest in the middle
SKEW = 1.1
"""Exponent of the popularity: few models get most of the calls, as on real platforms."""
BURST_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class Call:
    """One good call: the ``k``-th known input of a model."""

    model: str
    k: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """All good calls: a steady stream, and how many more come at once for one model that is cold."""

    before: tuple[Call, ...]
    burst: int
    after: tuple[Call, ...]
    ranking: tuple[str, ...]
    """The models, the most popular first."""


def plan(models: Sequence[str], jobs: int) -> Traffic:
    """``jobs`` calls over ``models`` with Zipf popularity; every model is asked for if ``jobs`` allow it."""
    rng = np.random.default_rng(SEED)
    ranking = [models[i] for i in rng.permutation(len(models))]
    weights = 1 / np.arange(1, len(ranking) + 1) ** SKEW
    burst = int(jobs * BURST_SHARE)
    steady = jobs - burst
    # Each one once, then by popularity: a rare model that is never called would prove nothing.
    picks = list(range(min(len(ranking), steady)))
    picks += rng.choice(len(ranking), steady - len(picks), p=weights / weights.sum()).tolist()
    rng.shuffle(picks)
    calls = [Call(ranking[pick], int(k)) for pick, k in zip(picks, rng.integers(0, 4, len(picks)), strict=True)]
    middle = len(calls) // 2
    return Traffic(tuple(calls[:middle]), burst, tuple(calls[middle:]), tuple(ranking))
