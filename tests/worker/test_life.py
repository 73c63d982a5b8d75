"""A whole worker in this process, on a real broker: sessions that are lost, hints, leases, stops."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import structlog

from qworker import Client
from qworker.broker.base import Properties, Session
from qworker.broker.reference.session import AioPikaConnector
from qworker.wire.codec import encode_job
from qworker.wire.datatypes import tensor
from qworker.wire.messages import MSGPACK, Job
from qworker.wire.topology import (
    ACTIVATION,
    BACKLOG,
    COLD,
    DEAD,
    REASON_HEADER,
    UNROUTABLE,
    lane_queue,
    lease_queue,
    static_topology,
)
from qworker.worker.worker import Worker
from tests.e2e.models import copy_store, put
from tests.support.broker import Inbox, classic, ready
from tests.support.models import identity
from tests.support.waiting import wait_until
from tests.worker.conftest import SIZE
from tests.worker.doubles import MIB, BackendDouble, Cable, Running, is_hot, step

X = np.ones((2, 3), np.float32)
MORE_THAN_ANY_PREFETCH = 300


async def call(client: Client, model: str) -> None:
    """One job, answered rightly."""
    result = await client.call(model, {"x": X}, timeout=20)
    assert (result.arrays()["y"] == X).all()


def loads(worker: Worker) -> int:
    return worker.counters.loads


async def publish(session: Session, model: str, job_id: str = "", reply_to: str | None = None) -> None:
    body = encode_job(Job(job_id, model, (tensor("x", X),)), MSGPACK)
    envelope = Properties(
        message_id=job_id or None,
        correlation_id=job_id or None,
        reply_to=reply_to,
        content_type=MSGPACK,
        persistent=True,
    )
    await session.publish("qworker.jobs", model, body, envelope)


# --- a session that ends ---------------------------------------------------------------------------


async def test_cut_off_while_hot(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """The worker comes back with its lease and its consumer, and does not load again what it has."""
    async with running(cable.url, identities, backend) as worker:
        await call(client, "a")
        cable.cut()
        await wait_until(lambda: worker.counters.reconnects == 1 and is_hot(worker, "a"), 20)
        await call(client, "a")
        assert loads(worker) == 1
        assert worker.zone.held == SIZE


async def test_cut_off_for_a_while(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """Jobs that come meanwhile wait, and are answered once it is back."""
    async with running(cable.url, identities, backend) as worker:
        await call(client, "a")
        cable.unplug()
        await wait_until(lambda: worker.not_ready() is not None)
        async with asyncio.TaskGroup() as calls:
            calls.create_task(call(client, "a"))
            calls.create_task(call(client, "b"))
            await asyncio.sleep(0.3)
            cable.plug()
        assert loads(worker) == 2


async def test_cut_off_while_loading(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """The load goes on, and is the only one."""
    backend.loading.shut()
    async with running(cable.url, identities, backend) as worker, asyncio.TaskGroup() as calls:
        calls.create_task(call(client, "a"))
        await wait_until(lambda: backend.loading.passing)
        cable.cut()
        await wait_until(lambda: worker.not_ready() is not None)
        backend.loading.open()
        await wait_until(lambda: is_hot(worker, "a"), 20)
    assert loads(worker) == 1


async def test_cut_off_while_waiting_for_bytes(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """Who waits for bytes goes on waiting, gets them, and serves on the new session."""
    async with running(cable.url, identities, backend, memory=SIZE + MIB) as worker:
        await call(client, "a")
        backend.running.shut()  # a stays busy, so that b has to wait
        async with asyncio.TaskGroup() as calls:
            calls.create_task(call(client, "a"))
            await wait_until(lambda: backend.running.passing)
            calls.create_task(call(client, "b"))
            await wait_until(worker.zone.blocked)
            cable.cut()
            await wait_until(lambda: worker.counters.reconnects == 1, 20)
            assert step(worker, "b") == "load"
            backend.running.open()
        assert worker.zone.peak <= SIZE + MIB


async def test_lost_while_leaving(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """A model that was told to leave has left when the session ends: its bytes go to the one that waits."""
    async with running(cable.url, identities, backend, memory=SIZE + MIB, max_cold_wait=0.2) as worker:
        await call(client, "a")
        backend.running.shut()
        async with asyncio.TaskGroup() as calls:
            calls.create_task(call(client, "a"))
            await wait_until(lambda: backend.running.passing)
            calls.create_task(call(client, "b"))
            await wait_until(lambda: step(worker, "a") == "cancel")
            cable.cut()
            await wait_until(lambda: worker.counters.reconnects == 1, 20)
            backend.running.open()
            await wait_until(lambda: is_hot(worker, "b"))
        assert loads(worker) == 3, "a was loaded again for the job that it had in hand"


async def test_result_is_confirmed_before_the_job_is_acked(
    running: Running, cable: Cable, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """While the confirm of the result has not come the job is not acked: cut off then, it is run again."""
    async with await AioPikaConnector(amqp_url).connect() as session:
        replies = Inbox()
        await session.declare(classic("replies"))
        await session.consume("replies", replies.take, prefetch=10)
        async with running(cable.url, identities, backend) as worker:
            await publish(session, "a", "first", "replies")
            await wait_until(lambda: len(replies) == 1 and worker.state()["models"][0]["in_hand"] == 0)
            cable.mute(1)  # the connection that publishes: the next result arrives, and its confirm does not
            await publish(session, "a", "second", "replies")
            await wait_until(lambda: len(replies) == 2)
            await asyncio.sleep(0.1)
            assert worker.state()["models"][0]["in_hand"] == 1, "it was settled without the confirm"
            cable.cut()
            await wait_until(lambda: len(replies) == 3, 20)
            assert [d.properties.correlation_id for d in replies.deliveries] == ["first", "second", "second"]
            await wait_until(lambda: worker.state()["models"][0]["in_hand"] == 0)
        assert await ready(session, lane_queue("jobs", "a")) == 0


async def test_broker_away_at_the_stop(
    running: Running, cable: Cable, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """A worker that cannot reach its broker stops all the same, and gives everything back."""
    async with running(cable.url, identities, backend) as worker:
        await call(client, "a")
        cable.unplug()
        await wait_until(lambda: step(worker, "a") == "lease")
    assert worker.zone.held == 0
    assert backend.engines[0].closed


# --- hints -----------------------------------------------------------------------------------------


async def hint(session: Session, model: str, reason: str = "sweep") -> None:
    await session.publish(COLD, model, b"", Properties(headers={REASON_HEADER: reason}))


async def test_hint_for_a_hot_model_is_dropped(
    running: Running, amqp_url: str, client: Client, identities: Path
) -> None:
    """It is acked and starts nothing."""
    async with running(amqp_url, identities) as worker, await AioPikaConnector(amqp_url).connect() as session:
        await call(client, "a")
        before = worker.counters.hints_stale
        await hint(session, "a")
        await wait_until(lambda: worker.counters.hints_stale == before + 1)
        assert (await session.depth(ACTIVATION)).ready == 0  # pyright: ignore[reportOptionalMemberAccess]
        assert loads(worker) == 1


async def test_stale_hint_loads_nothing(running: Running, amqp_url: str, identities: Path) -> None:
    """No job waits: the claim ends after its look, and the lease is free again."""
    async with running(amqp_url, identities) as worker, await AioPikaConnector(amqp_url).connect() as session:
        await hint(session, "a")
        await wait_until(lambda: worker.counters.hints == 1 and not worker.state()["claims"])
        assert loads(worker) == 0
        assert await session.lease(lease_queue("a", 0)) is True


async def test_hint_while_leaving_is_kept(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """A job that comes while the model unloads is served by the next claim, which its hint starts."""
    settings = {"memory": SIZE + MIB, "sweep_interval": 60}  # no sweep can help
    async with running(amqp_url, identities, backend, **settings) as worker:
        await call(client, "a")
        backend.closing.shut()
        async with asyncio.TaskGroup() as calls:
            calls.create_task(call(client, "b"))  # evicts a
            await wait_until(lambda: step(worker, "a") == "unload" and backend.closing.passing)
            hints = worker.counters.hints
            calls.create_task(call(client, "a"))
            await wait_until(lambda: worker.counters.hints > hints)
            assert step(worker, "a") == "unload"
            backend.closing.open()
        assert loads(worker) == 3
        assert worker.counters.wakes == 0


async def test_jobs_that_come_while_it_leaves_keep_a_model(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """It was told to leave, looks back, finds jobs, and stays: no load is lost on it."""
    async with running(amqp_url, identities, backend, memory=SIZE + MIB, prefetch=1, max_cold_wait=2) as worker:
        await call(client, "a")
        async with await AioPikaConnector(amqp_url).connect() as session:
            tenant = worker._tenants["a"]
            backend.running.shut()
            for number in range(5):
                await publish(session, "a", f"job-{number}")
            await wait_until(lambda: backend.running.passing)
            tenant._go(forced=False)  # as an operator would
            await wait_until(lambda: step(worker, "a") == "cancel")
            backend.running.open()
            await wait_until(lambda: worker.counters.revivals == 1)
            await wait_until(lambda: worker.counters.jobs_answered == 6)
        assert loads(worker) == 1


# --- jobs that no queue wanted ---------------------------------------------------------------------


async def test_stray_jobs_wait_in_hand_while_the_store_is_away(
    running: Running, amqp_url: str, identities: Path, tmp_path: Path
) -> None:
    """They are not given back again and again: each time counts as an attempt, and the broker drops the 21st."""
    store = copy_store(identities, tmp_path / "store")
    async with running(amqp_url, store) as worker, await AioPikaConnector(amqp_url).connect() as session:
        away = store.rename(tmp_path / "away")
        letters = Inbox()
        await session.consume(DEAD, letters.take, prefetch=10)
        await publish(session, "new", "a-stray")
        with structlog.testing.capture_logs() as logs:
            await wait_until(lambda: len([line for line in logs if line["event"] == "store.unreadable"]) >= 3)
        put(away, "new", identity(), resident_bytes=1 << 40)
        away.rename(store)
        await wait_until(lambda: len(letters) == 1)
        headers = letters.deliveries[0].properties.headers
        assert headers["x-qworker-cause"] == "model_too_large"
        assert "x-delivery-count" not in headers
        assert worker.counters.jobs_given_back == 0


async def test_a_stop_cuts_no_stray_between_its_answer_and_its_ack(
    running: Running, amqp_url: str, identities: Path
) -> None:
    """Whenever the stop comes, each job is either answered or where it was: none is both."""
    jobs = 60
    async with await AioPikaConnector(amqp_url).connect() as session:
        await session.declare(*static_topology("classic"), classic("answers"))
        for number in range(jobs):
            await publish(session, "nobody", f"job-{number}", "answers")
        async with running(amqp_url, identities, queue_type="classic") as worker:
            await wait_until(lambda: worker.counters.jobs_failed > 0)
            worker.stop()
        counts = [depth.ready if depth is not None else 0 for depth in await session.depths((UNROUTABLE, "answers"))]
        assert sum(counts) == jobs, counts


# --- more than one worker --------------------------------------------------------------------------


async def test_two_workers_share_the_models(running: Running, amqp_url: str, client: Client, identities: Path) -> None:
    """Each model is loaded by one of them, however many jobs it has."""
    async with running(amqp_url, identities) as one, running(amqp_url, identities) as two:
        async with asyncio.TaskGroup() as calls:
            for _ in range(10):
                for model in "abcd":
                    calls.create_task(call(client, model))
        assert [sum(is_hot(worker, model) for worker in (one, two)) for model in "abcd"] == [1, 1, 1, 1]
        assert loads(one) + loads(two) == 4


async def test_a_replica_when_there_is_a_backlog(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """A hint for a backlog makes the second worker take the next slot; a plain one does not."""
    other = BackendDouble()
    settings = {"max_replicas": 2, "prefetch": 1}
    async with (
        running(amqp_url, identities, backend, **settings) as one,
        running(amqp_url, identities, other, **settings) as two,
        await AioPikaConnector(amqp_url).connect() as session,
    ):
        await call(client, "a")
        backend.running.shut()
        other.running.shut()
        for number in range(6):
            await publish(session, "a", f"job-{number}")
        await hint(session, "a")
        await wait_until(lambda: one.counters.hints + two.counters.hints >= 2)
        assert loads(one) + loads(two) == 1

        async def both() -> bool:
            # The one that has the model drops the hint; the backlog would publish it again, too.
            await hint(session, "a", BACKLOG)
            return is_hot(one, "a") and is_hot(two, "a")

        await wait_until(both, every=0.1)
        assert {worker._tenants["a"].claim.slot for worker in (one, two)} == {0, 1}
        await wait_until(lambda: backend.running.passing and other.running.passing, what="both have a job")
        backend.running.open()
        other.running.open()
        await wait_until(lambda: one.counters.jobs_answered + two.counters.jobs_answered == 7)
        assert min(one.counters.jobs_answered, two.counters.jobs_answered) >= 1


async def test_no_third_replica(running: Running, amqp_url: str, client: Client, identities: Path) -> None:
    """With one slot there is one worker, whatever the backlog says."""
    async with (
        running(amqp_url, identities) as one,
        running(amqp_url, identities) as two,
        await AioPikaConnector(amqp_url).connect() as session,
    ):
        await call(client, "a")
        for _ in range(6):
            await hint(session, "a", BACKLOG)
        await wait_until(lambda: one.counters.hints + two.counters.hints >= 7)
        await wait_until(lambda: len(one.state()["claims"]) + len(two.state()["claims"]) == 1)
        assert loads(one) + loads(two) == 1


# --- the stop --------------------------------------------------------------------------------------


async def test_stop_finishes_what_is_in_hand(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """The first phase takes no more, the jobs in hand are answered, the others stay in the queue."""
    backend.running.shut()
    async with await AioPikaConnector(amqp_url).connect() as session:
        async with running(amqp_url, identities, backend, prefetch=1) as worker, asyncio.TaskGroup() as calls:
            calls.create_task(call(client, "a"))
            await wait_until(lambda: backend.running.passing)
            async with asyncio.TaskGroup() as publishes:
                for number in range(MORE_THAN_ANY_PREFETCH):
                    publishes.create_task(publish(session, "a", f"job-{number}"))
            worker.stop()
            await wait_until(lambda: step(worker, "a") == "cancel")
            assert worker.not_ready() == "draining"
            backend.running.open()
        left = await ready(session, lane_queue("jobs", "a"))
        assert left > 0
        assert worker.counters.jobs_answered == MORE_THAN_ANY_PREFETCH + 1 - left
        assert worker.counters.wakes == 1, "somebody else must know of the jobs that stay"


async def test_stop_without_grace_gives_back_what_is_in_hand(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """The second phase at once: unsettled jobs go back to the queue, for another worker."""
    async with await AioPikaConnector(amqp_url).connect() as session:
        async with running(amqp_url, identities, backend, leaves_bytes=True, grace=0) as worker:
            backend.running.shut()
            await publish(session, "a", "one")
            await publish(session, "a", "two")
            await wait_until(lambda: worker.state()["models"] and worker.state()["models"][0]["in_hand"] == 2)
        assert worker.counters.jobs_answered == 0
        backend.open_all()
        queue = lane_queue("jobs", "a")

        async def both_back() -> bool:
            return await ready(session, queue) == 2

        await wait_until(both_back)
        async with running(amqp_url, identities) as second:
            await wait_until(lambda: second.counters.jobs_answered == 2, 20)


@pytest.mark.parametrize("grace", [0, 30])
async def test_stop_while_loading(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble, grace: int
) -> None:
    """With grace the load ends first and the job is served; without, the job is left to others."""
    async with await AioPikaConnector(amqp_url).connect() as session:
        async with running(amqp_url, identities, backend, leaves_bytes=True, grace=grace) as worker:
            backend.loading.shut()
            await publish(session, "a", "one")
            await wait_until(lambda: backend.loading.passing)
            worker.stop()
            if grace:
                await asyncio.sleep(0.05)
                backend.loading.open()
        assert worker.zone.held == 0
        backend.open_all()
        await wait_until(lambda: all(engine.closed for engine in backend.engines) and backend.engines)
        queue = lane_queue("jobs", "a")

        async def as_expected() -> bool:
            return await ready(session, queue) == 1 - worker.counters.jobs_answered

        await wait_until(as_expected)
        assert worker.counters.jobs_answered == (1 if grace else 0)


async def test_stop_while_waiting_for_bytes(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """Who waits for bytes waits no longer; its job stays in the queue, and its hint is there for another worker."""
    async with await AioPikaConnector(amqp_url).connect() as session:
        async with running(amqp_url, identities, backend, memory=SIZE + MIB) as worker, asyncio.TaskGroup() as calls:
            await call(client, "a")
            backend.running.shut()
            calls.create_task(call(client, "a"))
            await wait_until(lambda: backend.running.passing)
            await publish(session, "b", "stays")
            await wait_until(worker.zone.blocked)
            worker.stop()
            await wait_until(lambda: "b" not in worker.state()["claims"])
            backend.running.open()
        assert await ready(session, lane_queue("jobs", "b")) == 1
        assert await ready(session, ACTIVATION) == 1
        assert loads(worker) == 1
