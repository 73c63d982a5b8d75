"""A connection that is lost: what calls in flight are told, and that the client comes back."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

from qworker import Client
from qworker.broker.node import PrivateNode
from qworker.errors import BrokerUnavailable, CallTimeout
from tests.client.responder import MODEL, Responder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.broker

ONE = {"x": np.float32([1, 2, 3])}


async def close_connections(node: PrivateNode, url: str) -> None:
    """Let the broker close all connections of one test's virtual host."""
    vhost = url.rpartition("/")[2]
    await asyncio.to_thread(node.ctl, "close_all_connections", "--vhost", vhost, "the test says so")


async def test_a_call_in_flight_fails_and_the_next_one_works(
    amqp_url: str, node: PrivateNode, responder: Responder
) -> None:
    """Its reply cannot come any more, and the caller is told that the job may still run."""
    async with Client(amqp_url) as client:
        waiting = asyncio.get_running_loop().create_task(client.call(MODEL, ONE, parameters={"act": "hold"}))
        await wait_until(lambda: responder.seen.qsize() == 1)
        await close_connections(node, amqp_url)
        with pytest.raises(BrokerUnavailable, match=r"may still run.*retry=True"):
            await waiting
        assert client.calls_in_flight == 0
        assert (await client.call(MODEL, {"x": 7})).arrays()["x"] == 7


async def test_with_retry_the_call_is_published_again(amqp_url: str, node: PrivateNode, responder: Responder) -> None:
    """Under the same id, so that a worker or a reader can tell."""
    async with Client(amqp_url) as client:
        waiting = asyncio.get_running_loop().create_task(
            client.call(MODEL, ONE, parameters={"act": "hold"}, retry=True)
        )
        first = await wait_until(lambda: not responder.seen.empty() and responder.seen.get())
        await close_connections(node, amqp_url)
        second = await wait_until(lambda: not responder.seen.empty() and responder.seen.get(), 30)
        assert second.job.id == first.job.id
        responder.release()
        assert (await waiting).id == first.job.id


async def test_a_reply_queue_is_consumed_again(amqp_url: str, node: PrivateNode, responder: Responder) -> None:
    """Its reader goes on as if nothing had been; an exclusive queue is declared anew."""
    async with Client(amqp_url) as client, client.reply_queue() as replies:
        reading = asyncio.get_running_loop().create_task(replies.receive())
        await close_connections(node, amqp_url)
        job_id = await published_once_it_is_back(client, replies.name)
        assert (await asyncio.wait_for(reading, 20)).result().id == job_id


async def published_once_it_is_back(client: Client, queue: str) -> str:
    """Publish again until the connection carries it: a publish in flight at the loss fails."""

    async def attempt() -> str | None:
        try:
            return await client.publish(MODEL, ONE, reply_to=queue)
        except BrokerUnavailable:
            return None

    return await wait_until(attempt, 20)


async def test_a_broker_that_restarts(own_node: PrivateNode) -> None:
    """Calls made while it is down wait for it, up to their timeout, and then say why."""
    with Responder(own_node.url):
        async with Client(own_node.url) as client:
            await wait_until(lambda: answers(client), 20)  # RabbitMQ 4.0.5 loses the first direct reply
            await asyncio.to_thread(own_node.stop)
            with pytest.raises(BrokerUnavailable, match=re.escape("no reply from echo within 0.5 s")):
                await client.call(MODEL, ONE, timeout=0.5)
            patient = asyncio.get_running_loop().create_task(patiently(client))
            await asyncio.to_thread(own_node.start)
            # The responder declares the queue again before it serves; a job from before that is kept.
            assert await patient == [1, 2, 3]


async def patiently(client: Client) -> list[float]:
    """RabbitMQ 4.0.5 loses the first direct reply after its start, and that is ours: then once more."""
    try:
        return (await client.call(MODEL, ONE, timeout=40, retry=True)).arrays()["x"].tolist()
    except CallTimeout:
        return (await client.call(MODEL, ONE, timeout=40, retry=True)).arrays()["x"].tolist()


async def test_a_broker_in_alarm(own_node: PrivateNode) -> None:
    """It holds messages back: no worker is to blame, and the error says so."""
    with Responder(own_node.url):
        async with Client(own_node.url) as client:
            await wait_until(lambda: answers(client), 20)
            await asyncio.to_thread(own_node.ctl, "set_vm_memory_high_watermark", "0.000001")
            for attempt in (client.call(MODEL, ONE, timeout=1.5), client.publish(MODEL, ONE, timeout=1.5)):
                with pytest.raises(BrokerUnavailable, match="alarm"):
                    await attempt
            await asyncio.to_thread(own_node.ctl, "set_vm_memory_high_watermark", "0.4")
            assert (await client.call(MODEL, ONE)).arrays()["x"].tolist() == [1, 2, 3]


async def answers(client: Client) -> bool:
    try:
        return bool(await client.call(MODEL, ONE, timeout=2))
    except CallTimeout:
        return False
