"""Orders to workers: jobs that are cancelled do not run, wherever they are; and orders that make no sense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qworker import Client
from qworker.broker.base import Delivery, Properties, Session
from qworker.errors import JobCancelled
from qworker.wire.control import Order, OrderReply, cancel_order, decode_order_reply, encode_order
from qworker.wire.messages import JSON, MSGPACK
from qworker.wire.topology import CONTROL, DEAD, lane_queue, order_key
from tests.support.broker import Inbox, classic, ready
from tests.support.waiting import wait_until
from tests.worker.answers import X, requester
from tests.worker.doubles import BackendDouble, Running, step


class Operator:
    """Gives orders and keeps the replies."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.replies: list[OrderReply] = []

    async def tell(self, order: Order | bytes, key: str, content_type: str = MSGPACK) -> None:
        body = order if isinstance(order, bytes) else encode_order(order, content_type)
        await self._session.publish(CONTROL, key, body, Properties(reply_to="replies", content_type=content_type))

    def take(self, delivery: Delivery) -> None:
        self.replies.append(decode_order_reply(delivery.body, delivery.properties.content_type))

    async def ask(self, order: Order | bytes, key: str, content_type: str = MSGPACK) -> OrderReply:
        """The reply of the one worker there is. It may have to be told again: its queue comes with its session."""
        count = len(self.replies)

        async def replied() -> bool:
            await self.tell(order, key, content_type)
            await asyncio.sleep(0.05)
            return len(self.replies) > count

        await wait_until(replied)
        return self.replies[count]


@asynccontextmanager
async def operator(session: Session) -> AsyncIterator[Operator]:
    told = Operator(session)
    await session.declare(classic("replies"))
    await session.consume("replies", told.take, prefetch=1000)
    yield told


def said(reply: OrderReply) -> Mapping[str, Any]:
    assert (reply.worker, reply.verb, reply.error) == ("in-process", "cancel", None)
    return reply.result or {}


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
async def test_in_hand(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble, content_type: str
) -> None:
    """What has not begun ends at once, with a failure of its own; what runs goes on."""
    async with running(amqp_url, identities, backend, threads=1) as worker, requester(amqp_url) as asks:
        backend.running.shut()
        await asks.publish("a", "runs")
        await wait_until(lambda: backend.running.passing)
        for job_id in ("unwanted", "wanted"):
            await asks.publish("a", job_id)
        await wait_until(lambda: worker.state()["models"][0]["in_hand"] == 3)
        async with operator(asks.session) as told:
            order = cancel_order(["runs", "unwanted", "unknown"], "a")
            reply = await told.ask(order, order_key("cancel"), content_type)
        assert said(reply) == {"cancelled": ["unwanted"], "running": ["runs"]}
        await wait_until(lambda: "unwanted" in asks.told)
        assert asks.told == {"unwanted": ["cancelled"]}
        backend.running.open()
        await wait_until(lambda: len(asks.told) == 3)
        assert asks.told == {"unwanted": ["cancelled"], "runs": ["result"], "wanted": ["result"]}
        assert worker.counters.runs == 2


async def test_while_the_model_loads(running: Running, amqp_url: str, identities: Path, backend: BackendDouble) -> None:
    """The load that others want goes on, and is the only one; the cancelled job does not run."""
    async with running(amqp_url, identities, backend) as worker, requester(amqp_url) as asks:
        backend.loading.shut()
        await asks.publish("a", "unwanted")
        await asks.publish("a", "wanted")
        await wait_until(lambda: backend.loading.passing)
        async with operator(asks.session) as told:
            assert said(await told.ask(cancel_order(["unwanted"]), order_key("cancel"))) == {
                "cancelled": [],
                "running": [],
            }
        assert step(worker, "a") == "load"
        backend.loading.open()
        await wait_until(lambda: len(asks.told) == 2)
        assert asks.told == {"unwanted": ["cancelled"], "wanted": ["result"]}
        assert (worker.counters.loads, worker.counters.runs) == (1, 1)
        assert await ready(asks.session, DEAD) == 0


async def test_a_cancelled_call(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """The caller goes, its job does not run, and the next call on the same model does."""
    async with running(amqp_url, identities, backend, threads=1) as worker:
        await client.call("a", {"x": X})
        backend.running.shut()
        async with asyncio.TaskGroup() as calls:
            calls.create_task(client.call("a", {"x": X}))
            await wait_until(lambda: backend.running.passing)
            unwanted = calls.create_task(client.call("a", {"x": X}, timeout=None))
            await wait_until(lambda: worker.state()["models"][0]["in_hand"] == 2)
            unwanted.cancel()
            await wait_until(lambda: worker.state()["models"][0]["in_hand"] == 1, what="it ended while another ran")
            backend.running.open()
        await client.call("a", {"x": X})
        assert worker.counters.runs == 3


async def test_the_caller_is_told(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """Who waits for a job that somebody else cancels gets an error that says so."""
    async with running(amqp_url, identities, backend, threads=1) as worker:
        await client.call("a", {"x": X})
        backend.running.shut()
        async with asyncio.TaskGroup() as calls:
            calls.create_task(client.call("a", {"x": X}))
            await wait_until(lambda: backend.running.passing)
            waits = calls.create_task(_error_of(client.call("a", {"x": X})))
            await wait_until(lambda: worker.state()["models"][0]["in_hand"] == 2)
            job_id = max(client._waiting, key=lambda each: int(each.rpartition("-")[2], 16))
            await client.cancel(job_id)
            assert isinstance(await waits, JobCancelled)
            backend.running.open()


async def test_orders_for_one_worker(running: Running, amqp_url: str, identities: Path) -> None:
    """An order with another worker's name is not for us."""
    async with running(amqp_url, identities), requester(amqp_url) as asks, operator(asks.session) as told:
        await told.ask(cancel_order(["x"]), order_key("cancel", "in-process"))
        count = len(told.replies)
        await told.tell(cancel_order(["x"]), order_key("cancel", "another"))
        await told.ask(cancel_order(["x"]), order_key("cancel"))
        await asyncio.sleep(0.1)
        assert all(reply.result is not None for reply in told.replies)
        assert len(told.replies) >= count + 1


@pytest.mark.parametrize(
    ("verb", "order", "why"),
    [
        ("cancel", b"\xc1 no order", "expected an order"),
        ("cancel", b"[" * 70_000, "at most 65536 bytes"),
        ("cancel", b"[" * 60_000, "expected an order"),
        ("dance", Order("dance"), "no verb 'dance': known are cancel"),
        ("dance", cancel_order(["x"]), "the routing key says 'dance'"),
        ("cancel", Order("cancel"), "cancel takes jobs"),
        ("cancel", Order("cancel", {"jobs": [1]}), "cancel takes jobs"),
        ("cancel", Order("cancel", {"jobs": ["x"] * 1001}), "at most 1000 jobs"),
    ],
    ids=["garbage", "large", "deep", "unknown", "smuggled", "nothing", "wrong", "many"],
)
async def test_orders_that_make_no_sense(
    running: Running, amqp_url: str, client: Client, identities: Path, verb: str, order: Order | bytes, why: str
) -> None:
    """Each is answered with what is wrong, does nothing, and the worker goes on."""
    content_type = JSON if isinstance(order, bytes) and order.startswith(b"[") else MSGPACK
    async with running(amqp_url, identities), requester(amqp_url) as asks, operator(asks.session) as told:
        reply = await told.ask(order, order_key(verb), content_type)
        assert reply.result is None
        assert reply.error is not None
        assert reply.error["code"] == "invalid_input"
        assert why in reply.error["message"]
        await client.call("a", {"x": X})


async def test_a_reply_that_nobody_can_get(running: Running, amqp_url: str, client: Client, identities: Path) -> None:
    """A reply address that does not exist harms nobody."""
    async with running(amqp_url, identities) as worker, requester(amqp_url) as asks:
        body = msgspec.msgpack.encode({"verb": "cancel", "arguments": {"jobs": ["x"]}})

        async def heard() -> bool:
            await asks.session.publish(CONTROL, order_key("cancel"), body, Properties(reply_to="nowhere"))
            return "x" in worker._cancelled.ids

        await wait_until(heard, every=0.05)
        await client.call("a", {"x": X})
        assert worker.counters.reconnects == 0


async def test_a_cancelled_job_without_a_reply_address(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """It becomes a dead letter, as any failure does that nobody is told of."""
    async with running(amqp_url, identities, backend), requester(amqp_url) as asks:
        backend.loading.shut()
        await asks.publish("a", "unwanted", reply_to=None)
        await wait_until(lambda: backend.loading.passing)
        async with operator(asks.session) as told:
            await told.ask(cancel_order(["unwanted"]), order_key("cancel"))
        letters = Inbox()
        await asks.session.consume(DEAD, letters.take, prefetch=10)
        backend.loading.open()
        await wait_until(lambda: len(letters) == 1)
        assert letters.deliveries[0].properties.headers["x-qworker-cause"] == "cancelled"
        assert await ready(asks.session, lane_queue("jobs", "a")) == 0


async def _error_of(work: Any) -> BaseException | None:
    (result,) = await asyncio.gather(work, return_exceptions=True)
    return result if isinstance(result, BaseException) else None
