"""Holds claims that would evict: for a moment, so that jobs come in runs (off by default), and while models push each
other out, so that the worker does more work than loads.

What to hold, and for how long, is decided in ``policy.thrash`` and ``policy.grouping``. A model that fits into free
bytes is never held, and none for longer than the hold after its first job came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from qworker.policy.grouping import Want, claim_at
from qworker.policy.thrash import Thrash, ThrashDetector
from qworker.telemetry.counters import Counters
from qworker.worker.hot_zone import Clock, HotZone, wait_at_most

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.2


class Brake:
    """Owned here: the detector, and since when each model is wanted that is not loaded."""

    def __init__(
        self,
        zone: HotZone,
        counters: Counters,
        clock: Clock,
        *,
        slots: int,
        group_window: float,
        max_hold: float,
    ) -> None:
        """``slots``: loads at once; ``max_hold``: the longest hold while models push each other out; 0: none."""
        self._zone = zone
        self._counters = counters
        self._clock = clock
        self._group_window = group_window
        self._detector = ThrashDetector(zone.budget, slots=slots, max_hold=max_hold) if max_hold > 0 else None
        self._wanted: dict[str, float] = {}
        self._thrash: Thrash | None = None

    @property
    def window(self) -> float:
        """Seconds that a claim which evicts is held now."""
        hold = self._detector.hold if self._detector is not None else 0.0
        return max(hold, self._group_window)

    def loaded(self, model: str, load_seconds: float, nbytes: int) -> None:
        """A load ended."""
        self._wanted.pop(model, None)
        if self._detector is not None:
            self._note(self._detector.loaded(model, load_seconds, nbytes, self._clock()))

    def evicted(self, model: str) -> None:
        """``model`` left to make room for another."""
        if self._detector is not None:
            self._detector.evicted(model, self._clock())

    def tick(self, active: Iterable[str]) -> None:
        """Time passed; ``active`` had jobs meanwhile."""
        if self._detector is None:
            return
        now = self._clock()
        for model in active:
            self._detector.used(model, now)
        self._note(self._detector.tick(now))

    async def hold(
        self,
        model: str,
        nbytes: int,
        load_seconds: float,
        kind: str,
        stirred: asyncio.Event,
        is_over: Callable[[], bool],
    ) -> None:
        """Wait until a claim of ``nbytes`` may go on, or ``is_over`` says, after a stir, that it need not."""
        oldest = self._wanted.setdefault(model, self._clock())
        held = False
        while not is_over():
            want = Want(oldest, load_seconds, self._zone.fits_free(nbytes, kind))
            left = claim_at(want, self.window) - self._clock()
            if left <= 0:
                break
            if not held:
                held = True
                self._counters.claims_held += 1
            stirred.clear()
            await wait_at_most(stirred, min(left, LOOK_SECONDS))

    def state(self) -> dict[str, Any]:
        """For ``/state``: how long claims are held, and who is to blame."""
        thrash = self._thrash
        if thrash is None or not thrash.braking:
            return {"hold": self.window, "models": [], "reason": ""}
        return {"hold": self.window, "models": list(thrash.models), "reason": thrash.reason}

    def _note(self, thrash: Thrash | None) -> None:
        if thrash is None:
            return
        self._thrash = thrash
        if thrash.braking:
            self._counters.brakes += 1
            log.warning(
                "zone.thrashing",
                models=list(thrash.models),
                reloads=thrash.reloads,
                hold=round(thrash.hold, 2),
                working_set=thrash.working_set,
                budget=thrash.budget,
                reason=thrash.reason,
            )
        else:
            log.info("zone.calm", reason=thrash.reason)
