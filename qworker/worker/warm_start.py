"""After a start: fill free bytes with what the history says is dearest, and stand in nobody's way.

One model at a time, only while no job's model loads or waits for bytes, and only into bytes that are free. What is
loaded so has no claim to stay: the first job for another model may push it out.
"""

from __future__ import annotations

import asyncio

import structlog

from qworker.policy.eviction import HALF_LIFE
from qworker.telemetry.counters import Counters
from qworker.worker.hot_zone import HotZone
from qworker.worker.preload import SpareLoads
from qworker.worker.registry import Registry

log = structlog.get_logger(__name__)

FIRST_PAUSE = 1.0
"""Jobs that waited for the start come first."""
SECOND_PAUSE = 5.0


class WarmStart:
    """Runs once."""

    def __init__(
        self, zone: HotZone, registry: Registry, counters: Counters, spare: SpareLoads, *, share: float
    ) -> None:
        """``share``: the part of the budget that may be filled."""
        self._zone = zone
        self._registry = registry
        self._counters = counters
        self._spare = spare
        self._share = share
        self._taken = 0

    async def run(self) -> int:
        """Load what fits; how many models that were."""
        await asyncio.sleep(FIRST_PAUSE)
        count = await self._fill()
        if self._taken:  # by another worker, or by the connection of a former self that the broker still sees
            await asyncio.sleep(SECOND_PAUSE)
            count += await self._fill()
        log.info("warm_start.done", models=count, held=self._zone.held)
        return count

    async def _fill(self) -> int:
        there, count = frozenset(await self._registry.models()), 0
        for model, usage in self._zone.dearest():
            if model not in there or usage.age > HALF_LIFE:
                continue
            await self._spare.until_quiet()
            if self._counters.evictions:
                break  # jobs want all the bytes that there are
            if self._zone.held + usage.nbytes > self._share * self._zone.budget:
                continue
            took = f"a load takes {usage.load_seconds:.3g} s"
            ready = await self._spare.load(
                model, f"{usage.count:.3g} uses of late, {took}, and there are bytes to spare"
            )
            self._taken += ready is None
            count += ready is True
        return count
