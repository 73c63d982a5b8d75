"""Intake: hints that a cold model has jobs, and jobs that no queue wanted.

The prefetch on the activation queue is the number of load slots: a hint stays unsettled until its model
is loaded or given up, so that a worker is sent no more hints than it can load, and a crash while loading
returns the hint to the others at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from qworker.broker.base import Consumer, Delivery, Properties, Session
from qworker.errors import (
    BrokerError,
    DeadlineExceeded,
    InvalidInput,
    PublishFailed,
    StoreError,
    UnknownModel,
    Unroutable,
)
from qworker.telemetry.counters import Counters
from qworker.wire.names import check_model_id, shown
from qworker.wire.topology import (
    ACTIVATION,
    BACKLOG,
    BATCH,
    EVENTS,
    EXPIRED,
    REASON_HEADER,
    UNROUTABLE,
    Lane,
    QueueType,
    batch_opened,
    lane_topology,
)
from qworker.worker.expired import Expired
from qworker.worker.registry import Registry
from qworker.worker.replicas import pass_on
from qworker.worker.settle import Settler

log = structlog.get_logger(__name__)

UNROUTABLE_PREFETCH = 16
EXPIRED_PREFETCH = 64
STORE_PAUSE = 1.0
QUEUE_YOUTH = 2.0
"""Seconds. When RabbitMQ stops, it forgets quorum queues younger than about one, with the jobs that it confirmed. So
nothing is bound to a new queue before."""
STRAYS_LINGER = 30.0
PASSED_ON = 0.05
"""Seconds for which a wish that was sent on keeps its place in the prefetch here: were this worker the readiest, it
would come back at once, and never reach those that are less so."""
PLACE_LOOK = 0.5
"""Seconds between looks at how ready this worker is for one more model."""

Claim = Callable[[str, bool, "Hint"], bool]
"""Start claiming a model (for a replica, when the flag is set); False when the hint is of no use here."""

Handle = Callable[[Session, Delivery], Coroutine[Any, Any, None]]


class Hint:
    """A hint in hand. ``done`` settles it, once; on an ended session that is harmless."""

    def __init__(self, delivery: Delivery | None, settled: Callable[[], None] | None = None) -> None:
        self._delivery = delivery
        self._settled = settled
        self.urgency = 0
        """The priority of the job that the hint is a copy of; what may wait behind online jobs is below all."""
        self.unasked = False
        """An operator's order: the model is loaded although no job waits for it."""
        if delivery is not None:
            self.urgency = -1 if delivery.exchange == BATCH else delivery.properties.priority or 0

    async def done(self) -> None:
        delivery = self._take()
        if delivery is not None:
            await delivery.ack()

    async def give_back(self) -> None:
        """For another worker to take up: this one stops."""
        delivery = self._take()
        if delivery is not None:
            await delivery.give_back()

    def _take(self) -> Delivery | None:
        delivery, self._delivery = self._delivery, None
        if delivery is not None and self._settled is not None:
            self._settled()
        return delivery


class Intake:
    """Attends one session at a time."""

    def __init__(
        self,
        claim: Claim,
        registry: Registry,
        settler: Settler,
        counters: Counters,
        *,
        load_slots: int,
        queue_type: QueueType,
        readiness: Callable[[], int] | None = None,
    ) -> None:
        """``readiness``: how ready this worker is for one more model, as a level; hints go to the readiest."""
        self._readiness = readiness or (lambda: 0)
        self.place = 0
        """The level that the broker goes by now."""
        self._hints = 0  # in hand
        self._claim = claim
        self._registry = registry
        self._settler = settler
        self._counters = counters
        self._load_slots = load_slots
        self._queue_type: QueueType = queue_type
        self._opens: dict[tuple[Lane, str], float] = {}  # when a new queue may take jobs, by the loop's clock
        self._lasting: asyncio.TaskGroup | None = None
        self._ending: set[asyncio.Task[BrokerError | None]] = set()
        self._rests = asyncio.Event()
        self._rests.set()

    async def run(self, session: Session, lasting: asyncio.TaskGroup) -> None:
        """Take hints and unroutable jobs until cancelled. What is in hand stays in hand.

        But for what is being answered: that ends, as a task of ``lasting``. Cut off between the answer and the ack,
        the job would be answered again.
        """
        await self._settler.firewall.book.pay(session)
        self._lasting = lasting
        self._rests.clear()
        self._hints = 0  # those of a former session are the broker's again
        consumers: list[Consumer] = []
        leaving = False

        def take(handle: Handle, delivery: Delivery) -> None:
            if leaving:  # some were on their way when the consumer was cancelled
                lasting.create_task(_told(delivery.give_back()))
            else:
                tasks.create_task(handle(session, delivery))

        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    place = self._readiness()
                    for queue, handle, prefetch, priority in (
                        (ACTIVATION, self._on_hint, self._load_slots, place),
                        (UNROUTABLE, self._on_stray, UNROUTABLE_PREFETCH, 0),
                        (EXPIRED, self._on_expired, EXPIRED_PREFETCH, 0),
                    ):
                        consumers.append(
                            await session.consume(queue, partial(take, handle), prefetch=prefetch, priority=priority)
                        )
                    self.place = place
                    keeping = tasks.create_task(self._keep_place(session, consumers, partial(take, self._on_hint)))
                    try:
                        await session.wait_closed()
                    finally:
                        keeping.cancel()
                        await asyncio.wait({keeping})
                finally:
                    leaving = True
                    for consumer in consumers:
                        await consumer.cancel()
        finally:
            if self._ending:
                await asyncio.wait(self._ending)
            for consumer in consumers[1:]:  # hints stay in hand until their models are loaded
                await consumer.close()
            self._rests.set()

    async def _keep_place(self, session: Session, consumers: list[Consumer], take: Callable[[Delivery], None]) -> None:
        """Consume hints with the priority that this worker deserves, until cancelled.

        AMQP knows no other way to change it than a new consumer. That waits until no hint is in hand: those of a
        consumer that is cancelled would not count against the prefetch of the new one.
        """
        retired: list[Consumer] = []  # hints that came in that moment are settled on the channel that they came by
        while session.is_open:
            await asyncio.sleep(PLACE_LOOK)
            if self._hints:
                continue
            while retired:
                await retired.pop().close()
            place = self._readiness()
            if place != self.place and session.is_open:
                await consumers[0].cancel()
                retired.append(consumers[0])
                consumers[0] = await session.consume(ACTIVATION, take, prefetch=self._load_slots, priority=place)
                self.place = place

    async def rest(self) -> None:
        """Return when :meth:`run` has ended."""
        await self._rests.wait()

    async def _on_hint(self, session: Session, delivery: Delivery) -> None:
        self._hints += 1
        model, hint = delivery.routing_key, Hint(delivery, self._hint_settled)
        self._counters.hints += 1
        self._registry.saw(model)
        if delivery.exchange == BATCH:
            self._registry.has_batch_lane(model)
        backlog = delivery.properties.headers.get(REASON_HEADER) == BACKLOG
        claimed = self._claim(model, backlog, hint)
        assert self._lasting is not None, "nothing is delivered before run"
        self._settler.progress.hinted(session, delivery, self._lasting.create_task, claimed=claimed)
        if not claimed:
            self._counters.hints_stale += 1
            if backlog:
                await pass_on(session, delivery)
                await asyncio.sleep(PASSED_ON)
            await hint.done()

    def _hint_settled(self) -> None:
        self._hints = max(0, self._hints - 1)

    async def _on_expired(self, session: Session, delivery: Delivery) -> None:
        """Answer a job whose expiration passed in its queue: the broker has set it aside."""
        job, model = Expired(delivery), delivery.routing_key
        if self._settler.answered.knows(model, job.properties):
            self._settler.count_repeated(model, job.properties)
            await delivery.ack()
            return
        why = DeadlineExceeded(
            f"the job's expiration passed while it waited in {job.queue} for {shown(model)}: "
            "allow more time, or see what the model waits for"
        )
        await self._to_the_end(self._settler.settle(session, job, model, job.properties.message_id or "", why))

    async def _on_stray(self, session: Session, delivery: Delivery) -> None:
        """Register a model that the store has by now, and send its job on; refuse the others."""
        model = delivery.routing_key
        try:
            check_model_id(model)
        except InvalidInput as error:
            await self._refuse(session, delivery, str(error))
            return
        if not await self._knows(model):
            why = f"no model {shown(model)} is registered: register it, or correct the routing key"
            await self._refuse(session, delivery, why)
            return
        lane: Lane = "batch" if delivery.exchange == BATCH else "jobs"
        await self._open_lane(session, lane, model)
        if not await self._send_on(session, delivery):
            await delivery.give_back()  # deleted again in between: it comes back here by itself
            return
        log.info("model.declared", model=model, lane=lane)

    async def _open_lane(self, session: Session, lane: Lane, model: str) -> None:
        """Declare a model's queue, and let jobs into it once it is old enough to keep them."""
        queue, *bindings = lane_topology(lane, model, self._queue_type)
        await session.declare(queue)
        is_news = lane == "batch" and model not in self._registry.batch_lanes()
        if is_news:
            self._registry.has_batch_lane(model)
        if self._queue_type == "quorum":
            now = asyncio.get_running_loop().time()
            opens = self._opens.get((lane, model), -math.inf)
            if now > opens + STRAYS_LINGER:  # then it was not that queue's youth that had this job stray
                opens = self._opens[lane, model] = now + QUEUE_YOUTH
            await asyncio.sleep(max(0.0, opens - now))
        await session.declare(*bindings)
        if is_news:  # whoever has the model hot is to consume it: its jobs leave no hint
            await session.publish(EVENTS, batch_opened(model), b"", Properties())

    async def _send_on(self, session: Session, delivery: Delivery) -> bool:
        """Publish a stray again, and take it out here; False when it has still no queue to go to.

        A queue that was just made may not be able to take it yet. Until it is, the job stays in hand.
        """
        while True:
            try:
                await self._to_the_end(_move(session, delivery))
            except Unroutable:
                return False
            except PublishFailed as error:
                log.warning("stray.unsent", model=delivery.routing_key, reason=str(error))
                await asyncio.sleep(STORE_PAUSE)
            else:
                return True

    async def _knows(self, model: str) -> bool:
        """Whether the store has ``model``; while the store is away nobody can tell, and the job stays in hand.

        Giving it back each time would count as an attempt before RabbitMQ 4.3, and from 4.0 on the broker
        drops what has come back 20 times. If we end, it has the job back.
        """
        while True:
            try:
                return await self._registry.knows(model)
            except StoreError as error:
                log.warning("store.unreadable", reason=str(error))
                await asyncio.sleep(STORE_PAUSE)

    async def _refuse(self, session: Session, delivery: Delivery, why: str) -> None:
        job_id = delivery.properties.message_id or ""
        await self._to_the_end(self._settler.settle(session, delivery, delivery.routing_key, job_id, UnknownModel(why)))

    async def _to_the_end(self, settling: Coroutine[Any, Any, None]) -> None:
        """Await ``settling``, which goes on when we are cancelled. Raises its BrokerError."""
        assert self._lasting is not None, "nothing is delivered before run"
        task = self._lasting.create_task(_told(settling))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        error = await asyncio.shield(task)
        if error is not None:
            raise error


async def _move(session: Session, delivery: Delivery) -> None:
    await session.publish(delivery.exchange, delivery.routing_key, delivery.body, delivery.properties, mandatory=True)
    await delivery.ack()


async def _told(work: Coroutine[Any, Any, None]) -> BrokerError | None:
    try:
        await work
    except BrokerError as error:
        return error
    return None
