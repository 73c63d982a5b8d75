"""Connections that are lost at a bad moment, and consumers that the broker forgets: nothing is loaded twice for it."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qworker import Client
from qworker.broker.base import Delivery, Properties, Session
from qworker.broker.reference.session import AioPikaConnector
from qworker.wire.codec import encode_job
from qworker.wire.datatypes import tensor
from qworker.wire.messages import MSGPACK, Job
from qworker.wire.topology import JOBS, lane_queue
from qworker.worker import hot_model
from qworker.worker.intake import Hint
from qworker.worker.worker import Worker
from tests.e2e.models import put
from tests.support.broker import Inbox, classic, ready
from tests.support.models import identity
from tests.support.rabbitmq import SuiteNode
from tests.support.waiting import wait_until
from tests.worker.conftest import SIZE
from tests.worker.doubles import MIB, BackendDouble, Cable, Running, is_hot, step
from tests.worker.test_batched_service import LOOKUP, VERIFIED
from tests.worker.test_batched_service import put as put_batched

X = np.ones((2, 3), np.float32)
MANY = 30
FULL_SYNC_SECONDS = 30.0
HEARTBEAT = 2
REPLIES = "replies"
ONE = np.float32(1)


async def call(client: Client, model: str) -> None:
    """One job, answered rightly."""
    result = await client.call(model, {"x": X}, timeout=60)
    assert (result.arrays()["y"] == X).all()


async def publish(session: Session, model: str, job_id: str, **inputs: Any) -> None:
    """One job whose answer goes to ``REPLIES``."""
    await session.publish(JOBS, model, *job(model, job_id, **inputs))


def job(model: str, job_id: str, **inputs: Any) -> tuple[bytes, Properties]:
    """Its body and envelope."""
    tensors = tuple(tensor(name, array) for name, array in (inputs or {"x": X}).items())
    envelope = Properties(
        message_id=job_id, correlation_id=job_id, reply_to=REPLIES, content_type=MSGPACK, persistent=True
    )
    return encode_job(Job(job_id, model, tensors), MSGPACK), envelope


async def collect(session: Session) -> Inbox:
    replies = Inbox()

    def take(delivery: Delivery) -> None:
        replies.take(delivery)
        delivery.ack_soon()

    await session.declare(classic(REPLIES))
    await session.consume(REPLIES, take, prefetch=1000)
    return replies


def answered(replies: Inbox) -> set[str | None]:
    return {delivery.properties.correlation_id for delivery in replies.deliveries}


def in_hand(worker: Worker) -> int:
    return sum(row["in_hand"] for row in worker.state()["models"])


@pytest.fixture(scope="module")
def many_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("many") / "store"
    for number in range(MANY):
        put(root, f"m{number}", identity(), resident_bytes=MIB)
    return root


async def test_thirty_hot_models_come_back(
    running: Running, cable: Cable, client: Client, many_models: Path, backend: BackendDouble
) -> None:
    """After the connection is lost each hot model has its lease and its consumer again, and none is loaded again."""
    names = [f"m{number}" for number in range(MANY)]
    async with running(cable.url, many_models, backend) as worker:
        async with asyncio.TaskGroup() as calls:
            for name in names:
                calls.create_task(call(client, name))
        await wait_until(lambda: all(is_hot(worker, name) for name in names))
        cable.cut()
        lost = time.monotonic()
        await wait_until(
            lambda: worker.counters.reconnects == 1 and all(is_hot(worker, name) for name in names), FULL_SYNC_SECONDS
        )
        assert time.monotonic() - lost < FULL_SYNC_SECONDS
        async with asyncio.TaskGroup() as calls:
            for name in names:
                calls.create_task(call(client, name))
        assert worker.counters.loads == MANY
        assert all(each["expected"] == 1 for each in worker.state()["consumers"].values())


@pytest.mark.slow
async def test_a_connection_that_breaks_in_silence(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """The broker keeps the lease for the connection that it believes in: a hot model waits, and stays loaded."""
    async with running(f"{cable.url}?heartbeat={HEARTBEAT}", identities, backend) as worker:
        await call(client, "a")
        cable.break_in_silence()
        await wait_until(lambda: worker.counters.reconnects == 1 and step(worker, "a") == "lease", 20)
        await wait_until(lambda: is_hot(worker, "a"), FULL_SYNC_SECONDS)
        await call(client, "a")
        assert worker.counters.loads == 1
        assert worker.zone.held == SIZE


async def test_waiting_for_its_lease_it_can_be_evicted(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """A model whose lease another one holds does not keep its bytes from those that want them."""
    async with running(cable.url, identities, backend, memory=SIZE + MIB) as worker:
        await call(client, "a")
        cable.break_in_silence()  # the broker will hold the lease for 15 s
        await wait_until(lambda: worker.counters.reconnects == 1 and step(worker, "a") == "lease", 20)
        await call(client, "b")
        assert [row["model"] for row in worker.state()["models"]] == ["b"]


async def test_cut_off_while_taking_a_lease(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """A claim whose lease was asked for and not yet given ends; the next one serves the job, with one load."""
    async with running(cable.url, identities, backend) as worker, asyncio.TaskGroup() as calls:
        cable.mute(0)
        assert worker.claim("a", False, Hint(None))
        await wait_until(lambda: step(worker, "a") == "lease")
        calls.create_task(call(client, "a"))
        cable.cut()
        await wait_until(lambda: worker.counters.reconnects == 1, 20)
    assert worker.counters.loads == 1


async def test_cut_off_while_a_batch_forms(running: Running, cable: Cable, amqp_url: str, tmp_path: Path) -> None:
    """Jobs that wait for others to share their run are answered all the same; nothing of them stays in hand."""
    put_batched(tmp_path / "store", VERIFIED)
    ids = np.arange(4, dtype=np.int64).reshape(1, 4)
    async with (
        running(cable.url, tmp_path / "store", threads=1, prefetch=100) as worker,
        await AioPikaConnector(amqp_url).connect() as session,
    ):
        replies = await collect(session)
        free = threading.Event()
        worker._engine_threads.submit(free.wait, 60)
        for number in range(4):
            await publish(session, LOOKUP, f"job-{number}", ids=ids + number, factor=ONE)
        await wait_until(lambda: in_hand(worker) == 4)
        assert worker.counters.runs == 0, "they were to wait"
        cable.cut()
        await wait_until(lambda: worker.counters.reconnects == 1, 20)
        free.set()
        await wait_until(lambda: answered(replies) == {f"job-{number}" for number in range(4)}, 60)
        assert worker.counters.jobs_together >= 2
        await wait_until(lambda: in_hand(worker) == 0)
        assert await ready(session, lane_queue("jobs", LOOKUP)) == 0


@pytest.mark.slow
async def test_heartbeats_outlive_a_load(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """A load that takes longer than the broker waits for a heartbeat costs no connection, and holds up no hot model."""
    async with running(f"{cable.url}?heartbeat={HEARTBEAT}", identities, backend) as worker:
        await call(client, "b")
        backend.loading.shut()
        async with asyncio.TaskGroup() as calls:
            calls.create_task(call(client, "a"))
            await wait_until(lambda: backend.loading.passing)
            started = time.monotonic()
            while time.monotonic() - started < 3.5 * HEARTBEAT:
                await call(client, "b")
                await asyncio.sleep(0.2)
            assert step(worker, "a") == "load"
            backend.loading.open()
        assert worker.counters.reconnects == 0
        assert worker.counters.loads == 2


# --- consumers -------------------------------------------------------------------------------------


async def test_a_consumer_that_the_broker_forgot(
    running: Running, amqp_url: str, client: Client, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker believes in a consumer that the broker does not count: it is made anew, and jobs run again."""
    monkeypatch.setattr(hot_model, "CONSUMER_LOOK", 0.2)
    async with running(amqp_url, identities) as worker:
        await call(client, "a")
        await wait_until(lambda: worker.state()["consumers"]["a"] == {"expected": 1, "counted": {"jobs": 1}})
        subscriptions = worker._tenants["a"]._subscriptions
        await subscriptions._consumers["jobs"].cancel()  # as if the broker had lost it
        assert worker.state()["consumers"]["a"]["expected"] == 1
        await call(client, "a")
        assert worker.counters.consumers_lost == 1
        assert worker.counters.loads == 1
        assert worker.counters.reconnects == 0


async def test_a_healthy_consumer_is_left_alone(
    running: Running, amqp_url: str, client: Client, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking often, under traffic, finds nothing to mend."""
    monkeypatch.setattr(hot_model, "CONSUMER_LOOK", 0.01)
    async with running(amqp_url, identities) as worker:
        for _ in range(10):
            async with asyncio.TaskGroup() as calls:
                for _ in range(20):
                    calls.create_task(call(client, "a"))
        assert worker.counters.consumers_lost == 0


async def test_a_queue_that_is_deleted_under_a_hot_model(
    running: Running, amqp_url: str, client: Client, identities: Path
) -> None:
    """The model leaves; the session, and with it every other model, stays."""
    async with running(amqp_url, identities) as worker, await AioPikaConnector(amqp_url).connect() as session:
        await call(client, "a")
        await call(client, "b")
        await session.delete_queue(lane_queue("jobs", "a"))
        await wait_until(lambda: step(worker, "a") is None)
        assert is_hot(worker, "b")
        await call(client, "b")
        assert worker.counters.reconnects == 0


# --- results that leave slowly ---------------------------------------------------------------------


async def test_results_that_leave_slowly(running: Running, cable: Cable, amqp_url: str, identities: Path) -> None:
    """While nobody takes the results, no more jobs are taken in hand than the prefetch, and memory is bounded by it."""
    jobs, prefetch = 60, 4
    big = np.ones((40_000, 3), np.float32)
    async with (
        running(cable.url, identities, prefetch=prefetch) as worker,
        await AioPikaConnector(amqp_url).connect() as session,
    ):
        replies = await collect(session)
        await publish(session, "a", "first")
        await wait_until(lambda: len(replies) == 1)
        cable.choke(1)
        for number in range(jobs):
            await publish(session, "a", f"job-{number}", x=big)
        window = worker._tenants["a"]._server.window
        assert window < jobs, "or else this shows nothing"
        await wait_until(lambda: worker.state()["broker"]["outbox_messages"] == in_hand(worker) == window, 20)
        assert worker.state()["broker"]["outbox_bytes"] <= window * (big.nbytes + 4096)
        assert await ready(session, lane_queue("jobs", "a")) == jobs - window
        cable.let_speak(1)
        await wait_until(lambda: len(answered(replies)) == jobs + 1, 60)
        assert len(replies) == jobs + 1, "no duplicates"
        assert worker.counters.reconnects == 0


# --- the broker's log ------------------------------------------------------------------------------


async def test_workers_that_do_not_sweep_ask_quietly(
    running: Running, suite_node: SuiteNode, amqp_url: str, identities: Path
) -> None:
    """The broker logs an error for each refused try to take the sweeper's lease: so they are rare."""
    vhost = amqp_url.rsplit("/", 1)[1]
    quick = {"sweep_interval": 0.1}
    async with running(amqp_url, identities, **quick) as one, running(amqp_url, identities, **quick) as two:
        await wait_until(lambda: one.counters.measures.sweeps + two.counters.measures.sweeps > 20, 20)
    lines = [
        line for line in suite_node.node.log.read_text(errors="replace").splitlines() if f"vhost '{vhost}'" in line
    ]
    assert len([line for line in lines if "qworker.sweeper" in line]) <= 2, "both may ask at once, at the start"
