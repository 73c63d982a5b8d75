"""What some jobs wait for on their path: their turn, their tensors, their requester, memory. Each in a task.

``in_hand`` has the path. All of this ends in it again, at the stage that a job had reached.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from qworker.errors import BrokerUnavailable, JobError
from qworker.wire.messages import Job, Result
from qworker.wire.reference import Referenced
from qworker.worker.apart import Apart
from qworker.worker.batcher import expired
from qworker.worker.strikes import mark_of_job

if TYPE_CHECKING:
    from qworker.worker.in_hand import JobInHand

# --- its turn -------------------------------------------------------------------------------------


async def begin_in_turn(job: JobInHand) -> None:
    """``begin`` when its turn comes: a job that may have ended a worker is run by itself, others wait for it."""
    ward = job.server.ward
    if job.delivery.redelivered:
        ward.firewall.redelivered()
    came, limit = time.monotonic(), asyncio.timeout(_seconds_left(job))
    try:
        async with limit, ward.turn():
            limit.reschedule(None)
            await _take_turn(job, came)
    except TimeoutError:
        if not limit.expired():
            raise
        ward.begin()
        job.end(expired(job.deadline or 0.0, time.time()))


async def _take_turn(job: JobInHand, came: float) -> None:
    server, delivery, ward = job.server, job.delivery, job.server.ward
    mark = await _suspected_as(job)
    if delivery.redelivered and await _was_answered(job, came, suspect=mark is not None):
        ward.begin()
        await delivery.ack()
        server.settled()
        return
    if mark is None:
        ward.begin()
        job.begin()
        return
    await ward.all_settled()
    try:
        async with ward.firewall.try_alone(job.session, delivery, server.model, mark) as trial:
            ward.begin()
            if trial.verdict is None:
                job.begin()
            else:
                job.end(trial.verdict)
            await ward.all_settled()
    except BrokerUnavailable:  # before it began; the broker has it back
        ward.firewall.survived(server.model, delivery.properties.message_id)
        ward.begin()
        server.settled()


async def _was_answered(job: JobInHand, came: float, *, suspect: bool) -> bool:
    """Whether the job is known to be answered. Of one that another worker had, the news may be on its way."""
    model, settler, asked = job.server.model, job.server.settler, job.delivery.properties
    known = settler.answered.knows(model, asked)
    if not known and suspect:
        known = await settler.answered.hears_of(model, asked, since=came)
    if known:
        settler.count_repeated(model, asked)
    return known


async def _suspected_as(job: JobInHand) -> str | None:
    """What the payload is on record as, where it may end this process; else None."""
    server, delivery, ward = job.server, job.delivery, job.server.ward
    survivor = delivery.redelivered and ward.firewall.is_survivor(server.model, delivery.properties.message_id)
    suspect = delivery.redelivered and not survivor
    build = server.build
    if build is None or not (suspect or len(delivery.body) in ward.sizes):
        return None
    mark = await asyncio.to_thread(mark_of_job, server.model, build, delivery.body, lambda: server.decode(delivery))
    return mark if suspect or ward.firewall.is_convict(mark) else None


# --- its tensors ----------------------------------------------------------------------------------


async def decode(job: JobInHand) -> None:
    """Numbers as text: about 5 ms a MiB, too long for the loop."""
    try:
        job.run(await asyncio.to_thread(job.server.decode, job.delivery))
    except Referenced as found:
        fetch(job, found)
    except JobError as error:
        job.end(error)


def fetch(job: JobInHand, found: Referenced) -> None:
    """Its tensors travel beside the message."""
    apart = job.server.settler.apart
    if apart is None:
        job.end(found)
    else:
        job.server.spawn(_fetch(job, apart, found))


async def _fetch(job: JobInHand, apart: Apart, found: Referenced) -> None:
    """Read and verify what lies beside the message, in threads, and go on; not for longer than it has time."""
    limit = asyncio.timeout(_seconds_left(job))
    try:
        async with limit:
            blobs = await apart.inputs(found)
            decoded = await asyncio.to_thread(job.server.decode, job.delivery, blobs)
        job.run(decoded)
    except TimeoutError:
        if not limit.expired():
            raise
        job.end(expired(job.deadline or 0.0, time.time()))
    except JobError as error:
        job.end(error)


async def lighten(job: JobInHand, apart: Apart, result: Result) -> None:
    """Put away what its message need not hold of the result."""
    job.end(await apart.lighten(job.delivery.properties, result))


# --- its requester --------------------------------------------------------------------------------


async def submit_if_wanted(job: JobInHand, decoded: Job) -> None:
    """Run it, unless its answer would be for nobody."""
    asked = job.delivery.properties
    gone = await job.server.settler.replies.missing(job.session, asked.reply_to or "")
    try:
        if gone is None:
            job.submit(decoded)
        else:
            await job.settle(gone)
    except JobError as error:
        job.end(error)


# --- memory ---------------------------------------------------------------------------------------


async def again_alone(job: JobInHand) -> None:
    """There was no memory for it, not even in a run of its own: once more, when nothing else of the model runs."""
    ward, job.alone = job.server.ward, True
    ward.hold()
    async with ward.turn():
        await ward.all_settled()
        ward.begin()
        job.begin()
        await ward.all_settled()


def _seconds_left(job: JobInHand) -> float | None:
    return None if job.deadline is None else max(0.0, job.deadline - time.time())
