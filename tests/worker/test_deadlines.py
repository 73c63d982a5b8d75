"""Jobs whose time is over: answered at once, wherever they wait, and never run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from qworker.wire.topology import DEAD, EXPIRED, JOBS, lane_queue
from tests.support.broker import Inbox, ready
from tests.support.waiting import wait_until
from tests.worker.answers import Requester, requester
from tests.worker.doubles import BackendDouble, Running, is_hot, step

SOON = 0.3
AT_MOST = 1.0
"""Seconds after its deadline within which a job is answered."""


async def answered_late(asks: Requester, job_id: str, deadline: float) -> None:
    """The one answer says that the time is over, and came in time itself."""
    await wait_until(lambda: job_id in asks.told)
    assert asks.told[job_id] == ["deadline_exceeded"]
    assert deadline <= asks.came[job_id] <= deadline + AT_MOST


@pytest.mark.parametrize("tells", ["deadline", "expiration"])
async def test_behind_a_run(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble, tells: str
) -> None:
    """In hand behind a job that runs for long: told while that still runs; what has time waits on."""
    async with running(amqp_url, identities, backend, threads=1) as worker, requester(amqp_url) as asks:
        backend.running.shut()
        await asks.publish("a", "runs")
        await wait_until(lambda: backend.running.passing)
        deadline = time.time() + SOON
        if tells == "deadline":
            await asks.publish("a", "late", deadline=deadline)
        else:
            await asks.publish("a", "late", expiration_ms=int(SOON * 1000))
        await asks.publish("a", "has time", deadline=deadline + 60)
        await answered_late(asks, "late", deadline)
        backend.running.open()
        await wait_until(lambda: "has time" in asks.told)
        await wait_until(lambda: worker.state()["models"][0]["in_hand"] == 0)
        assert asks.told == {"late": ["deadline_exceeded"], "runs": ["result"], "has time": ["result"]}
        assert worker.counters.runs == 2


async def test_behind_a_load(running: Running, amqp_url: str, identities: Path, backend: BackendDouble) -> None:
    """In the broker, while the model loads: told while it still loads."""
    async with running(amqp_url, identities, backend) as worker, requester(amqp_url) as asks:
        backend.loading.shut()
        deadline = time.time() + SOON
        await asks.publish("a", "late", deadline=deadline, expiration_ms=int(SOON * 1000))
        await asks.publish("a", "has time", deadline=deadline + 60, expiration_ms=60_000)
        await wait_until(lambda: backend.loading.passing)
        await answered_late(asks, "late", deadline)
        assert step(worker, "a") == "load"
        backend.loading.open()
        await wait_until(lambda: "has time" in asks.told)
        assert asks.told == {"late": ["deadline_exceeded"], "has time": ["result"]}
        assert worker.counters.runs == 1
        assert await ready(asks.session, lane_queue("jobs", "a")) == await ready(asks.session, DEAD) == 0


async def test_behind_what_is_in_hand(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """In the queue of a model that is hot and has all in hand that it may have: three hundred, and all are told."""
    async with running(amqp_url, identities, backend, threads=1, prefetch=1) as worker, requester(amqp_url) as asks:
        await asks.publish("a", "first")
        await wait_until(lambda: "first" in asks.told and is_hot(worker, "a"))
        backend.running.shut()
        await asks.publish("a", "runs")
        await wait_until(lambda: backend.running.passing)
        deadline = time.time() + SOON
        for number in range(300):
            await asks.publish("a", f"late {number}", deadline=deadline, expiration_ms=int(SOON * 1000))
        await wait_until(lambda: len(asks.told) == 301, 15)
        assert all(asks.told[f"late {number}"] == ["deadline_exceeded"] for number in range(300))
        backend.running.open()
        await wait_until(lambda: "runs" in asks.told)
        assert worker.counters.jobs_answered == 2


async def test_without_anybody_to_tell(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """A job without a reply address becomes one dead letter, which says where it waited, and can go back there."""
    async with running(amqp_url, identities, backend), requester(amqp_url) as asks:
        backend.loading.shut()
        await asks.publish("a", "late", expiration_ms=50, reply_to=None)
        letters = Inbox()
        await asks.session.consume(DEAD, letters.take, prefetch=10)
        await wait_until(lambda: len(letters) == 1)
        properties = letters.deliveries[0].properties
        assert properties.headers["x-qworker-cause"] == "deadline_exceeded"
        assert properties.headers["x-qworker-exchange"] == JOBS
        assert properties.message_id == "late"
        assert not [name for name in properties.headers if "death" in name]


async def test_while_no_worker_is_there(running: Running, amqp_url: str, identities: Path) -> None:
    """The broker sets it aside, and the next worker answers it, without a load."""
    async with running(amqp_url, identities):
        pass  # the topology is declared
    async with requester(amqp_url) as asks:
        await asks.publish("a", "late", expiration_ms=20)

        async def set_aside() -> bool:
            return await ready(asks.session, EXPIRED) == 1

        await wait_until(set_aside)
        async with running(amqp_url, identities) as worker:
            await wait_until(lambda: asks.told == {"late": ["deadline_exceeded"]})
            assert "qworker.jobs.a" in asks.texts["late"]
            assert worker.counters.loads == 0
