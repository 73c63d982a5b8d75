"""What a call waits for: what workers tell of it, and what the broker's counts say when its time is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from qworker.broker.base import Depth, Session
from qworker.errors import BrokerError, CallTimeout
from qworker.wire.messages import Job
from qworker.wire.progress import Progress
from qworker.wire.topology import ACTIVATION, lane_queue, lease_queue

OnProgress = Callable[[Progress], object]
LOOK_SECONDS = 1.0
"""The counts come within milliseconds, or not at all."""


class Listening:
    """What was told of one job."""

    __slots__ = ("_tell", "at", "last")

    def __init__(self, tell: OnProgress | bool) -> None:
        self._tell = None if isinstance(tell, bool) else tell
        self.last: Progress | None = None
        self.at = 0.0

    def heard(self, progress: Progress) -> None:
        """Raises what the caller's own function raises."""
        self.last, self.at = progress, time.monotonic()
        if self._tell is not None:
            self._tell(progress)


async def timed_out(
    job: Job, seconds: float | None, listening: Listening | None, session: Session | None
) -> CallTimeout:
    """The error of a call whose time is over: what its job was waiting for, as far as anybody knows."""
    if listening is not None and listening.last is not None:
        where = f" on {listening.last.worker}" if listening.last.worker else ""
        waits = f"it was {listening.last}{where}, as of {time.monotonic() - listening.at:.1f} s ago"
    else:
        waits = await _looked_up(session, job.model)
    return CallTimeout(
        f"no reply from {job.model} within {seconds:g} s (job {job.id}): {waits}. It may still run. Allow more time (a "
        f"cold model loads first); `qworker why {job.model}` and `qworker doctor` tell more"
    )


async def _looked_up(session: Session | None, model: str) -> str:
    unknown = "what it was waiting for is not known"
    if session is None:
        return unknown
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            jobs, lease, hints = await session.depths([lane_queue("jobs", model), lease_queue(model, 0), ACTIVATION])
    except (BrokerError, TimeoutError):
        return unknown
    return waits_for(jobs, leased=lease is not None, takers=0 if hints is None else hints.consumers)


def waits_for(jobs: Depth | None, *, leased: bool, takers: int) -> str:
    """What a job waits for, in words. ``jobs``: of its model's queue; ``leased``: a worker has the model, or is about
    to; ``takers``: workers that take up cold models."""
    if jobs is not None and jobs.consumers:
        if not jobs.ready:
            return "no job waits in its model's queue, so it was in a worker's hands"
        return f"its model is hot, and {_jobs(jobs.ready)} in its queue: more is asked of it than it can do"
    if jobs is not None and leased:
        return f"a worker has its model and does not serve it yet: it is loading, and {_jobs(jobs.ready)} for it"
    if not takers:
        return "no worker takes up cold models: none is connected to this virtual host, or all are drained or cut off"
    if jobs is None:
        return "its model has no queue: no worker has seen a model of this name in its store"
    return f"no worker has taken up its model yet, and {_jobs(jobs.ready)} for it: all load slots are busy, or it fails"


def _jobs(ready: int) -> str:
    return "no job waits" if not ready else "1 job waits" if ready == 1 else f"{ready} jobs wait"
