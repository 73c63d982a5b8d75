"""Alarms of a real broker, and its consumer timeout: results wait, intake stops, health says so, nothing is doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from qworker.broker.base import Session
from qworker.broker.fast.session import FastConnector
from qworker.broker.node import PrivateNode
from qworker.wire.topology import ACTIVATION, lane_queue, lane_topology, static_topology
from qworker.worker import pulse, sweep
from qworker.worker.intake import Hint
from qworker.worker.worker import Worker
from tests.support.broker import ready
from tests.support.rabbitmq import start_node
from tests.support.waiting import wait_until
from tests.worker.conftest import MODELS
from tests.worker.doubles import BackendDouble, Cable, Running, is_hot, step
from tests.worker.test_resync import answered, collect, in_hand, job, publish

pytestmark = [pytest.mark.slow, pytest.mark.broker]

JOBS, PREFETCH = 40, 4
ACK_TIMEOUT_S = 4
USUAL_ACK_TIMEOUT_S = 1800


@pytest.fixture(scope="module")
def alarm_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """A broker of this file's own: an alarm is for all of its virtual hosts."""
    node = start_node(tmp_path_factory.mktemp("alarms"))
    yield node
    node.stop(timeout=10.0)


@pytest.fixture
async def session(alarm_node: PrivateNode) -> AsyncIterator[Session]:
    """A session of a bystander, with the topology declared and no message left from the test before."""
    async with await FastConnector(alarm_node.url).connect() as session:
        for queue in ("replies", ACTIVATION, *(lane_queue("jobs", model) for model in MODELS)):
            await session.delete_queue(queue)
        await session.declare(*static_topology("quorum"))
        for model in MODELS:
            await session.declare(*lane_topology("jobs", model, "quorum"))
        yield session


@asynccontextmanager
async def alarm(node: PrivateNode, *, later: bool = False) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """The broker says that it is short of memory; ``later``: only once what is yielded is called."""
    strike = partial(asyncio.to_thread, node.ctl, "set_vm_memory_high_watermark", "0.00001")
    if not later:
        await strike()
    try:
        yield strike
    finally:
        await asyncio.to_thread(node.ctl, "set_vm_memory_high_watermark", "0.4")


def is_blocked(worker: Worker) -> bool:
    return worker.state()["broker"]["blocked"]


async def test_results_wait_out_an_alarm(
    running: Running, alarm_node: PrivateNode, session: Session, identities: Path, backend: BackendDouble
) -> None:
    """No more jobs than the prefetch are in hand, readiness says why, and on the release each is answered once."""
    ids = {f"job-{number}" for number in range(JOBS)}
    async with running(alarm_node.url, identities, backend, prefetch=PREFETCH) as worker:
        replies = await collect(session)
        backend.running.shut()
        for job_id in ids:
            await publish(session, "a", job_id)
        await wait_until(lambda: backend.running.passing)
        window = worker._tenants["a"]._server.window
        async with alarm(alarm_node):
            backend.running.open()
            await wait_until(lambda: is_blocked(worker))
            assert "alarm" in (worker.not_ready() or "")
            await wait_until(lambda: worker.state()["broker"]["outbox_messages"] == in_hand(worker) == window)
            waiting = await at_rest(session)  # the broker still confirms what it had read before
            assert JOBS - window - len(answered(replies)) <= waiting <= JOBS - window
            await asyncio.sleep(0.5)
            assert await ready(session, lane_queue("jobs", "a")) == waiting, "it took more in hand"
            assert in_hand(worker) == window
            assert worker.state()["broker"]["blocked_seconds"] > 0
        await wait_until(lambda: answered(replies) == ids, 30)
        await wait_until(lambda: worker.not_ready() is None and in_hand(worker) == 0)
        assert len(replies) == JOBS, "a result was sent twice"
        assert worker.counters.blocked == 1
        assert worker.counters.reconnects == 0
        assert worker.counters.jobs_given_back == 0
        assert worker.state()["broker"]["outbox_messages"] == 0


async def test_intake_stops_under_an_alarm(
    running: Running,
    alarm_node: PrivateNode,
    session: Session,
    identities: Path,
    backend: BackendDouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that has nothing to publish learns of the alarm all the same, and claims no cold model until its end."""
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.2)
    monkeypatch.setattr(sweep, "SETTLE_SECONDS", 60.0)  # no sweep finds the job before the alarm
    async with running(alarm_node.url, identities, backend) as worker:
        replies = await collect(session)
        await session.publish("", lane_queue("jobs", "a"), *job("a", "waits"))  # without a hint
        async with alarm(alarm_node):
            await wait_until(lambda: is_blocked(worker))
            assert worker.not_ready() is not None
            assert worker.claim("a", False, Hint(None))
            await wait_until(lambda: step(worker, "a") == "lease")
            await asyncio.sleep(0.5)
            assert step(worker, "a") == "lease"
            assert worker.counters.loads == 0
        await wait_until(lambda: answered(replies) == {"waits"}, 30)
        assert worker.counters.loads == 1


async def test_a_connection_lost_under_an_alarm(
    running: Running, alarm_node: PrivateNode, session: Session, identities: Path, backend: BackendDouble
) -> None:
    """The model stays hot and takes nothing until the release; then every job is answered, and none is lost.

    What was on its way to the broker when the connection was lost may arrive as well as its second run: callers know
    it by its id.
    """
    ids = {f"job-{number}" for number in range(JOBS)}
    async with (
        Cable(alarm_node.url) as cable,
        running(cable.url, identities, backend, prefetch=PREFETCH) as worker,
    ):
        replies = await collect(session)
        backend.running.shut()
        for job_id in ids:
            await publish(session, "a", job_id)
        await wait_until(lambda: backend.running.passing)
        window = worker._tenants["a"]._server.window
        async with alarm(alarm_node):
            backend.running.open()
            await wait_until(lambda: is_blocked(worker) and worker.state()["broker"]["outbox_messages"] == window)
            cable.cut()
            await wait_until(lambda: worker.counters.reconnects == 1 and is_blocked(worker), 20)
            await wait_until(lambda: in_hand(worker) == 0)
            assert step(worker, "a") in ("lease", "announce", "consume")
            await asyncio.sleep(0.5)
            assert in_hand(worker) == 0, "it took jobs whose answers cannot leave"
        await wait_until(lambda: answered(replies) == ids, 30)
        await wait_until(lambda: in_hand(worker) == 0)
        assert worker.counters.loads == 1
        assert len(replies) <= JOBS + window
        assert await ready(session, lane_queue("jobs", "a")) == 0


async def test_a_worker_stops_under_an_alarm(
    running: Running, alarm_node: PrivateNode, session: Session, identities: Path, backend: BackendDouble
) -> None:
    """It waits no longer than its grace for results to leave; their jobs are in the queue again, and others do them."""
    ids = {f"job-{number}" for number in range(JOBS)}
    replies = await collect(session)
    async with alarm(alarm_node, later=True) as strike:
        async with running(
            alarm_node.url, identities, backend, prefetch=PREFETCH, grace=0.5, leaves_bytes=True
        ) as worker:
            backend.running.shut()
            for job_id in ids:
                await publish(session, "a", job_id)
            await wait_until(lambda: backend.running.passing)
            window = worker._tenants["a"]._server.window
            await strike()
            backend.running.open()
            await wait_until(lambda: worker.state()["broker"]["outbox_messages"] == window)
        done = len(answered(replies))
        assert done < JOBS
        await wait_until(lambda: _is_back(session, JOBS - done), 20)
    async with running(alarm_node.url, identities) as other:
        await wait_until(lambda: answered(replies) == ids, 30)
        await wait_until(lambda: in_hand(other) == 0)


async def at_rest(session: Session) -> int:
    """Jobs that wait, once their number stays the same."""
    before, now = -1, await ready(session, lane_queue("jobs", "a"))
    while now != before:
        await asyncio.sleep(0.5)
        before, now = now, await ready(session, lane_queue("jobs", "a"))
    return now


async def _is_back(session: Session, jobs: int) -> bool:
    return await ready(session, lane_queue("jobs", "a")) == jobs


async def test_a_job_that_outlasts_the_consumer_timeout(
    running: Running, alarm_node: PrivateNode, session: Session, identities: Path, backend: BackendDouble
) -> None:
    """The broker takes it back and closes the channel: that model consumes anew, the others feel nothing."""
    await set_ack_timeout(alarm_node, ACK_TIMEOUT_S)
    try:
        async with running(alarm_node.url, identities, backend) as worker:
            replies = await collect(session)
            await publish(session, "b", "b-0")
            await wait_until(lambda: answered(replies) == {"b-0"})
            backend.running.shut()
            await publish(session, "a", "slow")
            await wait_until(lambda: backend.running.passing)
            await wait_until(lambda: worker._tenants["a"]._subscriptions._lost, 30)
            backend.running.open()
            await wait_until(lambda: worker.counters.consumers_lost == 1 and is_hot(worker, "a"))
            await publish(session, "b", "b-1")
            await publish(session, "a", "quick")
            await wait_until(lambda: answered(replies) == {"b-0", "slow", "b-1", "quick"})
            await wait_until(lambda: in_hand(worker) == 0)
            assert worker.counters.reconnects == 0, "it cost the session"
            assert worker.counters.loads == 2
            assert worker._parts.ack_timeout.seconds in (ACK_TIMEOUT_S, USUAL_ACK_TIMEOUT_S)
            assert await ready(session, lane_queue("jobs", "a")) == 0
    finally:
        await set_ack_timeout(alarm_node, USUAL_ACK_TIMEOUT_S)


async def set_ack_timeout(node: PrivateNode, seconds: int) -> None:
    """Of channels that are opened from now on. The broker looks once a second."""
    sets = f"application:set_env(rabbit, consumer_timeout, {seconds * 1000})"
    await asyncio.to_thread(node.ctl, "eval", f"{sets}, application:set_env(rabbit, channel_tick_interval, 1000).")
