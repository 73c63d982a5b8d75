"""What every model did, minute by minute: from counts that are kept anyway, so that it costs a job nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from qworker.policy.history import Minute, Tally
from qworker.telemetry.counters import Counters


class Minutes:
    """Owned here: the sums of the open minute, and the counts that were summed up already."""

    def __init__(self, counters: Counters, wall: Callable[[], float] = time.time) -> None:
        self._counters = counters
        self._wall = wall
        self._tally = Tally()
        self._seen: dict[str, tuple[int, float]] = {}

    def loaded(self, model: str, load_seconds: float, nbytes: int) -> None:
        """A load ended."""
        self._tally.loaded(model, load_seconds, nbytes, self._wall())

    def look(self) -> list[str]:
        """Sum up what came since the last look; the models that had jobs."""
        wall, active = self._wall(), list[str]()
        for model, measured in self._counters.measures.models.items():
            jobs, waited = self._seen.get(model, (0, 0.0))
            if measured.jobs == jobs:
                continue
            active.append(model)
            self._tally.used_often(model, measured.jobs - jobs, wall)
            if measured.cold.sum > waited:
                self._tally.waited(model, measured.cold.sum - waited, wall)
            self._seen[model] = (measured.jobs, measured.cold.sum)
        return active

    def take(self, *, all_of_it: bool = False) -> list[Minute]:
        """The rows of the minutes that are over; of the open one too, at a stop."""
        return self._tally.take(self._wall(), all_of_it=all_of_it)
