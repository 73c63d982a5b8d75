"""The path of one job on a hot model: delivery → decode → check → run → encode → settle.

A job has no task of its own: each stage calls the next one, from the callbacks of the connection and of the
batcher. Only what has to wait (an answer that is no result, JSON of some size, a broker that takes nothing
now) gets a task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from qworker.broker.base import Delivery, Session
from qworker.errors import BrokerUnavailable, InvalidInput, JobError, OutOfMemory, Unroutable
from qworker.store.card import Card
from qworker.telemetry.measures import ModelMeasures
from qworker.wire.codec import Blobs, decode_job, reply_kind
from qworker.wire.limits import Limits
from qworker.wire.messages import JSON, Job, Result, Tensor
from qworker.wire.names import shown
from qworker.wire.reference import Referenced
from qworker.wire.signature import Signature, check_inputs, check_outputs
from qworker.wire.topology import DEADLINE_HEADER, PUBLISHED_HEADER
from qworker.worker.apart import Apart
from qworker.worker.batcher import Answer, Batcher, expired
from qworker.worker.cancelled import Cancelled
from qworker.worker.firewall import Ward
from qworker.worker.hot_zone import HotZone
from qworker.worker.settle import Settler
from qworker.worker.strikes import fingerprint, mark_of

BIG_JSON = 256 << 10


@dataclass(frozen=True, slots=True)
class Serving:
    """What a model's jobs are answered with: an engine, or the reason why there is none."""

    batcher: Batcher
    card: Card
    signature: Signature
    since: float
    """Unix seconds at which the engine was ready."""
    load_seconds: float
    costly: bool = False
    """Worth to ask first whether somebody waits for the answer."""


class Server:
    """Answers the deliveries of one model.

    Owned here, on the event loop: ``in_hand``, the number of deliveries that are not settled yet. The model
    sets ``serving``, and ``window``: how many deliveries its consumers may have in hand.
    """

    def __init__(
        self,
        model: str,
        zone: HotZone,
        settler: Settler,
        tasks: asyncio.TaskGroup,
        limits: Limits,
        measured: ModelMeasures | None = None,
        cancelled: Cancelled | None = None,
    ) -> None:
        self.model = model
        self.measured = measured or ModelMeasures()
        self.traces = self.measured.traces
        self.in_hand = 0
        self.window = 0
        self.serving: Serving | JobError | None = None
        self.settler = settler
        self.cancelled = cancelled or Cancelled(time.monotonic)
        self._zone = zone
        self._tasks = tasks
        self._limits = limits
        self._idle = asyncio.Event()
        self._idle.set()
        self.ward = Ward(settler.firewall, lambda: self.in_hand)

    def taker(self, session: Session) -> Callable[[Delivery], None]:
        """The callback for a consumer on ``session``."""

        def take(delivery: Delivery) -> None:
            self.in_hand += 1
            self._idle.clear()
            self._zone.used(self.model)
            self._zone.started(self.model)
            job = _JobInHand(self, session, delivery)
            if delivery.redelivered or ward.busy or len(delivery.body) in ward.sizes:
                ward.hold()
                self.spawn(job.begin_apart())
            else:
                job.begin()

        ward = self.ward
        return take

    def may_come(self) -> bool:
        """Whether the broker may deliver another job before one is settled."""
        return self.in_hand < self.window

    def prefetch(self, least: int) -> int:
        """Deliveries in hand that keep the runs full; at least ``least``."""
        return max(least, self.serving.batcher.prefetch) if isinstance(self.serving, Serving) else least

    async def idle(self) -> None:
        """Wait until everything in hand is settled."""
        await self._idle.wait()

    def cancel(self, job_ids: AbstractSet[str], why: JobError) -> tuple[set[str], set[str]]:
        """End those of the jobs that have not begun. The ids that ended so, and those that run."""
        return self.serving.batcher.cancel(job_ids, why) if isinstance(self.serving, Serving) else (set(), set())

    # --- for the jobs in hand --------------------------------------------------------------------

    def ready_for(self, deadline: float | None, now: float) -> Serving:
        """What the job runs on. Raises JobError when it must not run."""
        serving = self.serving
        if isinstance(serving, JobError):
            raise serving
        assert serving is not None, "a consumer was started before there was anything to serve"
        if deadline is not None and deadline < now:
            raise expired(deadline, now)
        return serving

    def decode(self, delivery: Delivery, blobs: Blobs | None = None) -> Job:
        """Raises InvalidInput; Referenced where tensors travel beside the message, until it has ``blobs``."""
        properties = delivery.properties
        job_id = properties.message_id or ""
        job = decode_job(
            delivery.body, properties.content_type, model=self.model, job_id=job_id, limits=self._limits, blobs=blobs
        )
        # an id of its own, or a made-up one, so that logs and answers can name it
        return job if job.id else replace(job, id=str(uuid4()))

    def check(self, job: Job, serving: Serving) -> None:
        """Raises InvalidInput for what the model does not take."""
        if job.version not in (None, serving.card.version):
            raise InvalidInput(
                f"{self.model} serves version {serving.card.version}; the job asks for {shown(job.version or '')}: "
                "leave model_version out, or register that version as the newest"
            )
        check_inputs(serving.signature, job.inputs)
        if job.outputs:
            check_outputs(serving.signature, job.outputs)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Give ``work`` a task."""
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # the model was abandoned: the broker gets the job back when the session ends
            work.close()

    def crash(self, bug: BaseException) -> None:
        """Something that must not happen, in a callback: raise it where it ends the worker."""
        self.ward.firewall.crashed(bug)
        self.spawn(_raise(bug))

    def session_lost(self) -> None:
        """The broker gives what is in hand to somebody, perhaps to us again: none of it has ended a worker."""
        if isinstance(self.serving, Serving):
            for job_id in self.serving.batcher.job_ids():
                self.ward.firewall.survived(self.model, job_id)

    def settled(self) -> None:
        """A delivery that was in hand is not any more."""
        self.in_hand -= 1
        self._zone.finished(self.model)
        if self.ward.busy:
            self.ward.stir()
        if self.in_hand == 0:
            self._idle.set()


class _JobInHand:
    """One delivery, from its coming to its settling."""

    __slots__ = (
        "_alone",  # it is on its second run, by itself
        "_deadline",  # unix seconds after which nobody wants the answer, or None
        "_delivery",
        "_job_id",
        "_published",  # unix seconds at which the publisher says that it published, or None
        "_received",
        "_server",
        "_serving",
        "_session",
        "_started",
        "_trace",  # None unless the job is traced
    )

    _serving: Serving
    _started: float

    def __init__(self, server: Server, session: Session, delivery: Delivery) -> None:
        self._alone = False
        self._server = server
        self._session = session
        self._delivery = delivery
        properties = delivery.properties
        self._job_id = properties.message_id or ""
        self._received = time.time()
        headers = properties.headers
        deadline, published = headers.get(DEADLINE_HEADER), headers.get(PUBLISHED_HEADER)
        if type(published) is int:
            self._published = published / 1000
        else:
            self._published = None if properties.timestamp_ms is None else properties.timestamp_ms / 1000
        if type(deadline) is int:
            self._deadline = deadline / 1000
        elif properties.expiration_ms is not None:
            self._deadline = self._expires_at(properties.expiration_ms / 1000)
        else:
            self._deadline = None
        traces = server.traces
        self._trace = (
            None
            if traces is None
            else traces.begin(server.model, self._job_id, headers, self._published, self._received)
        )

    def _expires_at(self, seconds: float) -> float:
        """When a job is over that has an expiration and no deadline: counted from its publishing, as far as that
        is known. AMQP's timestamp has whole seconds, so it may have been up to one later."""
        since = self._received if self._published is None else min(self._published + 1.0, self._received)
        return since + seconds

    def begin(self) -> None:
        server, delivery = self._server, self._delivery
        body = delivery.body
        try:
            self._serving = server.ready_for(self._deadline, self._received)
            if len(body) > BIG_JSON and reply_kind(delivery.properties.content_type, body) == JSON:
                server.spawn(self._decode_apart())
            else:
                self._run(server.decode(delivery))
        except Referenced as found:
            self._fetch(found)
        except JobError as error:
            self._end(error)

    async def begin_apart(self) -> None:
        """``begin`` when its turn comes: a job that may have ended a worker is run by itself, others wait for it."""
        ward = self._server.ward
        if self._delivery.redelivered:
            ward.firewall.redelivered()
        came, limit = time.monotonic(), asyncio.timeout(self._seconds_left())
        try:
            async with limit, ward.turn():
                limit.reschedule(None)
                await self._take_turn(came)
        except TimeoutError:
            if not limit.expired():
                raise
            ward.begin()
            self._end(expired(self._deadline or 0.0, time.time()))

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.time())

    async def _take_turn(self, came: float) -> None:
        server, session, ward = self._server, self._session, self._server.ward
        mark = await self._suspected_as()
        if self._delivery.redelivered and await self._was_answered(came, suspect=mark is not None):
            ward.begin()
            await self._delivery.ack()
            server.settled()
            return
        if mark is None:
            ward.begin()
            self.begin()
            return
        await ward.all_settled()
        try:
            async with ward.firewall.try_alone(session, self._delivery, server.model, mark) as trial:
                ward.begin()
                if trial.verdict is None:
                    self.begin()
                else:
                    self._end(trial.verdict)
                await ward.all_settled()
        except BrokerUnavailable:  # before it began; the broker has it back
            ward.firewall.survived(server.model, self._delivery.properties.message_id)
            ward.begin()
            server.settled()

    async def _was_answered(self, came: float, *, suspect: bool) -> bool:
        """Whether the job is known to be answered. Of one that another worker had, the news may be on its way."""
        answered, asked = self._server.settler.answered, self._delivery.properties
        known = answered.knows(self._server.model, asked)
        if not known and suspect:
            known = await answered.hears_of(self._server.model, asked, since=came)
        if known:
            self._server.settler.count_repeated(self._server.model, asked)
        return known

    async def _suspected_as(self) -> str | None:
        """What the payload is on record as, where it may end this process; else None."""
        serving, delivery, ward = self._server.serving, self._delivery, self._server.ward
        survivor = delivery.redelivered and ward.firewall.is_survivor(
            self._server.model, delivery.properties.message_id
        )
        suspect = delivery.redelivered and not survivor
        if not isinstance(serving, Serving) or not (suspect or len(delivery.body) in ward.sizes):
            return None
        mark = await asyncio.to_thread(self._fingerprint, serving.card.digest)
        return mark if suspect or ward.firewall.is_convict(mark) else None

    def _fingerprint(self, build: str) -> str:
        model, delivery = self._server.model, self._delivery
        try:
            return fingerprint(model, build, self._server.decode(delivery).inputs)
        except JobError:  # what it holds lies elsewhere, or it is no job at all
            return mark_of(model, build, delivery.body)

    async def _decode_apart(self) -> None:
        """Numbers as text: about 5 ms a MiB, too long for the loop."""
        try:
            self._run(await asyncio.to_thread(self._server.decode, self._delivery))
        except Referenced as found:
            self._fetch(found)
        except JobError as error:
            self._end(error)

    def _fetch(self, found: Referenced) -> None:
        apart = self._server.settler.apart
        if apart is None:
            self._end(found)
        else:
            self._server.spawn(self._fetch_apart(apart, found))

    async def _fetch_apart(self, apart: Apart, found: Referenced) -> None:
        """Read and verify what lies beside the message, in threads, and go on; not for longer than it has time."""
        limit = asyncio.timeout(self._seconds_left())
        try:
            async with limit:
                blobs = await apart.inputs(found)
                job = await asyncio.to_thread(self._server.decode, self._delivery, blobs)
            self._run(job)
        except TimeoutError:
            if not limit.expired():
                raise
            self._end(expired(self._deadline or 0.0, time.time()))
        except JobError as error:
            self._end(error)

    def _run(self, job: Job) -> None:
        self._job_id = job.id
        if self._trace is not None:
            self._trace.known_as(job.id)
        if self._server.cancelled.ids:
            self._server.cancelled.check(job.id)
        self._server.check(job, self._serving)
        if self._serving.costly and self._server.settler.replies.doubtful(self._delivery.properties.reply_to):
            self._server.spawn(self._run_if_wanted(job))
        else:
            self._submit(job)

    async def _run_if_wanted(self, job: Job) -> None:
        """Run it, unless its answer would be for nobody."""
        asked = self._delivery.properties
        gone = await self._server.settler.replies.missing(self._session, asked.reply_to or "")
        try:
            if gone is None:
                self._submit(job)
            else:
                await self._settle(gone)
        except JobError as error:
            self._end(error)

    def _submit(self, job: Job) -> None:
        self._started = time.perf_counter()
        self._serving.batcher.submit(job, self._deadline, self._ran)

    def _ran(self, answer: Answer) -> None:
        try:
            try:
                verdict: Result | JobError = self._result(*answer.result())
            except OutOfMemory as error:
                if not self._alone:
                    self._server.spawn(self._again_alone())
                    return
                verdict = error
            except JobError as error:
                verdict = error
            apart = self._server.settler.apart
            if apart is not None and isinstance(verdict, Result) and apart.wants(self._delivery.properties, verdict):
                self._server.spawn(self._lighten(apart, verdict))
            else:
                self._end(verdict)
        except BaseException as bug:  # noqa: BLE001  # not swallowed
            self._server.crash(bug)

    async def _again_alone(self) -> None:
        """There was no memory for it, not even in a run of its own: once more, when nothing else of the model runs."""
        ward, self._alone = self._server.ward, True
        ward.hold()
        async with ward.turn():
            await ward.all_settled()
            ward.begin()
            self.begin()
            await ward.all_settled()

    def _result(self, outputs: list[Tensor], run_seconds: float) -> Result:
        serving = self._serving
        published = self._published
        waited = time.perf_counter() - self._started - run_seconds
        timing = {
            "queue": max(0.0, self._received - published) if published is not None else 0.0,
            "wait": max(0.0, waited),  # pieces of a large job run at once
            "run": run_seconds,
        }
        if published is not None and published < serving.since:
            timing["load"] = serving.load_seconds  # the job was there before the model was
        self._server.measured.job(timing["queue"], timing["wait"], run_seconds, cold="load" in timing)
        if self._trace is not None:
            self._trace.ran(timing["wait"], run_seconds, serving.since, timing.get("load"))
        return Result(self._job_id, self._server.model, serving.card.version, tuple(outputs), timing)

    async def _lighten(self, apart: Apart, result: Result) -> None:
        self._end(await apart.lighten(self._delivery.properties, result))

    def _end(self, verdict: Result | JobError) -> None:
        """Settle, at once where that is possible."""
        server, trace = self._server, self._trace
        if trace is not None:
            trace.ends(verdict)

        def ended(settled: bool) -> None:
            try:
                if settled:
                    server.settled()
                    if trace is not None:
                        trace.settled()
                else:
                    server.spawn(self._settle(verdict))
            except BaseException as bug:  # noqa: BLE001  # not swallowed
                server.crash(bug)

        if not server.settler.settle_soon(self._session, self._delivery, server.model, verdict, ended):
            server.spawn(self._settle(verdict))

    async def _settle(self, verdict: Result | JobError | Unroutable) -> None:
        server = self._server
        try:
            await server.settler.settle(self._session, self._delivery, server.model, self._job_id, verdict)
        finally:
            server.settled()
            if self._trace is not None:
                self._trace.settled()


async def _raise(bug: BaseException) -> None:
    raise bug
