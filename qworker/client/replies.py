"""Results that arrive in a queue of the caller's own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from uuid import uuid4

from qworker.broker.base import Consumer, Delivery, Session
from qworker.client.link import Link
from qworker.errors import BrokerError, BrokerUnavailable, InvalidInput, JobFailed
from qworker.store.base import BlobStore
from qworker.wire.codec import Blobs, decode_reply
from qworker.wire.messages import Failure, Result
from qworker.wire.progress import PROGRESS_HEADER, Progress, decode_progress
from qworker.wire.reference import Referenced
from qworker.wire.topology import Queue


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: a result or a failure, and the correlation id that the job was published with."""

    outcome: Result | Failure
    correlation_id: str | None = None

    def result(self) -> Result:
        """The result; raises the failure's error if it is one."""
        if isinstance(self.outcome, Failure):
            raise self.outcome.error()
        return self.outcome


def read_reply(
    body: bytes, content_type: str | None, correlation_id: str | None = None, blobs: Blobs | None = None
) -> Reply:
    """Decode an answer. Raises JobFailed("bad_reply") when it is none, Referenced where it takes ``fetch_reply``."""
    try:
        return Reply(decode_reply(body, content_type, blobs=blobs), correlation_id)
    except Referenced:
        raise
    except InvalidInput as exc:
        raise _bad_reply(exc) from exc


async def fetch_reply(
    found: Referenced,
    store: BlobStore | None,
    body: bytes,
    content_type: str | None,
    correlation_id: str | None = None,
) -> Reply:
    """``read_reply`` of an answer with tensors beside it. Raises BlobUnavailable where they cannot be read now."""
    if store is None:
        raise _bad_reply(found) from found
    try:
        blobs = await store.fetch(found.refs)
    except InvalidInput as exc:
        raise _bad_reply(exc) from exc
    return await asyncio.to_thread(read_reply, body, content_type, correlation_id, blobs)


def _bad_reply(exc: InvalidInput) -> JobFailed:
    return JobFailed(
        "bad_reply", f"the reply is not a result or a failure ({exc}); is something else answering these jobs?"
    )


_Identity = tuple[str, str, str | None]
"""Of an answer: the job's id, its model, and the correlation id."""

OnTold = Callable[[str, Progress], object]
"""Called with a job's correlation id and what is told of it."""

REMEMBERED = 10_000


class ReplyQueue:
    """An async iterator over the answers in one queue; delivers each at least once.

    A reply is acknowledged when the next one is asked for, or when the block ends without an error: what
    was not yet dealt with comes again. An answer to a job that was answered and dealt with already, among
    the last ten thousand, is dropped. After a lost connection it subscribes again by itself; answers that
    were lost with an exclusive queue do not come back.
    """

    def __init__(
        self,
        link: Link,
        registry: set[ReplyQueue],
        *,
        name: str | None,
        durable: bool,
        prefetch: int,
        blobs: BlobStore | None = None,
        on_progress: OnTold | None = None,
    ) -> None:
        if durable and not name:
            raise ValueError("a durable reply queue needs a name: another reader must be able to find it")
        self.name = name or f"qworker.replies.{uuid4().hex}"
        self._durable = durable
        self._prefetch = prefetch
        self._link = link
        self._blobs = blobs
        self._on_progress = on_progress
        self._registry = registry
        self._arrived: asyncio.Queue[Delivery | BrokerError] = asyncio.Queue()
        self._in_hand: Delivery | None = None
        self._consumer: Consumer | None = None
        self._subscribed_on: Session | None = None
        self._refused = False
        """True while the queue could not be subscribed to again."""
        self._subscribing = asyncio.Lock()
        self._dealt_with: OrderedDict[_Identity, type[Result | Failure]] = OrderedDict()
        self._answer: tuple[_Identity, type[Result | Failure]] | None = None
        """Of the reply in hand."""
        self._duplicates = 0

    @property
    def duplicates(self) -> int:
        """Answers that came again after they had been dealt with. They were dropped."""
        return self._duplicates

    async def __aenter__(self) -> ReplyQueue:
        await self._subscribe((await self._link.ready())[0])
        self._registry.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._registry.discard(self)
        if kind is None:
            await self._settle()
        if self._consumer is not None:
            await self._consumer.close()

    async def resume(self, session: Session) -> None:
        """Subscribe on a new session. What keeps that from working is raised to the reader.

        The broker may not have noticed yet that the former connection is gone, say: then it holds the
        exclusive queue until the heartbeat runs out. Calls need not suffer from that.
        """
        async with self._subscribing:
            if session is self._subscribed_on:
                return  # by a reader that waited for it; what it holds would not come again
            try:
                await self._subscribe(session)
            except BrokerUnavailable:
                return  # that session is lost too, and the next one comes here again
            except BrokerError as exc:
                self._refused = True
                self._arrived.put_nowait(exc)

    async def _subscribe(self, session: Session) -> None:
        # What came over the former session comes again, so it is forgotten here.
        self._in_hand = self._answer = None
        while not self._arrived.empty():
            self._arrived.get_nowait()
        await session.declare(
            Queue(
                self.name,
                durable=self._durable,
                exclusive=not self._durable,
                auto_delete=not self._durable,
                arguments={"x-queue-type": "quorum" if self._durable else "classic"},
            )
        )
        self._consumer = await session.consume(self.name, self._arrived.put_nowait, prefetch=self._prefetch)
        self._subscribed_on = session
        self._refused = False

    def __aiter__(self) -> ReplyQueue:
        return self

    async def __anext__(self) -> Reply:
        return await self.receive()

    async def receive(self) -> Reply:
        """The next answer; waits for it.

        Raises JobFailed("bad_reply") for a message that is none, BlobUnavailable where its tensors lie beside it and
        cannot be read, BrokerError when the queue cannot be read any more; what ``on_progress`` raises. Either way the
        next call goes on.
        """
        while True:
            await self._settle()
            async with self._subscribing:
                if self._refused:
                    await self._subscribe((await self._link.ready())[0])
            arrived = await self._arrived.get()
            if isinstance(arrived, BrokerError):
                raise arrived
            self._in_hand = arrived
            body, properties = arrived.body, arrived.properties
            if PROGRESS_HEADER in properties.headers:
                self._tell(arrived)
                continue
            try:
                reply = read_reply(body, properties.content_type, properties.correlation_id)
            except Referenced as found:
                reply = await fetch_reply(found, self._blobs, body, properties.content_type, properties.correlation_id)
            if self._is_new(reply):
                return reply
            self._duplicates += 1

    def _tell(self, arrived: Delivery) -> None:
        """What a job waits for is no answer, whoever reads it."""
        if self._on_progress is None:
            return
        properties = arrived.properties
        try:
            job_id, _, progress = decode_progress(arrived.body, properties.content_type)
        except InvalidInput as exc:
            raise _bad_reply(exc) from exc
        self._on_progress(properties.correlation_id or job_id, progress)

    def _is_new(self, reply: Reply) -> bool:
        """Whether the job has no answer yet that was dealt with; a result after a failure is one that was asked for
        again. The reply is the one in hand from here on."""
        outcome = reply.outcome
        identity = (outcome.id, outcome.model, reply.correlation_id)
        known = self._dealt_with.get(identity)
        if not outcome.id or known is None or (known is Failure and isinstance(outcome, Result)):
            self._answer = (identity, type(outcome))
            return True
        return False

    async def _settle(self) -> None:
        delivery, self._in_hand = self._in_hand, None
        answer, self._answer = self._answer, None
        if delivery is None:
            return
        if answer is not None:
            self._dealt_with[answer[0]] = answer[1]
            self._dealt_with.move_to_end(answer[0])
            if len(self._dealt_with) > REMEMBERED:
                self._dealt_with.popitem(last=False)
        await delivery.ack()
