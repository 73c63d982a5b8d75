"""Publishing without waiting, and reading results from a queue of one's own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from qworker import Client
from qworker.broker.base import Properties, Session
from qworker.broker.reference.session import AioPikaConnector
from qworker.errors import BrokerError, JobFailed, UnknownModel
from qworker.wire.codec import encode_failure, encode_result
from qworker.wire.messages import MSGPACK, Failure, Result
from tests.client.responder import MODEL, Responder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.broker


async def test_results_come_in_the_callers_queue(amqp_url: str, responder: Responder) -> None:
    """Each with the id that publish returned."""
    async with Client(amqp_url) as client, client.reply_queue() as replies:
        ids = {await client.publish(MODEL, {"x": number}, reply_to=replies.name): number for number in range(20)}
        found: dict[str, int] = {}
        async for reply in replies:
            result = reply.result()
            found[result.id] = int(result.arrays()["x"])
            if len(found) == 20:
                break
        assert found == ids


async def test_a_failure_is_a_reply_too(amqp_url: str, responder: Responder) -> None:
    """One bad job does not end the reading of the others."""
    async with Client(amqp_url) as client, client.reply_queue() as replies:
        await client.publish(
            MODEL,
            {"x": 1},
            reply_to=replies.name,
            correlation_id="mine",
            parameters={"act": "fail", "code": "unknown_model"},
        )
        reply = await replies.receive()
        assert isinstance(reply.outcome, Failure)
        assert reply.correlation_id == "mine"
        with pytest.raises(UnknownModel, match="no luck"):
            reply.result()
        await client.publish(MODEL, {"x": 2}, reply_to=replies.name, parameters={"act": "garbage"})
        await client.publish(MODEL, {"x": 3}, reply_to=replies.name)
        with pytest.raises(JobFailed, match="not a result"):
            await replies.receive()
        assert (await replies.receive()).result().arrays()["x"] == 3


async def test_a_durable_queue_outlives_its_reader(amqp_url: str, responder: Responder) -> None:
    """Results that nobody has read wait for the next client; those read do not come again."""
    async with Client(amqp_url) as client:
        async with client.reply_queue("results", durable=True) as replies:
            first = await client.publish(MODEL, {"x": 1}, reply_to="results")
            assert (await replies.receive()).result().id == first
        second = await client.publish(MODEL, {"x": 2}, reply_to="results")
    async with Client(amqp_url) as client, client.reply_queue("results", durable=True) as replies:
        assert (await replies.receive()).result().id == second


async def test_a_reply_that_was_not_dealt_with_comes_again(amqp_url: str, responder: Responder) -> None:
    """An error in the reader's block leaves the reply in the queue."""

    async def read_and_fail(client: Client) -> None:
        async with client.reply_queue("results", durable=True) as replies:
            await client.publish(MODEL, {"x": 1}, reply_to="results", correlation_id="mine")
            await replies.receive()
            raise ZeroDivisionError

    async with Client(amqp_url) as client:
        with pytest.raises(ZeroDivisionError):
            await read_and_fail(client)
        async with client.reply_queue("results", durable=True) as replies:
            assert (await asyncio.wait_for(replies.receive(), 10)).correlation_id == "mine"


async def test_an_answer_that_comes_twice_is_seen_once(amqp_url: str, responder: Responder) -> None:
    """Workers answer at least once; the second answer to a job is dropped, and the one after it comes."""
    async with Client(amqp_url) as client, client.reply_queue() as replies:
        sent = [
            await client.publish(MODEL, {"x": number}, reply_to=replies.name, parameters={"act": "twice"})
            for number in range(3)
        ]
        assert [(await replies.receive()).result().id for _ in sent] == sent
        last = await client.publish(MODEL, {"x": 9}, reply_to=replies.name)
        assert (await replies.receive()).result().id == last
        assert replies.duplicates == 3


async def test_one_id_for_two_models_is_two_answers(amqp_url: str, responder: Responder) -> None:
    """And a result that comes after a failure was asked for again: it is no duplicate."""
    answers = [
        Failure("1", "a", "internal", "no luck"),
        Failure("1", "b", "internal", "no luck"),
        Failure("1", "a", "deadline_exceeded", "a second failure"),
        Result("1", "a", "1", ()),
        Failure("1", "a", "internal", "after the result"),
        Result("2", "a", "1", ()),
    ]
    async with Client(amqp_url) as client, client.reply_queue() as replies:
        async with await AioPikaConnector(amqp_url).connect() as session:
            for answer in answers:
                is_result = isinstance(answer, Result)
                body = encode_result(answer, MSGPACK) if is_result else encode_failure(answer, MSGPACK)
                await session.publish("", replies.name, body, Properties(content_type=MSGPACK))
        found = [(await replies.receive()).outcome for _ in range(4)]
        assert [(type(outcome), outcome.id, outcome.model) for outcome in found] == [
            (Failure, "1", "a"),
            (Failure, "1", "b"),
            (Result, "1", "a"),
            (Result, "2", "a"),
        ]
        assert replies.duplicates == 2


async def test_a_queue_that_cannot_be_read_any_more(amqp_url: str, responder: Responder) -> None:
    """The reader is told and may go on; calls do not notice. Here the former connection still holds the queue."""
    async with Client(amqp_url) as client, client.reply_queue() as replies:
        reading = asyncio.get_running_loop().create_task(replies.receive())
        session = await AioPikaConnector(amqp_url).connect()
        try:
            await replies.resume(session)
        finally:
            await session.__aexit__(None, None, None)
        with pytest.raises(BrokerError, match="holds it exclusively"):
            await reading
        assert (await client.call(MODEL, {"x": 1})).arrays()["x"] == 1
        reading = asyncio.get_running_loop().create_task(replies.receive())
        job_id = await client.publish(MODEL, {"x": 2}, reply_to=replies.name)
        assert (await asyncio.wait_for(reading, 10)).result().id == job_id


async def test_a_reader_that_has_subscribed_by_itself_keeps_what_it_holds(amqp_url: str, responder: Responder) -> None:
    """It was refused, waited for the next connection, and subscribed there before it was told to: answers that it had
    by then lay unacknowledged until the connection was lost again."""
    async with Client(amqp_url) as client, client.reply_queue("results", durable=True) as replies:
        session, _ = await client._link.ready()
        sent = [await client.publish(MODEL, {"x": number}, reply_to=replies.name) for number in range(3)]
        first = (await asyncio.wait_for(replies.receive(), 10)).result().id
        await wait_until(lambda: _all_delivered(session), what="the others are with the reader, too")
        await client.call(MODEL, {"x": 9})  # by the same connection: what was sent before has arrived
        await replies.resume(session)
        assert [first, *[(await asyncio.wait_for(replies.receive(), 10)).result().id for _ in sent[1:]]] == sent


async def _all_delivered(session: Session) -> bool:
    depth = await session.depth("results")
    return depth is not None and depth.ready == 0


def test_a_durable_queue_needs_a_name(amqp_url: str) -> None:
    """Nobody could find it again."""
    with pytest.raises(ValueError, match="needs a name"):
        Client(amqp_url).reply_queue(durable=True)


async def test_a_job_without_a_reply_address_is_taken(amqp_url: str, responder: Responder) -> None:
    """publish returns once the broker has the job; who reads the result is another matter."""
    async with Client(amqp_url) as client:
        job_id = await client.publish(MODEL, {"x": np.float32(2)})
    seen = await asyncio.to_thread(responder.seen.get, timeout=5)
    assert seen.job.id == job_id
    assert seen.properties.reply_to is None
    assert "x-deadline" not in seen.properties.headers
