"""What chaos runs have found, each told again in short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from qworker.broker.node import PrivateNode
from qworker.store.local import LocalStore
from qworker.telemetry.counters import Counters
from qworker.wire.topology import EXPIRED, lane_queue, lane_topology, static_topology
from qworker.worker.registry import Registry
from qworker.worker.subscriptions import AckTimeout, Subscriptions
from tests.e2e.caller import Caller
from tests.e2e.conftest import made_up_store
from tests.e2e.fleet import Fleet, queue_depths
from tests.e2e.models import answer_of, copy_store, inputs_of
from tests.support.broker import CONNECTORS, Inbox, fill
from tests.support.waiting import wait_until, wait_until_sync

__all__ = ["made_up_store"]


class _Lanes:
    """As much of a server, and of an offline lane, as consumers need."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.in_hand = 0
        self.window = 0
        self.server = self

    def taker(self, _: object) -> object:
        return self.inbox.take

    def prefetch(self, least: int) -> int:
        return least


async def test_a_model_that_is_refused_answers_a_batch_lane_that_became_known(amqp_url: str, tmp_path: Path) -> None:
    """The batch lane was found while its model refused jobs: nobody consumed it, and the claim never ended."""
    registry, server = Registry(LocalStore(tmp_path), lambda: 0.0), _Lanes()
    consumers = Subscriptions(
        "echo",
        server,  # pyright: ignore[reportArgumentType]
        server,  # pyright: ignore[reportArgumentType]
        registry,
        Counters(),
        AckTimeout(1800),
        lambda: None,
        prefetch=8,
        lanes=1,
    )
    async with await CONNECTORS["fast"](amqp_url).connect() as session:
        await session.declare(*static_topology("quorum"), *lane_topology("jobs", "echo", "quorum"))
        await consumers.start(session, None)
        await session.declare(*lane_topology("batch", "echo", "quorum"))
        await fill(session, lane_queue("batch", "echo"), b"patient")
        registry.has_batch_lane("echo")
        await consumers.mend(session, None, look=False)
        await wait_until(lambda: server.inbox.bodies == [b"patient"], what="the job of the batch lane came")
        await server.inbox.deliveries[0].ack()


@pytest.fixture
def lonely(own_node: PrivateNode, made_up_store: Path, tmp_path: Path) -> Iterator[Fleet]:
    """A fleet on a broker that the test may kill."""
    fleet = Fleet(own_node.url, copy_store(made_up_store, tmp_path / "store"), tmp_path / "workers")
    yield fleet
    fleet.stop()


@pytest.mark.chaos
@pytest.mark.e2e
@pytest.mark.slow
def test_first_job_of_a_batch_lane_outlives_the_broker(lonely: Fleet, own_node: PrivateNode) -> None:
    """The lane's queue is made for its first job, and RabbitMQ loses what a queue of less than a second holds."""
    with Caller(own_node.url, "replies-that-survive", durable=True, listen=False) as caller:
        lonely.start(1)
        (worker,) = lonely.workers
        jobs = {caller.job("table-a", inputs_of("table-a", k), exchange="qworker.batch"): k for k in range(5)}
        worker.wait_event("model.declared", model="table-a", lane="batch")
    worker.kill()
    own_node.kill()
    own_node.start()
    lonely.start(1)
    with Caller(own_node.url, "replies-that-survive", durable=True) as caller:
        for job_id, reply in caller.wait(jobs, 60).items():
            assert (reply.y == answer_of("table-a", inputs_of("table-a", jobs[job_id]))).all()
    lonely.finish(left=None)  # strays that were sent on and not settled when the worker was killed come once more


@pytest.mark.chaos
@pytest.mark.slow
def test_jobs_that_expire_while_the_broker_stops_are_kept(own_node: PrivateNode) -> None:
    """It lost three of four that were on their way from their queue to that of the expired ones."""
    lanes = [lane_queue("jobs", f"m{number}") for number in range(8)]
    _declare(own_node.url, lanes)
    jobs, seconds = 800, 3.0
    stops = time.monotonic() + seconds
    with pika.BlockingConnection(pika.URLParameters(own_node.url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number in range(jobs):  # they expire from the moment of the stop on, most of them while it is down
            left = stops - time.monotonic() + 8.0 * number / jobs
            properties = pika.BasicProperties(delivery_mode=2, expiration=str(max(1, int(left * 1000))))
            channel.basic_publish("", lanes[number % len(lanes)], b"late", properties)
    time.sleep(max(0.0, stops - time.monotonic()))  # the fault's moment, not a wait for anything
    own_node.stop()
    own_node.start()

    def kept() -> bool:
        return sum(ready for ready, _ in queue_depths(own_node.url, [*lanes, EXPIRED]).values()) >= jobs

    wait_until_sync(kept, 30, what=f"all are there: {queue_depths(own_node.url, [*lanes, EXPIRED])}")


def _declare(url: str, lanes: list[str]) -> None:
    async def declare() -> None:
        async with await CONNECTORS["fast"](url).connect() as session:
            entities = (each for lane in lanes for each in lane_topology("jobs", lane.rpartition(".")[2], "quorum"))
            await session.declare(*static_topology("quorum"), *entities)

    asyncio.run(declare())
