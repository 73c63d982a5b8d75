"""Inputs that a message does not hold, put into the blob store before the job is published."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from qworker.errors import CallTimeout
from qworker.store.base import BlobStore
from qworker.wire.messages import Job


async def sent_apart(blobs: BlobStore, job: Job, most: int, seconds: float | None) -> tuple[Job, float | None]:
    """``job`` with what its message does not hold (``most`` bytes stay) in the store, and what is left of the time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            inputs = await blobs.send(job.inputs, most)
    except TimeoutError:
        if not limit.expired():
            raise
        raise CallTimeout(
            f"the blob store did not take the inputs of job {job.id} for {job.model} within {seconds:g} s: it was "
            "not published. Allow more time, or look at the store"
        ) from None
    left = None if seconds is None else max(0.0, began + seconds - loop.time())
    return replace(job, inputs=inputs), left
