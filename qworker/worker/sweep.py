"""The sweep: one elected worker looks at every queue every few seconds and wakes what nobody serves.

A publish is routed before it is enqueued, so any check can miss a job that is on its way, and hints can
be lost. This second look is what makes delivery certain; everything else only makes it fast.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import structlog

from qworker.broker.base import Properties, Session
from qworker.policy.sweep import Sweep
from qworker.telemetry.counters import Counters
from qworker.wire.topology import COLD, REASON_HEADER, SWEEPER, lane_queue
from qworker.worker.hot_zone import Clock
from qworker.worker.registry import Registry

log = structlog.get_logger(__name__)

SETTLE_SECONDS = 3.0
"""After a broker restart a quorum queue says "0 ready" for up to 2 s."""


async def wake(session: Session, model: str, reason: str) -> None:
    """Publish a hint without a job: somebody should claim ``model``."""
    await session.publish(COLD, model, b"", Properties(headers={REASON_HEADER: reason}))


BATCH_PROBES = 16


class Sweeper:
    """Sweeps while it holds the sweeper's lease; otherwise tries to take it."""

    def __init__(self, registry: Registry, interval: float, counters: Counters, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._interval = interval
        self._counters = counters
        self._sweep = Sweep(gap=max(interval, 5.0))
        self._probed = 0  # where the slow round for unknown batch lanes goes on

    async def run(self, session: Session) -> None:
        """Runs until the session ends (BrokerUnavailable) or it is cancelled."""
        await asyncio.sleep(SETTLE_SECONDS)
        while not await session.lease(SWEEPER):  # the broker tells nobody when a lease is free
            jitter = random.uniform(0.8, 1.6)  # noqa: S311  # so that a fleet does not ask in step
            await asyncio.sleep(self._interval * jitter)
        log.info("sweeper.elected")
        try:
            while True:
                await self.sweep(session)
                await asyncio.sleep(self._interval)
        finally:
            if session.is_open:
                await session.release(SWEEPER)  # a worker that stops lets another one sweep at once

    async def sweep(self, session: Session) -> None:
        """Look once at the queues of every model."""
        models = await self._registry.models()
        batch = self._batch_lanes_to_look_at(models)
        queues = [lane_queue("jobs", model) for model in models] + [lane_queue("batch", model) for model in batch]
        lanes: dict[str, list[tuple[int, int]]] = {}
        for model, depth in zip([*models, *batch], await session.depths(queues), strict=True):
            if depth is not None:
                lanes.setdefault(model, []).append((depth.ready, depth.consumers))
        for model in batch:
            if len(lanes.get(model, ())) == 2:
                self._registry.has_batch_lane(model)
        for model in self._sweep.wakes(lanes, self._clock()):
            self._counters.wakes += 1
            log.info("sweeper.wake", model=model, lanes=lanes[model])
            await wake(session, model, "sweep")

    def _batch_lanes_to_look_at(self, models: Sequence[str]) -> list[str]:
        """The known batch lanes, and a few of the others in turn.

        A batch queue exists from its first use on, and asking for one that does not costs a channel: so the
        unknown ones are asked for in a slow round.
        """
        known = self._registry.batch_lanes()
        unknown = [model for model in models if model not in known]
        start = self._probed % max(1, len(unknown))
        probe = (unknown[start:] + unknown[:start])[:BATCH_PROBES]
        self._probed = start + len(probe)
        return sorted(known) + probe
