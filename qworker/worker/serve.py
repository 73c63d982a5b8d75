"""What serves one model's deliveries: it begins each of them, and counts them until they are settled.

The path of one job is in ``in_hand``, from its delivery to its settling; what some jobs have to wait for on that
path is in ``detours``.
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
from qworker.errors import InvalidInput, JobError
from qworker.store.card import Card
from qworker.telemetry.measures import ModelMeasures
from qworker.wire.codec import Blobs, decode_job
from qworker.wire.limits import Limits
from qworker.wire.messages import Job
from qworker.wire.names import shown
from qworker.wire.signature import Signature, check_inputs, check_outputs
from qworker.worker.batcher import Batcher, expired
from qworker.worker.cancelled import Cancelled
from qworker.worker.detours import begin_in_turn
from qworker.worker.firewall import Ward
from qworker.worker.hot_zone import HotZone
from qworker.worker.in_hand import JobInHand
from qworker.worker.settle import Settler


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
            job = JobInHand(self, session, delivery)
            if delivery.redelivered or ward.busy or len(delivery.body) in ward.sizes:
                ward.hold()
                self.spawn(begin_in_turn(job))
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

    @property
    def build(self) -> str | None:
        """The digest of what jobs run on; None where they are refused."""
        return self.serving.card.digest if isinstance(self.serving, Serving) else None

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


async def _raise(bug: BaseException) -> None:
    raise bug
