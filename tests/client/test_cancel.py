"""Cancelling: what the client tells the workers, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from qworker import Client
from qworker.broker.base import Connector, Session
from qworker.broker.reference.session import AioPikaConnector
from qworker.client.client import Client as PlainClient
from qworker.errors import BrokerUnavailable
from qworker.wire.control import Cancel, decode_order, read_cancel
from qworker.wire.topology import CONTROL, Binding, order_key
from tests.client.responder import MODEL, Responder
from tests.client.test_commands import qworker
from tests.support import leaks
from tests.support.broker import CONNECTORS, Inbox, classic
from tests.support.waiting import wait_until

pytestmark = pytest.mark.broker


@pytest.fixture
async def orders(amqp_url: str, responder: Responder) -> AsyncIterator[Inbox]:
    """What workers are told."""
    session: Session = leaks.register_session(await AioPikaConnector(amqp_url).connect())
    inbox = Inbox()
    await session.declare(classic("orders"), Binding(CONTROL, "orders", order_key("*")))
    await session.consume("orders", inbox.take, prefetch=10)
    yield inbox
    await session.__aexit__(None, None, None)


def only(orders: Inbox) -> Cancel:
    """The one order, which is to cancel."""
    (delivery,) = orders.deliveries
    order = decode_order(delivery.body, delivery.properties.content_type)
    assert (delivery.routing_key, order.verb) == ("cancel.all", "cancel")
    return read_cancel(order.arguments)


@pytest.mark.parametrize("connect", CONNECTORS.values(), ids=CONNECTORS)
async def test_a_cancelled_call_cancels_its_job(
    amqp_url: str, responder: Responder, orders: Inbox, connect: Callable[[str], Connector]
) -> None:
    """However its task ends: here by the caller's own limit."""
    async with PlainClient(connect(amqp_url)) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.call(MODEL, {"x": 1}, parameters={"act": "hold"})
        job_id = (await asyncio.to_thread(responder.seen.get, timeout=10)).job.id
        await wait_until(lambda: len(orders) == 1)
        assert only(orders) == Cancel([job_id], MODEL)
        assert (await client.call(MODEL, {"x": 2})).arrays()["x"] == 2
        assert client.calls_in_flight == 0


async def test_a_call_that_ends_by_itself_cancels_nothing(amqp_url: str, responder: Responder, orders: Inbox) -> None:
    """Neither with a result nor at its deadline, which the workers know."""
    async with Client(amqp_url) as client:
        await client.call(MODEL, {"x": 1})
        await client.cancel("another job")
        await wait_until(lambda: len(orders) == 1)
        assert only(orders) == Cancel(["another job"])


async def test_cancelling_without_a_connection(amqp_url: str, responder: Responder) -> None:
    """A closed client says so; it does not hang."""
    async with Client(amqp_url) as client:
        pass
    with pytest.raises(BrokerUnavailable, match="closed"):
        await client.cancel("a job")


async def test_the_command_cancels(amqp_url: str, responder: Responder, orders: Inbox) -> None:
    """``qworker cancel`` sends the same order, and says so."""
    ran = await asyncio.to_thread(qworker, "cancel", "one", "--model", MODEL, "--broker", amqp_url)
    assert ran.returncode == 0, ran.stderr
    assert "1 job" in ran.stdout
    await wait_until(lambda: len(orders) == 1)
    assert only(orders) == Cancel(["one"], MODEL)
