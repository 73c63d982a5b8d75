"""The path of one job on a hot model: delivery → decode → check → run → encode → settle.

A job has no task of its own: each stage calls the next one, from the callbacks of the connection and of the
batcher. Only what has to wait gets a task: an answer that is no result, a broker that takes nothing now, and the
``detours``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from qworker.broker.base import Delivery, Session
from qworker.errors import JobError, OutOfMemory, Unroutable
from qworker.wire.codec import reply_kind
from qworker.wire.messages import JSON, Job, Result, Tensor
from qworker.wire.progress import PROGRESS_HEADER
from qworker.wire.reference import Referenced
from qworker.wire.topology import DEADLINE_HEADER, PUBLISHED_HEADER
from qworker.worker import detours
from qworker.worker.batcher import Answer

if TYPE_CHECKING:  # it begins jobs: the road goes down from there
    from qworker.worker.serve import Server, Serving

BIG_JSON = 256 << 10


class JobInHand:
    """One delivery, from its coming to its settling."""

    __slots__ = (
        "_published",  # unix seconds at which the publisher says that it published, or None
        "_received",
        "_started",
        "_trace",  # None unless the job is traced
        "alone",  # it is on its second run, by itself
        "deadline",  # unix seconds after which nobody wants the answer, or None
        "delivery",
        "job_id",
        "server",
        "serving",
        "session",
    )

    serving: Serving
    _started: float

    def __init__(self, server: Server, session: Session, delivery: Delivery) -> None:
        self.alone = False
        self.server = server
        self.session = session
        self.delivery = delivery
        properties = delivery.properties
        self.job_id = properties.message_id or ""
        self._received = time.time()
        headers = properties.headers
        deadline, published = headers.get(DEADLINE_HEADER), headers.get(PUBLISHED_HEADER)
        if type(published) is int:
            self._published = published / 1000
        else:
            self._published = None if properties.timestamp_ms is None else properties.timestamp_ms / 1000
        if type(deadline) is int:
            self.deadline = deadline / 1000
        elif properties.expiration_ms is not None:
            self.deadline = self._expires_at(properties.expiration_ms / 1000)
        else:
            self.deadline = None
        traces = server.traces
        self._trace = (
            None
            if traces is None
            else traces.begin(server.model, self.job_id, headers, self._published, self._received)
        )

    def _expires_at(self, seconds: float) -> float:
        """When a job is over that has an expiration and no deadline: counted from its publishing, as far as that
        is known. AMQP's timestamp has whole seconds, so it may have been up to one later."""
        since = self._received if self._published is None else min(self._published + 1.0, self._received)
        return since + seconds

    def begin(self) -> None:
        """The delivery has come, and its turn with it."""
        server, delivery = self.server, self.delivery
        body = delivery.body
        try:
            self.serving = server.ready_for(self.deadline, self._received)
            if len(body) > BIG_JSON and reply_kind(delivery.properties.content_type, body) == JSON:
                server.spawn(detours.decode(self))
            else:
                self.run(server.decode(delivery))
        except Referenced as found:
            detours.fetch(self, found)
        except JobError as error:
            self.end(error)

    def run(self, job: Job) -> None:
        """It is decoded. Raises JobError when it is not to run."""
        self.job_id = job.id
        if self._trace is not None:
            self._trace.known_as(job.id)
        server = self.server
        if server.cancelled.ids:
            server.cancelled.check(job.id)
        server.check(job, self.serving)
        if self.serving.costly and server.settler.replies.doubtful(self.delivery.properties.reply_to):
            server.spawn(detours.submit_if_wanted(self, job))
        else:
            self.submit(job)

    def submit(self, job: Job) -> None:
        """It is to run. Raises JobError when it cannot be done in time."""
        self._started = time.perf_counter()
        if PROGRESS_HEADER in self.delivery.properties.headers:
            asked = (self.session, self.delivery, self.server.spawn)
            self.server.settler.progress.submit(self.serving.batcher, job, self.deadline, self._ran, asked)
        else:
            self.serving.batcher.submit(job, self.deadline, self._ran)

    def _ran(self, answer: Answer) -> None:
        server = self.server
        try:
            try:
                verdict: Result | JobError = self._result(*answer.result())
            except OutOfMemory as error:
                if not self.alone:
                    server.spawn(detours.again_alone(self))
                    return
                verdict = error
            except JobError as error:
                verdict = error
            apart = server.settler.apart
            if apart is not None and isinstance(verdict, Result) and apart.wants(self.delivery.properties, verdict):
                server.spawn(detours.lighten(self, apart, verdict))
            else:
                self.end(verdict)
        except BaseException as bug:  # noqa: BLE001  # not swallowed
            server.crash(bug)

    def _result(self, outputs: list[Tensor], run_seconds: float) -> Result:
        serving = self.serving
        published = self._published
        waited = time.perf_counter() - self._started - run_seconds
        timing = {
            "queue": max(0.0, self._received - published) if published is not None else 0.0,
            "wait": max(0.0, waited),  # pieces of a large job run at once
            "run": run_seconds,
        }
        if published is not None and published < serving.since:
            timing["load"] = serving.load_seconds  # the job was there before the model was
        self.server.measured.job(timing["queue"], timing["wait"], run_seconds, cold="load" in timing)
        if self._trace is not None:
            self._trace.ran(timing["wait"], run_seconds, serving.since, timing.get("load"))
        return Result(self.job_id, self.server.model, serving.card.version, tuple(outputs), timing)

    def end(self, verdict: Result | JobError) -> None:
        """Settle, at once where that is possible."""
        server, trace = self.server, self._trace
        if trace is not None:
            trace.ends(verdict)

        def ended(settled: bool) -> None:
            try:
                if settled:
                    server.settled()
                    if trace is not None:
                        trace.settled()
                else:
                    server.spawn(self.settle(verdict))
            except BaseException as bug:  # noqa: BLE001  # not swallowed
                server.crash(bug)

        if not server.settler.settle_soon(self.session, self.delivery, server.model, verdict, ended):
            server.spawn(self.settle(verdict))

    async def settle(self, verdict: Result | JobError | Unroutable) -> None:
        """Settle what takes its time: failures, answers that may come back, text."""
        server = self.server
        try:
            await server.settler.settle(self.session, self.delivery, server.model, self.job_id, verdict)
        finally:
            server.settled()
            if self._trace is not None:
                self._trace.settled()
