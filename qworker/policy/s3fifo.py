"""``s3fifo``: newcomers prove themselves in a small queue before they may push out what is established.

Pure. J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. The queues are ranked
instead of walked: a key says in which order the walk would reach the models, so that a model that cannot
go now (busy, pinned) is skipped without losing its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qworker.policy.eviction import Remembering

SMALL_SHARE = 0.1
"""Share of the resident bytes above which the newcomers' queue gives first."""
MAX_PASSES = 3
_GHOSTS_AT_LEAST = 16


@dataclass(slots=True)
class _Place:
    seq: int
    small: bool
    passes: int  # uses since it came in or since the walk passed it, at most MAX_PASSES
    nbytes: int


class S3Fifo(Remembering):
    """Blind to costs: for models whose loads cost about the same, with many that are asked for once."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, _Place] = {}  # the resident ones
        self._ghosts: dict[str, None] = {}  # left the small queue not long ago, oldest first
        self._seq = 0
        self._bytes = {True: 0, False: 0}  # by small

    def used(self, model: str, now: float) -> None:
        super().used(model, now)
        if (place := self._places.get(model)) is not None:
            place.passes = min(MAX_PASSES, place.passes + 1)

    def cost(self, model: str, load_seconds: float, nbytes: int) -> None:
        super().cost(model, load_seconds, nbytes)
        self._leave(model)  # stopped for reasons of its own, and here again
        known_ghost = model in self._ghosts
        self._ghosts.pop(model, None)
        # The use that caused the load comes after it, and does not count as a second one.
        self._enter(model, _Place(0, not known_ghost, -1, nbytes))

    def key(self, model: str, now: float) -> float:  # noqa: ARG002  # ranks do not change with time
        if (place := self._places.get(model)) is None:
            return float("-inf")
        total = self._bytes[True] + self._bytes[False]
        first = place.small and place.passes < 2 and self._bytes[True] > SMALL_SHARE * total
        # One pass of the walk is worth a whole round of the queue.
        return place.seq + (max(0, place.passes) - (MAX_PASSES + 1 if first else 0)) * float(self._seq + 1)

    def keys(self, models: Sequence[str], now: float) -> list[float]:
        return [self.key(model, now) for model in models]

    def evicted(self, model: str, now: float) -> None:
        super().evicted(model, now)
        if (gone := self._leave(model)) is None:
            return
        if gone.small and gone.passes < 2:
            self._remember_ghost(model)
        else:
            self._walk_to(gone)

    def _walk_to(self, gone: _Place) -> None:
        """What stood before the victim was passed: it goes to the back with one pass less."""
        passed = sorted(
            ((place.seq, model) for model, place in self._places.items() if place.seq < gone.seq and place.passes > 0)
        )
        for _, model in passed:
            if (place := self._leave(model)) is not None:
                self._enter(model, _Place(0, False, place.passes - (0 if place.small else 1), place.nbytes))

    def _enter(self, model: str, place: _Place) -> None:
        self._seq += 1
        place.seq = self._seq
        self._places[model] = place
        self._bytes[place.small] += place.nbytes

    def _leave(self, model: str) -> _Place | None:
        if (place := self._places.pop(model, None)) is not None:
            self._bytes[place.small] -= place.nbytes
        return place

    def _remember_ghost(self, model: str) -> None:
        self._ghosts[model] = None
        while len(self._ghosts) > max(_GHOSTS_AT_LEAST, len(self._places)):
            del self._ghosts[next(iter(self._ghosts))]
