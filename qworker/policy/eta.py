"""How long a load will take, and how much of it is done: learned from the loads that were measured here.

Pure. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Final

STAGES: Final = ("fetch", "room", "slot", "load")
"""Of a load, in their order. ``fetch`` reads and verifies; ``room`` waits for bytes; ``slot`` for a load slot."""
WORK: Final = ("fetch", "load")
"""Those that are work; the others are waits, which a load may do without."""

_WEIGHT: Final = 0.3
"""Of a new measurement in the moving averages, as in ``policy.eviction``."""
_BYTES_A_SECOND: Final = 1e9
"""At which files are read and verified, before that was measured."""
_LEAST: Final = 1e-3
_MOST_FACTOR: Final = 20.0
_NEARLY: Final = 0.99
"""Of a stage that is not over, however long it takes."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The expected seconds of one load's stages; a wait that is not expected has 0."""

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def left(self, stage: str, passed: float) -> float:
        """Seconds until the load is done, when it has been at ``stage`` for ``passed``.

        What overruns its estimate is expected to take as much longer as it has overrun.
        """
        expected = self.seconds.get(stage, 0.0)
        return abs(expected - passed) + sum(self.seconds.get(later, 0.0) for later in _after(stage))

    def share(self, stage: str, passed: float) -> float:
        """How much of the work is done, 0 to 1; waits do not count."""
        work = sum(max(_LEAST, self.seconds.get(each, 0.0)) for each in WORK)
        done = sum(max(_LEAST, self.seconds.get(each, 0.0)) for each in WORK if each in _before(stage))
        if stage in WORK:
            expected = max(_LEAST, self.seconds.get(stage, 0.0))
            done += expected * min(_NEARLY, passed / expected)
        return min(_NEARLY, done / work)


class LoadTimes:
    """What loads took here. One owner, who reports each load that went well."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, float]] = {}  # the work stages of each, moving averages
        self._factor = 0.0  # log of measured load seconds over those of the card, of all models
        self._factor_known = False
        self._per_byte: float | None = None
        self._waits: dict[str, float] = {}  # of those that had to wait at all

    def expect(
        self,
        model: str,
        *,
        card_seconds: float,
        nbytes: int,
        measured: float | None = None,
        must_wait: bool = False,
    ) -> Loading:
        """The stages of a load of ``model``.

        ``card_seconds`` is what its card says and ``nbytes`` what its files have. ``measured``: what loads of it took
        here before this process began. ``must_wait``: its bytes are not free.
        """
        known = self._models.get(model, {})
        load = known.get("load", measured)
        if load is None:
            load = card_seconds * exp(self._factor)
        fetch = known.get("fetch")
        if fetch is None:
            fetch = nbytes * (1.0 / _BYTES_A_SECOND if self._per_byte is None else self._per_byte)
        room = self._waits.get("room", load) if must_wait else 0.0
        return Loading({"fetch": fetch, "room": room, "slot": 0.0, "load": load})

    def again(self, model: str) -> float | None:
        """Seconds of a load of ``model`` whose card was not read yet; None where none was measured."""
        known = self._models.get(model)
        return None if known is None else sum(known.values())

    def loaded(self, model: str, stages: Mapping[str, float], *, card_seconds: float, nbytes: int) -> None:
        """A load took so many seconds at each of its stages."""
        known = self._models.setdefault(model, {})
        for stage in WORK:
            if stage in stages:
                known[stage] = _moved(known.get(stage), stages[stage])
        for stage, seconds in stages.items():
            if stage not in WORK and seconds > _LEAST:
                self._waits[stage] = _moved(self._waits.get(stage), seconds)
        if "load" in stages and card_seconds > 0.0:
            factor = log(min(_MOST_FACTOR, max(1.0 / _MOST_FACTOR, max(_LEAST, stages["load"]) / card_seconds)))
            self._factor = _moved(self._factor if self._factor_known else None, factor)
            self._factor_known = True
        if "fetch" in stages and nbytes > 0:
            self._per_byte = _moved(self._per_byte, stages["fetch"] / nbytes)


def _moved(average: float | None, new: float) -> float:
    return new if average is None else average + _WEIGHT * (new - average)


def _before(stage: str) -> tuple[str, ...]:
    return STAGES[: STAGES.index(stage)] if stage in STAGES else ()


def _after(stage: str) -> tuple[str, ...]:
    return STAGES[STAGES.index(stage) + 1 :] if stage in STAGES else STAGES
