"""Which models the sweeper wakes: jobs are ready and nobody consumes them.

A publish is routed before it is enqueued, so each check that a worker makes can miss a job on its way.
The sweep looks again and again at what is really in the queues; all else only makes waking fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence


def needs_wake(lanes: Iterable[tuple[int, int]]) -> bool:
    """True when a model's lanes, each ``(ready, consumers)``, hold jobs that nobody consumes.

    A consumer on one lane counts for all: a worker that serves a model consumes all its lanes. The
    count may be too high for a while (quorum queues count a cancelled consumer until its deliveries are
    settled); that only delays a wake to the next sweep.
    """
    ready = consumers = 0
    for lane_ready, lane_consumers in lanes:
        ready += lane_ready
        consumers += lane_consumers
    return ready > 0 and consumers == 0


class Sweep:
    """Turns the depths of one look into the models to wake, the longest waiting first.

    A model stays without a consumer for as long as it loads, so a wake is not repeated within ``gap``
    seconds. It is repeated after that, for ever: any wake may be lost.
    """

    def __init__(self, gap: float = 5.0) -> None:
        self._gap = gap
        self._waiting_since: dict[str, float] = {}
        self._woken: dict[str, float] = {}

    def wakes(self, depths: Mapping[str, Sequence[tuple[int, int]]], now: float) -> tuple[str, ...]:
        """Models to wake now. ``depths`` has all models: who is missing is forgotten."""
        wanting = {model for model, lanes in depths.items() if needs_wake(lanes)}
        self._waiting_since = {model: self._waiting_since.get(model, now) for model in wanting}
        self._woken = {model: at for model, at in self._woken.items() if model in wanting}
        due = [model for model in wanting if model not in self._woken or now >= self._woken[model] + self._gap]
        self._woken.update(dict.fromkeys(due, now))
        return tuple(sorted(due, key=lambda model: (self._waiting_since[model], model)))


class Schedule:
    """Which models to look at in each sweep: the lively ones every time, the quiet ones in turn.

    A job is stranded when its model was claimed and let go again, by a crash say; a model that nobody has
    claimed has no job that did not leave a hint. So those are lively that were claimed within ``linger``
    seconds, or had jobs or consumers at the last look. The others are looked at once in ``slow`` seconds all
    the same: hints can be lost too. A model that was never looked at comes first.
    """

    def __init__(self, interval: float, slow: float = 25.0, linger: float = 300.0) -> None:
        self._share = min(1.0, interval / slow)
        self._linger = linger
        self._looked: dict[str, float] = {}  # oldest first
        self._lively_until: dict[str, float] = {}

    def stir(self, model: str, now: float) -> None:
        """``model`` was claimed."""
        self._lively_until[model] = now + self._linger

    def due(self, models: Sequence[str], now: float) -> list[str]:
        """What to look at now; it counts as looked at."""
        known = set(models)
        self._looked = {model: at for model, at in self._looked.items() if model in known}
        self._lively_until = {m: until for m, until in self._lively_until.items() if m in known and until > now}
        fresh = [model for model in models if model not in self._looked]
        lively = [model for model in self._lively_until if model in self._looked]
        quiet = [model for model in self._looked if model not in self._lively_until]
        found = fresh + lively + quiet[: math.ceil(len(models) * self._share)]
        for model in found:
            self._looked.pop(model, None)
            self._looked[model] = now
        return found

    def saw(self, model: str, lanes: Iterable[tuple[int, int]], now: float) -> None:
        """What a look found: ``(ready, consumers)`` of each lane."""
        if any(ready or consumers for ready, consumers in lanes):
            self.stir(model, now)
