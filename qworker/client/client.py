"""Publish jobs and wait for their results.

A call travels with direct reply-to: no queue is declared for it, and its reply is matched by the job's
id. Such replies are delivered at most once; a result that must survive the caller belongs in a named
queue (``Client.reply_queue``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import TracebackType
from typing import Any
from uuid import uuid4

from qworker.broker.base import Connector, Properties, Session
from qworker.client.apart import sent_apart
from qworker.client.envelope import envelope, named
from qworker.client.link import Link
from qworker.client.replies import OnTold, ReplyQueue, fetch_reply, read_reply
from qworker.client.waiting import Listening, OnProgress, timed_out
from qworker.errors import BrokerError, BrokerUnavailable, CallTimeout, InvalidInput
from qworker.store.base import BlobStore
from qworker.telemetry.trace import ClientTraces, traced
from qworker.wire.codec import encode_job
from qworker.wire.control import cancel_order, encode_order
from qworker.wire.messages import JSON, MSGPACK, Job, Result
from qworker.wire.names import check_model_id
from qworker.wire.progress import PROGRESS_HEADER, decode_progress
from qworker.wire.reference import Referenced
from qworker.wire.topology import CONTROL, JOBS, order_key

_Answer = tuple[bytes, str | None] | BrokerError | None
"""What ends a wait: the reply's body and content type; the loss of the connection, or a publish that was refused;
or, with None, the time."""

BLOB_LIMIT = 8 << 20
"""Bytes of tensors that stay in a message where there is a blob store: half of what RabbitMQ 4 takes."""
_JSON_GROWTH = 8
"""JSON takes up to so many times the bytes that a tensor has."""

_LOG = logging.getLogger(__name__)
_ORDER = Properties(content_type=MSGPACK)
_checked_id = lru_cache(maxsize=4096)(check_model_id)


class Client:
    """A caller's connection to the workers; ``async with`` opens and closes it.

    Any number of tasks may call at once. A lost connection is reopened by itself.
    """

    def __init__(
        self,
        connector: Connector,
        blobs: BlobStore | None = None,
        *,
        blob_limit: int = BLOB_LIMIT,
        traces: ClientTraces | None = None,
    ) -> None:
        """``blobs``: where tensors go that ``blob_limit`` bytes in a message do not hold, and results may lie."""
        self.traces = traces
        self._blobs = blobs
        self._blob_limit = blob_limit
        self._envelope = partial(envelope, blobs=blobs, traces=traces)
        # Written by ``_request`` alone (on_reply and on_lost only complete the futures).
        self._waiting: dict[str, asyncio.Future[_Answer]] = {}
        # By the calls that asked for progress; written by ``call`` alone.
        self._listening: dict[str, Listening] = {}
        self._ids, self._numbers = uuid4().hex, itertools.count(1)
        self._reply_queues: set[ReplyQueue] = set()
        self._dropped_replies = 0
        self._tasks = asyncio.TaskGroup()
        self._watcher: asyncio.Task[None] | None = None
        self._link = Link(
            connector, on_reply=self._take_reply, on_lost=self._fail_waiting, on_reopened=self._subscribe_again
        )

    async def __aenter__(self) -> Client:
        await self._link.open()
        await self._tasks.__aenter__()
        self._watcher = self._tasks.create_task(self._link.watch(), name="qworker-client-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._fail_waiting(BrokerUnavailable("the client was closed while the call was waiting"))
        try:
            await self._link.close()
        finally:
            # Only a cancellation is the group's business: an error of the caller's must not come out wrapped.
            cancelled = (kind, exc, trace) if isinstance(exc, asyncio.CancelledError) else (None, None, None)
            await self._tasks.__aexit__(*cancelled)

    @property
    def dropped_replies(self) -> int:
        """Replies that nobody waited for: late ones, duplicates and strays."""
        return self._dropped_replies

    @property
    def calls_in_flight(self) -> int:
        """Calls that wait for their reply now."""
        return len(self._waiting)

    @traced
    async def call(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        timeout: float | None = 30.0,  # noqa: ASYNC109 - it is the job's deadline as well
        version: str | None = None,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        priority: int | None = None,
        deadline: float | None = None,
        content_type: str = MSGPACK,
        retry: bool = False,
        progress: OnProgress | bool = False,
    ) -> Result:
        """Run ``model`` once on ``inputs`` (name → array-like) and return its result.

        A value is a numpy array, nested lists, text or bytes (BYTES), or a ``Tensor`` that says its datatype.
        ``timeout`` is in seconds and also tells the workers when to drop the job; ``deadline`` (unix
        seconds) replaces that. With ``retry`` a job whose connection was lost is published again, under
        the same id: it may then run twice. When the call is cancelled, so is the job.

        ``progress`` is called on the event loop with each ``Progress`` that workers tell meanwhile (docs/progress.md);
        what it raises ends the call. True: they are asked, for what CallTimeout says.

        Raises InvalidInput, UnknownModel, ModelUnavailable, JobFailed and the other job errors as the
        worker says; CallTimeout, which says what the job was waiting for; BrokerUnavailable; MessageTooLarge and other
        PublishFailed; StoreError and BlobUnavailable where tensors go by the blob store.
        """
        job = self._job(model, inputs, version, outputs, parameters)
        now = time.time()
        if deadline is None and timeout is not None:
            deadline = now + timeout
        if self._blobs is not None:
            job, timeout = await sent_apart(self._blobs, job, self._most(content_type), timeout)
        body = encode_job(job, content_type)
        properties = self._envelope(
            job.id, content_type, now, deadline=deadline, priority=priority, progress=progress is not False
        )
        if progress is not False:
            self._listening[job.id] = Listening(progress)
        try:
            reply = await self._reply(job, body, properties, timeout, retry=retry)
        except asyncio.CancelledError:
            self._cancel_soon(job)
            raise
        finally:
            if progress is not False:
                del self._listening[job.id]
        try:
            return read_reply(*reply).result()
        except Referenced as found:
            return (await fetch_reply(found, self._blobs, *reply)).result()

    @traced
    async def publish(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        reply_to: str | None = None,
        correlation_id: str | None = None,
        timeout: float | None = 30.0,  # noqa: ASYNC109 - waits for a connection too
        version: str | None = None,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        priority: int | None = None,
        deadline: float | None = None,
        content_type: str = MSGPACK,
        progress: bool = False,
    ) -> str:
        """Publish a job and return its id once the broker has it on disk.

        The result goes to the queue ``reply_to`` (see ``reply_queue``), or without one to the exchange
        ``qworker.results`` under the model's id. ``timeout`` limits the publishing, not the job;
        ``deadline`` (unix seconds) limits the job. With ``progress`` what it waits for is told to ``reply_to``, too.
        Raises BrokerUnavailable, PublishFailed, StoreError.
        """
        job = self._job(model, inputs, version, outputs, parameters)
        now = time.time()
        if self._blobs is not None:
            job, timeout = await sent_apart(self._blobs, job, self._most(content_type), timeout)
        body = encode_job(job, content_type)
        properties = self._envelope(
            job.id,
            content_type,
            now,
            deadline=deadline,
            priority=priority,
            progress=progress,
            reply_to=reply_to,
            correlation_id=correlation_id,
        )
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                session, _ = await self._link.ready()
                await session.publish(JOBS, model, body, properties)
        except TimeoutError:
            if not limit.expired():
                raise
            raise BrokerUnavailable(
                f"the broker did not take job {job.id} for {model} within {timeout:g} s ({self._why_waiting()}); "
                "it may still run"
            ) from None
        return job.id

    async def cancel(self, job_id: str, *, model: str | None = None) -> None:
        """Ask the workers not to run the job, and return once the broker has the order. ``model``: its model, if known.

        A job that has not begun ends with JobCancelled; one that waits in the broker does so when it is its turn. One
        that runs goes on. Raises BrokerUnavailable, PublishFailed.
        """
        session, _ = await self._link.ready()
        await session.publish(CONTROL, order_key("cancel"), encode_order(cancel_order([job_id], model)), _ORDER)

    def _cancel_soon(self, job: Job) -> None:
        """``cancel`` without waiting. Should the order be lost, the job's deadline is what ends it."""
        session = self._link.session()
        order = encode_order(cancel_order([job.id], job.model))
        if session is not None and not session.send(CONTROL, order_key("cancel"), order, _ORDER, _ignore):
            try:
                self._tasks.create_task(self._try_to_cancel(session, order))
            except RuntimeError:  # the client is being closed
                return

    async def _try_to_cancel(self, session: Session, order: bytes) -> None:
        try:
            await session.publish(CONTROL, order_key("cancel"), order, _ORDER)
        except BrokerError as error:
            _LOG.info("a cancelled job may still run: %s", error)

    def reply_queue(
        self,
        name: str | None = None,
        *,
        durable: bool = False,
        prefetch: int = 100,
        on_progress: OnTold | None = None,
    ) -> ReplyQueue:
        """A queue of the caller's own for results, to be entered with ``async with`` and iterated.

        Without ``durable`` it is exclusive and goes with the connection; a durable one outlives its
        readers and needs a name. ``on_progress`` is called with a job's correlation id and what is told of it, for
        jobs that were published with ``progress``, while the queue is read.
        """
        return ReplyQueue(
            self._link,
            self._reply_queues,
            name=name,
            durable=durable,
            prefetch=prefetch,
            blobs=self._blobs,
            on_progress=on_progress,
        )

    async def _reply(
        self, job: Job, body: bytes, properties: Properties, seconds: float | None, *, retry: bool
    ) -> tuple[bytes, str | None]:
        """The answer's body and content type."""
        reply = None if retry else await self._call_now(job, body, properties, seconds)
        if reply is not None:
            return reply
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await self._request(job, body, properties, retry=retry)
        except TimeoutError:
            if not limit.expired():
                raise
            raise await self._timed_out(job, seconds) from None

    async def _call_now(
        self, job: Job, body: bytes, properties: Properties, seconds: float | None
    ) -> tuple[bytes, str | None] | None:
        """``_request`` for a connection that takes the job at once, as nearly always; None: it does not."""
        rpc = self._link.rpc()
        if rpc is None:
            return None
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[_Answer] = loop.create_future()

        def told(error: BrokerError | None) -> None:
            if error is not None and not waiter.done():
                waiter.set_result(error)

        self._waiting[job.id] = waiter
        expiry: asyncio.TimerHandle | None = None
        try:
            if not rpc.send(JOBS, job.model, body, properties, told):
                return None
            if seconds is not None:
                expiry = loop.call_later(seconds, _expire, waiter)
            answer = await waiter
        finally:
            del self._waiting[job.id]
            if expiry is not None:
                expiry.cancel()
        if answer is None:
            raise await self._timed_out(job, seconds)
        if isinstance(answer, BrokerUnavailable):
            raise _lost(job, answer) from answer
        if isinstance(answer, BrokerError):
            raise answer
        return answer

    async def _request(self, job: Job, body: bytes, properties: Properties, *, retry: bool) -> tuple[bytes, str | None]:
        while True:
            waiter: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
            self._waiting[job.id] = waiter
            try:
                _, rpc = await self._link.ready()
                await rpc.publish(JOBS, job.model, body, properties)
                answer = await waiter
                if isinstance(answer, tuple):
                    return answer
                assert isinstance(answer, BrokerUnavailable), answer
                lost = answer
            except BrokerUnavailable as exc:
                lost = exc
            finally:
                del self._waiting[job.id]
            if not retry or self._link.closed:
                raise _lost(job, lost) from lost

    def _most(self, content_type: str) -> int:
        """Bytes of tensors that stay in a message."""
        return self._blob_limit // _JSON_GROWTH if content_type == JSON else self._blob_limit

    def _job(
        self,
        model: str,
        inputs: Mapping[str, Any],
        version: str | None,
        outputs: Sequence[str],
        parameters: Mapping[str, Any] | None,
    ) -> Job:
        _checked_id(model)  # it becomes a routing key, and the worker's answer would come a round trip later
        tensors = tuple([named(name, value) for name, value in inputs.items()])
        job_id = f"{self._ids}-{next(self._numbers):x}"
        return Job(job_id, model, tensors, version, tuple(outputs), dict(parameters or {}))

    def _take_reply(self, body: bytes, properties: Properties) -> None:
        waiter = self._waiting.get(properties.correlation_id or "")
        if PROGRESS_HEADER in properties.headers:
            self._take_progress(body, properties, waiter)
        elif waiter is None or waiter.done():
            self._dropped_replies += 1
        else:
            waiter.set_result((body, properties.content_type))

    def _take_progress(self, body: bytes, properties: Properties, waiter: asyncio.Future[_Answer] | None) -> None:
        """Never an answer, and of no interest once there is one."""
        listening = self._listening.get(properties.correlation_id or "")
        if listening is None or waiter is None or waiter.done():
            return
        try:
            _, _, progress = decode_progress(body, properties.content_type)
        except InvalidInput:
            self._dropped_replies += 1
            return
        try:
            listening.heard(progress)
        except BaseException as error:  # noqa: BLE001 - the caller's own, and its call raises it
            waiter.set_exception(error)

    def _fail_waiting(self, lost: BrokerUnavailable) -> None:
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(lost)

    async def _subscribe_again(self, session: Session) -> None:
        for replies in list(self._reply_queues):
            await replies.resume(session)

    async def _timed_out(self, job: Job, seconds: float | None) -> CallTimeout | BrokerUnavailable:
        if self._link.trouble is not None:
            return BrokerUnavailable(f"no reply from {job.model} within {seconds:g} s: {self._why_waiting()}")
        return await timed_out(job, seconds, self._listening.get(job.id), self._link.session())

    def _why_waiting(self) -> str:
        return str(self._link.trouble or "connected, but no confirm came")


def _ignore(_: BrokerError | None) -> None:
    """Of an order that nobody waits for."""


def _expire(waiter: asyncio.Future[_Answer]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _lost(job: Job, reason: BrokerUnavailable) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"the connection was lost before job {job.id} for {job.model} was answered ({reason}); the job may "
        "still run, but its reply cannot reach this client any more: call again, or pass retry=True"
    )
