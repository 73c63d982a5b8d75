"""After a start: fill free bytes with what the history says is dearest, and stand in nobody's way.

One model at a time, only while no job's model loads or waits for bytes, and only into bytes that are free. What is
loaded so has no claim to stay: the first job for another model may push it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from qworker.policy.eviction import HALF_LIFE, Usage
from qworker.telemetry.counters import Counters
from qworker.worker.hot_zone import SPARE, HotZone
from qworker.worker.intake import Hint
from qworker.worker.registry import Registry

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.1
FIRST_PAUSE = 1.0
"""Jobs that waited for the start come first."""
SECOND_PAUSE = 5.0

Claim = Callable[[str, bool, Hint], bool]


class WarmStart:
    """Runs once. ``claim`` starts a claim as a hint does; ``is_loading``: whether it still has no model, or is over."""

    def __init__(
        self,
        zone: HotZone,
        registry: Registry,
        counters: Counters,
        claim: Claim,
        is_loading: Callable[[str], bool | None],
        *,
        share: float,
    ) -> None:
        """``share``: the part of the budget that may be filled."""
        self._zone = zone
        self._registry = registry
        self._counters = counters
        self._claim = claim
        self._is_loading = is_loading
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
            await self._until_quiet()
            if self._counters.evictions:
                break  # jobs want all the bytes that there are
            if self._zone.held + usage.nbytes > self._share * self._zone.budget:
                continue
            count += await self._preload(model, usage)
        return count

    async def _preload(self, model: str, usage: Usage) -> bool:
        hint = Hint(None)
        hint.unasked, hint.urgency = True, SPARE
        if not self._claim(model, False, hint):
            return False  # it is hot already, or the worker stops
        why = f"{usage.count:.3g} uses of late, a load takes {usage.load_seconds:.3g} s, and there are bytes to spare"
        while self._is_loading(model):  # noqa: ASYNC110  # some loads a start: not worth an event
            await asyncio.sleep(LOOK_SECONDS)
        if self._is_loading(model) is None:
            self._taken += 1
            return False
        log.info("model.preloaded", model=model, reason=why)
        self._counters.preloads += 1
        return True

    async def _until_quiet(self) -> None:
        """Wait while a job's model loads or waits for bytes: it needs the slot, the disk and the CPU."""
        while self._counters.measures.loading or self._zone.crowded:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
