"""Reply queues that are gone: nothing is run for nobody, nothing is lost, and no name does harm."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from qworker import Client
from qworker.wire.topology import DEAD, lane_queue
from tests.support.broker import Inbox, ready
from tests.support.waiting import wait_until
from tests.worker.answers import X, requester
from tests.worker.doubles import BackendDouble, Running, is_hot

NAMES = {
    "long": "x" * 255,
    "spaces and umlauts": "not a queue, süß ☃",
    "line breaks": "a\nb\r\n\t\x00c",
    "no token of ours": "amq.rabbitmq.reply-to.g1h2.nonsense",
    "a token cut short": "amq.rabbitmq.reply-to.g1g",
    "the broker's own prefix": "amq.gen-that-was-never-made",
    "an exchange": "qworker.jobs",
    "a pattern": "#",
}


async def test_a_job_for_nobody_is_not_run(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """The requester is asked for before the run, once for many jobs, and the job is kept with the cause."""
    async with running(amqp_url, identities, backend) as worker, requester(amqp_url) as asks:
        await client.call("a", {"x": X}, timeout=20)
        runs, letters = worker.counters.runs, Inbox()
        await asks.session.consume(DEAD, letters.take, prefetch=100)
        for number in range(20):
            await asks.publish("a", f"lonely-{number}", reply_to="was-deleted")
        await wait_until(lambda: len(letters) == 20)
        assert {each.properties.headers["x-qworker-cause"] for each in letters.deliveries} == {"reply_gone"}
        assert {each.properties.headers["x-qworker-attempts"] for each in letters.deliveries} == {1}
        assert all("not run" in each.properties.headers["x-qworker-reason"] for each in letters.deliveries)
        assert (worker.counters.runs, worker.counters.jobs_unwanted) == (runs, 20)
        await client.call("a", {"x": X}, timeout=20)
        assert worker.counters.reconnects == 0


async def test_a_reply_queue_that_only_its_owner_may_look_at_is_there(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """The broker answers the question about an exclusive queue with an error, which is answer enough."""
    async with running(amqp_url, identities, backend) as worker, requester(amqp_url) as asks:
        assert await asks.session.lease("mine")
        async with asyncio.TaskGroup() as publishing:
            for number in range(5):
                publishing.create_task(asks.publish("a", f"job-{number}", reply_to="mine"))

        async def all_came() -> bool:
            return await ready(asks.session, "mine") == 5

        await wait_until(all_came, 20)
        assert worker.counters.jobs_unwanted == 0


async def test_a_requester_that_comes_back_is_found(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """That a queue was gone is remembered for a second only."""
    async with running(amqp_url, identities, backend) as worker, requester(amqp_url) as asks:
        await asks.publish("a", "early", reply_to="back-soon")
        await wait_until(lambda: worker.counters.jobs_unwanted == 1, 20)
        assert await asks.session.lease("back-soon")

        async def answered() -> bool:
            await asks.publish("a", "again", reply_to="back-soon")
            return await ready(asks.session, "back-soon") > 0

        await wait_until(answered, every=0.2)


@pytest.mark.parametrize("name", NAMES)
async def test_a_bad_reply_to_closes_nothing(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble, name: str
) -> None:
    """Whatever a publisher writes there, the worker keeps its session, and a job beside it is answered."""
    async with running(amqp_url, identities, backend) as worker, requester(amqp_url) as asks:
        await client.call("a", {"x": X}, timeout=20)
        await asks.publish("a", "odd", reply_to=NAMES[name])
        await asks.publish("a", "even")
        await wait_until(lambda: asks.told.get("even") == ["result"], 20)

        async def done() -> bool:
            return (
                worker.state()["models"][0]["in_hand"] == 0 and await ready(asks.session, lane_queue("jobs", "a")) == 0
            )

        await wait_until(done)
        assert worker.counters.reconnects == 0
        assert is_hot(worker, "a")
