"""The sweep: one elected worker looks at every queue every few seconds and wakes what nobody serves.

A publish is routed before it is enqueued, so any check can miss a job that is on its way, and hints can
be lost. This second look is what makes delivery certain; everything else only makes it fast.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import structlog

from qworker.broker.base import Delivery, Properties, Session
from qworker.errors import PublishFailed, Unroutable
from qworker.policy.sweep import Schedule, Sweep
from qworker.telemetry.counters import Counters
from qworker.wire.topology import (
    BATCH_NEWS,
    COLD,
    EVENTS,
    REASON_HEADER,
    SWEEPER,
    SWEEPING,
    Binding,
    claimed,
    lane_queue,
)
from qworker.worker.hot_zone import Clock
from qworker.worker.registry import Registry

log = structlog.get_logger(__name__)

SETTLE_SECONDS = 3.0
"""After a broker restart a quorum queue says "0 ready" for up to 2 s."""


async def wake(session: Session, model: str, reason: str) -> None:
    """Publish a hint without a job: somebody should claim ``model``. One that is not taken does no harm: the next
    sweep finds the jobs."""
    try:
        await session.publish(COLD, model, b"", Properties(headers={REASON_HEADER: reason}))
    except PublishFailed as error:
        log.info("wake.unsent", model=model, reason=str(error))


BATCH_PROBES = 16
RARE_BATCH_PROBE_SECONDS = 10.0
"""Once all models were asked for: each that has no batch lane is an error in the broker's log."""
NEWS_PREFETCH = 1000


class Sweeper:
    """Sweeps while it holds the sweeper's lease; otherwise tries to take it.

    Owned here: the last look at each model, and the news of claims that came since the last sweep.
    """

    def __init__(self, registry: Registry, interval: float, counters: Counters, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._interval = interval
        self._counters = counters
        self._sweep = Sweep(gap=max(interval, 5.0))
        self._schedule = Schedule(interval)
        self._lanes: dict[str, list[tuple[int, int]]] = {}
        self._news: list[Delivery] = []
        self._probed = 0  # where the slow round for unknown batch lanes goes on
        self._probed_at = 0.0

    async def run(self, session: Session) -> None:
        """Runs until the session ends (BrokerUnavailable) or it is cancelled."""
        await asyncio.sleep(SETTLE_SECONDS)
        while await self._is_swept(session) or not await session.lease(SWEEPER):
            jitter = random.uniform(0.8, 1.6)  # noqa: S311  # so that a fleet does not ask in step
            await asyncio.sleep(self._interval * jitter)
        # Claims from before are no news: a first look at everything finds them.
        self._schedule, self._lanes, self._news, self._probed = Schedule(self._interval), {}, [], 0
        await session.declare(Binding(EVENTS, SWEEPER, claimed("#")), Binding(EVENTS, SWEEPER, SWEEPING))
        news = await session.consume(SWEEPER, self._news.append, prefetch=NEWS_PREFETCH)
        log.info("sweeper.elected")
        measures = self._counters.measures
        measures.sweeping = True
        try:
            while True:
                started = self._clock()
                await self.sweep(session)
                measures.sweeps += 1
                measures.sweep_seconds += self._clock() - started
                measures.depths = self._lanes
                await asyncio.sleep(self._interval)
        finally:
            measures.sweeping, measures.depths = False, {}
            if session.is_open:
                await news.close()  # first: a consumer that the broker has to cancel would cost the session
                await session.release(SWEEPER)  # a worker that stops lets another one sweep at once

    async def _is_swept(self, session: Session) -> bool:
        """Whether somebody holds the sweeper's lease, which the broker tells nobody when it is free.

        To try to take it would do as well, but the broker closes a channel and logs an error each time.
        """
        try:
            await session.publish(EVENTS, SWEEPING, b"", Properties(), mandatory=True)
        except Unroutable:
            return False
        return True

    async def sweep(self, session: Session) -> None:
        """Look once at the queues of the models that are due."""
        models = await self._registry.models()
        await self._take_news()
        due = self._schedule.due(models, self._clock())
        known = self._registry.batch_lanes()
        looks = [(model, lane_queue("jobs", model)) for model in due]
        looks += [(model, lane_queue("batch", model)) for model in due if model in known]
        lanes: dict[str, list[tuple[int, int]]] = {model: [] for model in due}
        depths = await session.depths([queue for _, queue in looks])
        for (model, _), depth in zip(looks, depths, strict=True):
            if depth is not None:
                lanes[model].append((depth.ready, depth.consumers))
        for model, found in lanes.items():
            self._schedule.saw(model, found, self._clock())
        await self._look_for_batch_lanes(session, [model for model in models if model not in known])
        there = frozenset(models)
        self._lanes = {model: found for model, found in (self._lanes | lanes).items() if model in there}
        for model in self._sweep.wakes(self._lanes, self._clock()):
            self._counters.wakes += 1
            log.info("sweeper.wake", model=model, lanes=self._lanes[model])
            await wake(session, model, "sweep")

    async def _take_news(self) -> None:
        """Models that were claimed since are lively."""
        news = self._news[:]
        self._news.clear()  # the consumer holds this very list
        for delivery in news:
            await delivery.ack()
            if delivery.routing_key == SWEEPING:
                continue
            model = delivery.routing_key.removeprefix(claimed(""))
            self._schedule.stir(model, self._clock())
            if delivery.body == BATCH_NEWS:
                self._registry.has_batch_lane(model)

    async def _look_for_batch_lanes(self, session: Session, unknown: Sequence[str]) -> None:
        """Ask for the batch lanes of a few models in turn.

        A batch queue exists from its first use on, and asking for one that does not costs a channel: so this is a
        slow round, and slower still once all were asked for. Who claims a model with one tells us (see ``claimed``).
        """
        most, now = BATCH_PROBES, self._clock()
        if self._probed >= len(unknown):
            if now - self._probed_at < RARE_BATCH_PROBE_SECONDS:
                return
            most = 1
        self._probed_at = now
        start = self._probed % max(1, len(unknown))
        probed = [*unknown[start:], *unknown[:start]][:most]
        self._probed += len(probed)
        depths = await session.depths([lane_queue("batch", model) for model in probed])
        for model, depth in zip(probed, depths, strict=True):
            if depth is not None:
                self._registry.has_batch_lane(model)
                self._schedule.stir(model, self._clock())  # the next sweep looks at both lanes
