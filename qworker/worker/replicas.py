"""Watches the backlog of a model that is hot here: asks others for a replica, and tells when this one may go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from qworker.broker.base import Delivery, Properties, Session
from qworker.errors import BrokerUnavailable
from qworker.policy.replicas import Pressure, Verdict
from qworker.telemetry.counters import Counters
from qworker.wire.topology import BACKLOG, COLD, HOPS_HEADER, REASON_HEADER, lane_queue
from qworker.worker.hot_zone import Clock
from qworker.worker.sweep import wake

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.5
MOST_HOPS = 8


class Backlog:
    """Looks at one model's queue while it is served here, for as long as ``watch`` runs."""

    def __init__(
        self, model: str, counters: Counters, clock: Clock, *, slots: int, target: float, linger: float
    ) -> None:
        """``slots``: the most replicas; ``target`` and ``linger`` as in ``policy.replicas``."""
        self._model = model
        self._counters = counters
        self._clock = clock
        self._slots = slots
        self._target = target
        self._linger = linger

    async def watch(self, session: Session, slot: int, load_seconds: float, in_hand: Callable[[], int]) -> bool:
        """Ask for replicas as long as there is too much to do; True when this one may leave.

        False when the session ended. A model that is in slot 0 and has nothing in hand costs the broker nothing.
        """
        pressure = Pressure(
            slot, slots=self._slots, target=self._target, linger=self._linger, load_seconds=load_seconds
        )
        measured = self._counters.measures.of(self._model)
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                if slot == 0 and not in_hand():
                    continue
                depth = await session.depth(lane_queue("jobs", self._model))
                if depth is None:
                    continue
                verdict = pressure.look(
                    ready=depth.ready, consumers=depth.consumers, done=measured.jobs, now=self._clock()
                )
                if verdict is Verdict.LEAVE:
                    log.info("model.replica_leaves", model=self._model, slot=slot, consumers=depth.consumers)
                    return True
                if verdict is Verdict.ASK and not session.blocked:
                    await self._ask(session, pressure.backlog, depth.consumers)
        except BrokerUnavailable:
            return False  # the model finds that, too

    async def _ask(self, session: Session, seconds: float, consumers: int) -> None:
        log.info("model.backlog", model=self._model, seconds=round(seconds, 2), consumers=consumers)
        self._counters.replicas_asked += 1
        await wake(session, self._model, BACKLOG)


async def pass_on(session: Session, delivery: Delivery) -> None:
    """Send a wish for a replica on its way again: this worker serves the model itself, and others may have room.

    It may come back, until no place is free here (see ``intake.PASSED_ON``) and some other worker is next; after a few
    rounds there is none.
    """
    hops = delivery.properties.headers.get(HOPS_HEADER, 0)
    if not isinstance(hops, int) or hops >= MOST_HOPS or session.blocked:
        return
    headers = {REASON_HEADER: BACKLOG, HOPS_HEADER: hops + 1}
    await session.publish(COLD, delivery.routing_key, b"", Properties(headers=headers))
