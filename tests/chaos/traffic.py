"""Who publishes during a chaos run, and who reads the answers. Everything goes into the book.

Publishers use our client, with confirms, and answers come to durable queues, so that whoever dies loses none of
them. One more publisher owes nothing to us (plain pika). A few jobs name no reply queue: their results come from
the results exchange, and their failures are dead letters.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pika
from pika.exceptions import AMQPError

from qworker.api import Client, ReplyQueue, connector_for
from qworker.config import Settings
from qworker.errors import BrokerError, JobFailed
from qworker.wire.messages import Failure, Result
from qworker.wire.topology import DEAD, RESULTS
from tests.chaos.book import Book, Kind
from tests.chaos.models import inputs_of, is_answer
from tests.chaos.mutate import malformed, seeds
from tests.e2e.caller import JSON, MSGPACK, packed

REPLIES = "chaos.replies"
NO_REPLY_TO = "chaos.results"
"""What the results exchange sends to, as its own readers would have it."""
PAUSE = 0.2
LISTENED_TO = 0.9
DEADLINES = 0.1
TEXT = 0.1


@dataclass(slots=True)
class Demand:
    """What is asked for. Faults change it while the publishers run."""

    models: tuple[str, ...]
    window: int = 24
    """Jobs of one publisher that wait for an answer."""
    slow_seconds: float = 0.05
    plain: bool = False
    """Only jobs that can end in nothing but their result: no deadlines, and a reply queue."""
    pause: float = 0.0
    weights: list[float] = field(default_factory=list[float])


def declare_queues(url: str, *, results: bool = True) -> None:
    """The durable queues that the answers come to. The results exchange is there once a worker is."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    for queue in (REPLIES, NO_REPLY_TO):
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    if results:
        channel.queue_bind(NO_REPLY_TO, RESULTS, "#")
    connection.close()


class Readers:
    """Read both queues through our client until cancelled. It shows each answer once, and counts those it drops."""

    def __init__(self, book: Book, settings: Settings) -> None:
        self._book = book
        self._settings = settings
        self.broken = 0
        self.redelivered = 0
        """Answers that came again since the connection was lost before they were acked: the reader's own business."""
        self.answered: dict[str, Callable[[], None]] = {}
        """By job: whom to tell of its first answer."""
        self._queues: list[ReplyQueue] = []

    @property
    def doubles(self) -> int:
        return sum(queue.duplicates for queue in self._queues)

    async def run(self, queue: str) -> None:
        client = Client(connector=connector_for(self._settings, "chaos-reader"))
        async with client, client.reply_queue(queue, durable=True, prefetch=200) as replies:
            self._queues.append(replies)
            last: str | None = None
            while True:
                try:
                    reply = await replies.receive()
                except JobFailed:
                    self.broken += 1
                except BrokerError:
                    await asyncio.sleep(PAUSE)
                else:
                    if reply.correlation_id is not None and reply.correlation_id == last:
                        self.redelivered += 1
                        continue
                    last = reply.correlation_id
                    self._note(last, reply.outcome)

    def _note(self, job_id: str | None, outcome: Result | Failure) -> None:
        code = "ok" if isinstance(outcome, Result) else outcome.code
        entry = self._book.answer(job_id, code)
        if entry is not None and isinstance(outcome, Result) and entry.kind != "bad":
            (y,) = [t.array for t in outcome.outputs if t.name == "y"]
            entry.wrong = entry.wrong or not is_answer(entry.model, entry.k, y, entry.seconds)
        told = self.answered.pop(job_id or "", None)
        if told is not None:
            told()


class Publisher:
    """Publishes as fast as its window allows, until told to stop."""

    def __init__(self, name: str, book: Book, readers: Readers, demand: Demand, settings: Settings, seed: int) -> None:
        self.name = name
        self.refused = 0
        self._book = book
        self._readers = readers
        self._demand = demand
        self._settings = settings
        self._chance = random.Random(f"{seed}/{name}")
        self._open = 0
        self._moved = asyncio.Event()
        self._count = 0

    async def run(self, told: asyncio.Event) -> None:
        while not told.is_set():
            with suppress(BrokerError):
                client = Client(connector=connector_for(self._settings, f"chaos-{self.name}"))
                async with client, asyncio.TaskGroup() as tasks:
                    for _ in range(self._demand.window):
                        tasks.create_task(self._lane(client, told))
            if not told.is_set():
                await asyncio.sleep(PAUSE)

    async def _lane(self, client: Client, told: asyncio.Event) -> None:
        while not told.is_set():
            await self.publish_one(client)
            if self._demand.pause:
                await asyncio.sleep(self._demand.pause)

    async def publish_one(self, client: Client, model: str | None = None) -> None:
        """Publish one job and wait until it is answered, if it is to be and the broker took it."""
        chance, demand = self._chance, self._demand
        self._count += 1
        k, job_id = self._count % 1000, f"{self.name}-{self._count}"
        model = model or chance.choices(demand.models, demand.weights or None)[0]
        answered = demand.plain or chance.random() < LISTENED_TO
        hurried = not demand.plain and chance.random() < DEADLINES
        kind: Kind = "deadline" if hurried else "good"
        entry = self._book.publishing(job_id, model, k, kind, answered=answered)
        entry.seconds = demand.slow_seconds * chance.random() if model == "roll" else 0.0
        came = asyncio.get_running_loop().create_future()
        if answered:
            self._readers.answered[job_id] = lambda: came.done() or came.set_result(None)
        try:
            await client.publish(
                model,
                inputs_of(model, k, entry.seconds),
                reply_to=REPLIES if answered else None,
                correlation_id=job_id,
                timeout=15,
                priority=chance.choice((None, None, 1, 9)),
                deadline=time.time() + chance.uniform(0.02, 4.0) if hurried else None,
                content_type=JSON if chance.random() < TEXT and not model.startswith("roll") else MSGPACK,
            )
        except BrokerError:
            self.refused += 1
            self._readers.answered.pop(job_id, None)
            await asyncio.sleep(PAUSE)
            return
        self._book.confirmed(job_id)
        if answered:
            await came


class PikaThread(threading.Thread):
    """Publishes over plain pika until told to stop: good jobs in both lanes, or malformed messages."""

    def __init__(self, url: str, book: Book, demand: Demand, seed: int, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self.outages = 0
        self.told = threading.Event()
        self._url = url
        self._book = book
        self._demand = demand
        self._chance = random.Random(f"{seed}/{name}")
        self._count = 0
        self._run_id = uuid4().hex[:6]

    def run(self) -> None:
        while not self.told.is_set():
            with self.connected() as publish:
                while not self.told.wait(0.01 + self._demand.pause):
                    self.good(publish)

    def good(self, publish: Publish, model: str | None = None, k: int | None = None) -> None:
        model = model or self._chance.choice(self._demand.models)
        job_id, k = self._next_id(), self._count % 1000 if k is None else k
        self._book.publishing(job_id, model, k)
        lane = "qworker.batch" if self._chance.random() < 0.2 and not self._demand.plain else "qworker.jobs"
        publish(lane, model, packed(model, inputs_of(model, k)), job_id, content_type=MSGPACK)

    def bad(self, publish: Publish, models: tuple[str, ...], sources: list[tuple[bytes, str]]) -> None:
        """One malformed message; half of them name no reply queue, and a few one that is not there."""
        chance = self._chance
        message, job_id, model = malformed(chance, sources), self._next_id(), chance.choice(models)
        where = chance.random()
        reply_to = REPLIES if where < 0.5 else None if where < 0.95 else chance.choice(("gone", "", "\u00fc", "a b"))
        self._book.publishing(job_id, model, 0, "bad", answered=where < 0.5)
        publish(
            "qworker.jobs",
            model,
            message.body,
            job_id,
            content_type=message.content_type,
            headers=message.headers,
            reply_to=reply_to,
        )

    def bad_ones(self, count: int, models: tuple[str, ...], good: list[bytes]) -> None:
        """``count`` malformed messages over a connection of their own, however often it is lost."""
        sources, end = seeds(good), self._count + count
        while self._count < end and not self.told.is_set():
            with self.connected() as publish:
                while self._count < end and not self.told.is_set():
                    self.bad(publish, models, sources)

    def one_good(self) -> None:
        """A good job after all of them: if nobody answers it, it is lost."""
        with self.connected() as publish:
            self.good(publish)

    def _next_id(self) -> str:
        self._count += 1
        return f"{self.name}-{self._run_id}-{self._count}"

    def connected(self) -> _Connected:
        """A connection of its own, as a block; losing it ends the block."""
        return _Connected(self)

    def lost(self) -> None:
        self.outages += 1
        self.told.wait(PAUSE)

    @property
    def url(self) -> str:
        return self._url

    @property
    def book(self) -> Book:
        return self._book


Publish = Callable[..., None]


class _Connected:
    """A pika connection whose loss ends the block, and is no error."""

    def __init__(self, thread: PikaThread) -> None:
        self._thread = thread
        self._connection: Any = None

    def __enter__(self) -> Publish:
        thread = self._thread
        while True:
            try:
                self._connection = pika.BlockingConnection(pika.URLParameters(thread.url))
                channel = self._connection.channel()
                channel.confirm_delivery()
                break
            except (AMQPError, OSError):
                thread.lost()
                if thread.told.is_set():
                    return _nothing

        def publish(
            exchange: str,
            model: str,
            body: bytes,
            job_id: str,
            *,
            content_type: str | None,
            headers: dict[str, Any] | None = None,
            reply_to: str | None = REPLIES,
        ) -> None:
            properties = pika.BasicProperties(
                message_id=job_id,
                correlation_id=job_id,
                content_type=content_type,
                reply_to=reply_to,
                headers=headers,
                delivery_mode=2,
            )
            channel.basic_publish(exchange, model, body, properties)
            thread.book.confirmed(job_id)

        return publish

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        with suppress(AMQPError, OSError):
            if self._connection is not None and self._connection.is_open:
                self._connection.close()
        if isinstance(error, (AMQPError, OSError)):
            self._thread.lost()
            return True
        return False


def _nothing(*_: object, **__: object) -> None:
    return


def collect_dead_letters(url: str, book: Book) -> int:
    """Take all dead letters there are into the book."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    taken = 0
    try:
        channel = connection.channel()
        while True:
            method, properties, _ = channel.basic_get(DEAD)
            if method is None:
                return taken
            headers = properties.headers or {}
            deaths = headers.get("x-death") or [{}]
            cause = headers.get("x-qworker-cause") or f"broker: {deaths[0].get('reason', 'unknown')}"
            book.letter(properties.correlation_id, str(cause))
            channel.basic_ack(method.delivery_tag)
            taken += 1
    finally:
        connection.close()
