"""A run's connection: its reply queue consumed, its lanes declared, opened anew whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from qworker.broker.base import Connector, Consumer, Delivery, Session
from qworker.errors import BrokerRefused, BrokerUnavailable, TopologyMismatch
from qworker.score.cargo import REPLY_PREFETCH
from qworker.wire.topology import Lane, Queue, QueueType, lane_queue, lane_topology, static_topology

_LOG = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
MOST_REFUSALS = 10
"""A broker that is still starting refuses too."""


class Line:
    """Owned here: the session and its consumer. ``run`` keeps them, from ``open`` to ``close``."""

    def __init__(
        self,
        connector: Connector,
        replies: Queue,
        models: Sequence[tuple[str, bool]],
        queue_type: QueueType,
        *,
        take: Callable[[Delivery], None],
        lost: Callable[[], None],
        reopened: Callable[[], None],
    ) -> None:
        """``models``: each with whether its card was read. ``take`` gets what comes to ``replies``."""
        self._connector = connector
        self._replies = replies
        self._models = dict(models)
        self._queue_type: QueueType = queue_type
        self._take = take
        self._on_lost = lost
        self._on_reopened = reopened
        self._session: Session | None = None
        self._consumer: Consumer | None = None
        self._opened = asyncio.Event()

    async def open(self) -> None:
        """Raises BrokerUnavailable, BrokerRefused, TopologyMismatch."""
        session = await self._connector.connect()
        try:
            await session.declare(self._replies)
            for model in self._models:
                await self.declare_lanes(session, model)
            self._consumer = await session.consume(self._replies.name, self._take, prefetch=REPLY_PREFETCH)
        except BaseException:
            await session.__aexit__(None, None, None)
            raise
        self._session = session
        self._opened.set()

    async def close(self) -> None:
        """Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.__aexit__(None, None, None)

    async def run(self) -> None:
        """Open a new session whenever one is lost, until cancelled. Raises BrokerRefused, TopologyMismatch."""
        while self._session is not None:
            session = self._session
            reason = await session.wait_closed()
            if reason is None:
                return
            _LOG.warning("connection to the broker lost, reopening it: %s", reason)
            self._session = None
            self._on_lost()
            await session.__aexit__(None, None, None)
            await self._reopen()
            self._on_reopened()

    @property
    def blocked(self) -> bool:
        """The broker takes no messages now."""
        return self._session is None or self._session.blocked

    async def ready(self) -> Session:
        """The session, once there is one."""
        while self._session is None or not self._session.is_open:
            self._opened.clear()
            await self._opened.wait()
        return self._session

    async def declare_lanes(self, session: Session, model: str) -> None:
        """The batch lane exists from its first use on; who serves a model, or refuses it, consumes both lanes."""
        lanes: tuple[Lane, ...] = ("jobs", "batch")
        depths = await session.depths([lane_queue(lane, model) for lane in lanes])
        missing: list[Lane] = [lane for lane, depth in zip(lanes, depths, strict=True) if depth is None]
        if not missing or (not self._models[model] and "jobs" in missing):
            return  # a name that nobody has looked up gets no queues; a worker does that if there is such a model
        entities = [entity for lane in missing for entity in lane_topology(lane, model, self._queue_type)]
        try:
            await session.declare(*static_topology(self._queue_type), *entities)
        except TopologyMismatch:  # somebody was quicker, with queues of the other type
            _LOG.debug("the queues of %s are there by now", model)

    async def forget_replies(self) -> None:
        """Delete the reply queue; without a connection it is left to expire."""
        session, consumer = await self.ready(), self._consumer
        try:
            if consumer is not None:  # first of all: a consumer whose queue goes ends its session
                await consumer.close()
            await session.delete_queue(self._replies.name)
        except BrokerUnavailable as exc:
            _LOG.warning("the reply queue %s is left to expire: %s", self._replies.name, exc)

    async def _reopen(self) -> None:
        pause, refusals = FIRST_PAUSE, 0
        while True:
            try:
                await self.open()
                return
            except BrokerRefused:
                refusals += 1
                if refusals > MOST_REFUSALS:
                    raise
            except BrokerUnavailable as exc:
                _LOG.debug("no connection yet: %s", exc)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, keeps no secret
            pause = min(2 * pause, LONGEST_PAUSE)
