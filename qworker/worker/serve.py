"""The path of one job on a hot model: delivery → decode → check → run → encode → settle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from uuid import uuid4

from qworker.broker.base import Delivery, Session
from qworker.errors import InvalidInput, JobError
from qworker.store.card import Card
from qworker.wire.codec import decode_job, reply_kind
from qworker.wire.limits import Limits
from qworker.wire.messages import JSON, Job, Result
from qworker.wire.names import shown
from qworker.wire.signature import Signature, check_inputs, check_outputs
from qworker.wire.topology import DEADLINE_HEADER, PUBLISHED_HEADER
from qworker.worker.batcher import Batcher, expired
from qworker.worker.hot_zone import HotZone
from qworker.worker.settle import Settler

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
    ) -> None:
        self.model = model
        self.in_hand = 0
        self.window = 0
        self.serving: Serving | JobError | None = None
        self._zone = zone
        self._settler = settler
        self._tasks = tasks
        self._limits = limits
        self._idle = asyncio.Event()
        self._idle.set()

    def taker(self, session: Session) -> Callable[[Delivery], None]:
        """The callback for a consumer on ``session``."""

        def take(delivery: Delivery) -> None:
            self.in_hand += 1
            self._idle.clear()
            self._zone.used(self.model)
            self._zone.started(self.model)
            self._tasks.create_task(self._answer(session, delivery))

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

    async def _answer(self, session: Session, delivery: Delivery) -> None:
        received = time.time()
        job_id = delivery.properties.message_id or ""
        try:
            try:
                serving = self._ready_for(delivery, received)
                job = _named(await self._decode(delivery, job_id))
                job_id = job.id
                verdict: Result | JobError = await self._run(job, serving, delivery, received)
            except JobError as error:
                verdict = error
            await self._settler.settle(session, delivery, self.model, job_id, verdict)
        finally:
            self.in_hand -= 1
            self._zone.finished(self.model)
            if self.in_hand == 0:
                self._idle.set()

    def _ready_for(self, delivery: Delivery, now: float) -> Serving:
        """What the job runs on. Raises JobError when it must not run."""
        self._settler.check_attempts(delivery)
        serving = self.serving
        if isinstance(serving, JobError):
            raise serving
        assert serving is not None, "a consumer was started before there was anything to serve"
        deadline = _deadline(delivery)
        if deadline is not None and deadline < now:
            raise expired(deadline, now)
        return serving

    async def _decode(self, delivery: Delivery, job_id: str) -> Job:
        body, content_type = delivery.body, delivery.properties.content_type

        def decode() -> Job:
            return decode_job(body, content_type, model=self.model, job_id=job_id, limits=self._limits)

        if len(body) > BIG_JSON and reply_kind(content_type, body) == JSON:
            return await asyncio.to_thread(decode)  # numbers as text: about 5 ms a MiB, too long for the loop
        return decode()

    async def _run(self, job: Job, serving: Serving, delivery: Delivery, received: float) -> Result:
        if job.version not in (None, serving.card.version):
            raise InvalidInput(
                f"{self.model} serves version {serving.card.version}; the job asks for {shown(job.version or '')}: "
                "leave model_version out, or register that version as the newest"
            )
        check_inputs(serving.signature, job.inputs)
        check_outputs(serving.signature, job.outputs)
        return await self._infer(job, serving, delivery, received)

    async def _infer(self, job: Job, serving: Serving, delivery: Delivery, received: float) -> Result:
        started = time.perf_counter()
        outputs, run_seconds = await serving.batcher.run(job, _deadline(delivery))
        published = _published(delivery)
        timing = {
            "queue": max(0.0, received - published) if published is not None else 0.0,
            "wait": max(0.0, time.perf_counter() - started - run_seconds),  # pieces of a large job run at once
            "run": run_seconds,
        }
        if published is not None and published < serving.since:
            timing["load"] = serving.load_seconds  # the job was there before the model was
        return Result(job.id, self.model, serving.card.version, tuple(outputs), timing)


def _named(job: Job) -> Job:
    """``job`` with an id: of its own, or a made-up one, so that logs and answers can name it."""
    return job if job.id else replace(job, id=str(uuid4()))


def _published(delivery: Delivery) -> float | None:
    """Unix seconds at which the publisher says that it published."""
    stamp = delivery.properties.headers.get(PUBLISHED_HEADER)
    if isinstance(stamp, int) and not isinstance(stamp, bool):
        return stamp / 1000
    whole = delivery.properties.timestamp_ms
    return None if whole is None else whole / 1000


def _deadline(delivery: Delivery) -> float | None:
    """Unix seconds after which nobody wants the answer."""
    deadline = delivery.properties.headers.get(DEADLINE_HEADER)
    return deadline / 1000 if isinstance(deadline, int) and not isinstance(deadline, bool) else None
