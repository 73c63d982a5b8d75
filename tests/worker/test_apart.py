"""Jobs whose tensors lie in a store that is slow: they wait by themselves, and not for longer than they have time."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from qworker import Client
from qworker.broker.base import Properties
from qworker.errors import DeadlineExceeded
from qworker.wire.codec import encode_job
from qworker.wire.messages import MSGPACK, BlobRef, Job, Tensor
from qworker.wire.topology import DEADLINE_HEADER, JOBS
from qworker.worker.apart import Apart
from qworker.worker.worker import Worker
from tests.support.waiting import wait_until
from tests.worker.doubles import BackendDouble, Running, is_hot

X = np.ones((2, 3), np.float32)


class SlowStore:
    """A blob store that answers when it is told to."""

    prefix = "file:///slow/"

    def __init__(self) -> None:
        self.asked = 0
        self.open = asyncio.Event()

    async def fetch(self, refs: Iterable[BlobRef]) -> Mapping[BlobRef, memoryview]:
        self.asked += 1
        await self.open.wait()
        return {ref: memoryview(X.tobytes()) for ref in refs}

    async def send(self, tensors: Iterable[Tensor], limit: int) -> tuple[Tensor, ...]:
        return tuple(tensors)


def slowly(worker: Worker) -> SlowStore:
    store = SlowStore()
    worker._parts.settler.apart = Apart(store, 1 << 20)
    return store


async def publish(client: Client, reply_to: str, job_id: str, seconds: float | None = None) -> None:
    """A job for ``a`` whose tensor lies in the slow store."""
    digest = hashlib.sha256(X.tobytes()).hexdigest()
    there = Tensor("x", "FP32", X, BlobRef(SlowStore.prefix + digest, digest, X.nbytes))
    headers = {} if seconds is None else {DEADLINE_HEADER: int((time.time() + seconds) * 1000)}
    envelope = Properties(job_id, job_id, reply_to, MSGPACK, persistent=True, headers=headers)
    session, _ = await client._link.ready()
    await session.publish(JOBS, "a", encode_job(Job(job_id, "a", (there,))), envelope)


async def test_a_slow_store_holds_up_nobody_else(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """Jobs beside it run; one whose time is over meanwhile is answered and not run; the other one goes on."""
    async with running(amqp_url, identities, backend) as worker, client.reply_queue() as replies:
        assert ((await client.call("a", {"x": X}, timeout=20)).arrays()["y"] == X).all()
        store = slowly(worker)
        await publish(client, replies.name, "late", seconds=0.3)
        await publish(client, replies.name, "patient")
        await wait_until(lambda: store.asked == 2)
        assert ((await client.call("a", {"x": X}, timeout=20)).arrays()["y"] == X).all()
        reply = await replies.receive()
        assert (reply.correlation_id, reply.outcome.code) == ("late", DeadlineExceeded.code)
        store.open.set()
        reply = await replies.receive()
        assert reply.correlation_id == "patient"
        assert (reply.result().arrays()["y"] == X).all()
        assert is_hot(worker, "a")


async def test_a_model_leaves_after_what_it_is_fetching(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """A job that waits for its tensors is in hand: a stop waits for it, and then it is answered."""
    async with client.reply_queue() as replies:
        async with running(amqp_url, identities, backend) as worker:
            await client.call("a", {"x": X}, timeout=20)
            store = slowly(worker)
            await publish(client, replies.name, "waiting")
            await wait_until(lambda: store.asked == 1)
            worker.stop()
            await wait_until(lambda: not is_hot(worker, "a"))
            store.open.set()
        assert (await replies.receive()).correlation_id == "waiting"
