"""One model's consumers: made, watched, made anew when the broker drops one, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from qworker.broker.base import Consumer, ConsumerLost, Session
from qworker.errors import BrokerError
from qworker.policy.subscription import Doubt, fitting_prefetch, outlasts
from qworker.store.card import Card
from qworker.telemetry.counters import Counters
from qworker.wire.topology import Lane, lane_queue
from qworker.worker.offline import PREFETCH, OfflineLane
from qworker.worker.registry import Registry
from qworker.worker.serve import Server

log = structlog.get_logger(__name__)

DELETION_SECONDS = 0.5
"""Within which the broker has deleted a queue to the end."""


class AckTimeout:
    """How long the broker lets a delivery be held (its ``consumer_timeout``), as far as this worker knows.

    AMQP does not tell it, so it starts as the settings say; a broker before 4.3 tells it when it strikes.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def struck(self, lost: ConsumerLost) -> None:
        told = lost.ack_timeout
        if told is not None and told < self.seconds:
            log.warning(
                "broker.consumer_timeout",
                told=told,
                expected=self.seconds,
                advice="set consumer_timeout here to the broker's, or raise consumer_timeout in rabbitmq.conf",
            )
            self.seconds = told


class Subscriptions:
    """Owned here, on the event loop: the consumers, one a lane, and whether one of them is lost."""

    def __init__(
        self,
        model: str,
        server: Server,
        offline: OfflineLane,
        registry: Registry,
        counters: Counters,
        ack_timeout: AckTimeout,
        stir: Callable[[], None],
        *,
        prefetch: int,
        lanes: int,
    ) -> None:
        """``stir`` has the owner call :meth:`mend` soon. ``lanes``: how many runs there are at once."""
        self._model = model
        self._server = server
        self._offline = offline
        self._registry = registry
        self._counters = counters
        self._ack_timeout = ack_timeout
        self._stir = stir
        self._least = prefetch
        self._run_lanes = lanes
        self._consumers: dict[Lane, Consumer] = {}
        self._doubts: dict[Lane, Doubt] = {}
        self._lost = False
        self.counted: dict[str, int] = {}
        """Consumers of each lane's queue, all workers', by the broker's last count."""

    @property
    def expected(self) -> int:
        """Consumers that this worker has, as it believes."""
        return len(self._consumers)

    async def start(self, session: Session, card: Card | None) -> None:
        """Consume the lanes that there are. Raises BrokerError when the jobs' queue is missing."""
        self._lost = False
        await self._consume("jobs", session, card)
        if self._model in self._registry.batch_lanes():
            await self._consume("batch", session, card)

    async def stop(self) -> None:
        """Cancel, wait for cancel-ok, then until all that was delivered is settled."""
        consumers = list(self._consumers.values())
        self.forget()
        for consumer in consumers:
            await consumer.cancel()
        await self._offline.stop()
        await self._server.idle()
        for consumer in consumers:
            await consumer.close()

    def forget(self) -> None:
        """They ended with their session, or are about to: nobody else comes, what is in hand waits for nobody."""
        self._consumers, self._doubts, self.counted = {}, {}, {}
        self._server.window = 0
        self._offline.server.window = 0

    async def mend(self, session: Session, card: Card | None, *, look: bool) -> None:
        """Make lost consumers anew, and one for a batch lane that is new. Raises BrokerError when a queue is missing.

        What was delivered to a lost consumer is in the queue again, and runs here as well: so it is ended first.
        Its answer is sent all the same, and a caller drops the second one by its id. Unless told to ``look``, only
        what the broker has told us of is mended.
        """
        if look and not self._lost:
            await self._look(session)
        if self._lost:
            self._counters.consumers_lost += 1
            await self.stop()
            await self._until_settled(session)
            await self.start(session, card)
            log.info("consumer.made_anew", model=self._model)
        elif self._is_batch_lane_known() or (look and await self._is_batch_lane_new(session)):
            self._registry.has_batch_lane(self._model)
            await self._consume("batch", session, card)

    async def _until_settled(self, session: Session) -> None:
        """Raises BrokerError when the queue is gone.

        RabbitMQ 4 closes the whole connection (541) of one that consumes from a queue in the middle of its deletion.
        """
        await asyncio.sleep(DELETION_SECONDS)
        queue = lane_queue("jobs", self._model)
        if await session.depth(queue) is None:
            raise BrokerError(f"expected queue {queue!r} to consume from, found none. Declare it first")

    def _is_batch_lane_known(self) -> bool:
        """Others may have found it meanwhile. A model that refuses its jobs must not leave those of one lane."""
        return "batch" not in self._consumers and self._model in self._registry.batch_lanes()

    async def _is_batch_lane_new(self, session: Session) -> bool:
        """A batch queue exists from its first use on, which may come while we are hot."""
        if "batch" in self._consumers or not self._registry.may_have_batch_lane(self._model):
            return False
        return await session.depth(lane_queue("batch", self._model)) is not None

    async def _look(self, session: Session) -> None:
        """Compare what we have with what the broker counts."""
        lanes = list(self._consumers)
        depths = await session.depths([lane_queue(lane, self._model) for lane in lanes])
        for lane, depth in zip(lanes, depths, strict=True):
            ready, consumers = (depth.ready, depth.consumers) if depth is not None else (0, 0)
            self.counted[lane] = consumers
            in_hand = self._server.in_hand + self._offline.in_hand
            done = self._server.measured.jobs
            why = self._doubts[lane].look(ready=ready, consumers=consumers, in_hand=in_hand, done=done)
            if why is not None:
                self._lose(why)

    def _told(self, lost: ConsumerLost) -> None:
        self._ack_timeout.struck(lost)
        self._lose(str(lost))
        self._stir()

    def _lose(self, why: str) -> None:
        log.warning("consumer.lost", model=self._model, reason=why)
        self._lost = True

    async def _consume(self, lane: Lane, session: Session, card: Card | None) -> None:
        online = lane == "jobs"
        prefetch = self._prefetch(card) if online else PREFETCH
        taker = (self._server if online else self._offline).taker(session)
        self._consumers[lane] = await session.consume(
            lane_queue(lane, self._model), taker, prefetch=prefetch, on_lost=self._told
        )
        self._doubts[lane] = Doubt()
        (self._server if online else self._offline.server).window = prefetch

    def _prefetch(self, card: Card | None) -> int:
        wanted = self._server.prefetch(self._least)
        # Run times are those of a sample alone. Larger jobs take longer: for those the broker's word has to do.
        seconds = min((run.seconds for run in card.run_times), default=None) if card is not None else None
        limit = self._ack_timeout.seconds
        if outlasts(seconds, limit):
            log.error(
                "model.outlasts_consumer_timeout",
                model=self._model,
                run_seconds=seconds,
                consumer_timeout=limit,
                advice="raise consumer_timeout in rabbitmq.conf: the broker gives a job to another that is held longer",
            )
        return fitting_prefetch(wanted, seconds, self._run_lanes, limit)
