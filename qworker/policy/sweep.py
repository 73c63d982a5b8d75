"""Which models the sweeper wakes: jobs are ready and nobody consumes them.

A publish is routed before it is enqueued, so each check that a worker makes can miss a job on its way.
The sweep looks again and again at what is really in the queues; all else only makes waking fast.
"""

from __future__ import annotations

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
