"""What a job waits for, as its caller hears it: while it waits, in a queue, and when its time is over."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from qworker import CallTimeout, Client, Progress, SyncClient
from qworker.broker.base import Connector, Depth, Properties
from qworker.client.waiting import waits_for
from qworker.wire.codec import encode_job
from qworker.wire.datatypes import tensor
from qworker.wire.messages import JSON, MSGPACK, Job
from qworker.wire.progress import PROGRESS_HEADER
from qworker.wire.topology import ACTIVATION, JOBS, Queue, lane_queue, lane_topology, lease_queue, static_topology
from tests.client.responder import MODEL, Responder
from tests.client.test_commands import qworker
from tests.support.broker import CONNECTORS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.broker

ONE = {"x": np.float32([1, 2, 3])}
TOLD = ["queued behind 1 job", "loading 40 % (loading and warming up), about 3.2 s", "running, about 0.1 s"]


@pytest.fixture(params=CONNECTORS)
def connector(request: pytest.FixtureRequest, amqp_url: str) -> Connector:
    return CONNECTORS[request.param](amqp_url)


# --- while it waits --------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
async def test_a_caller_that_asks_is_told(connector: Connector, responder: Responder, content_type: str) -> None:
    """In order, before the answer; what is told after it is dropped, and is no stray reply."""
    told: list[Progress] = []
    async with Client(connector=connector) as client:
        for number in range(2):
            inputs, parameters = {"x": [number]}, {"tell": "well"}
            result = await client.call(
                MODEL, inputs, parameters=parameters, progress=told.append, content_type=content_type
            )
            assert result.arrays()["x"].tolist() == [number]
        assert client.dropped_replies == 0
    assert [str(each) for each in told] == TOLD * 2
    assert responder.seen.get(timeout=5).properties.headers[PROGRESS_HEADER] is True


async def test_a_caller_that_does_not_ask_is_told_nothing_and_gets_its_answer(
    connector: Connector, responder: Responder
) -> None:
    """The header is not on its job. A worker that tells it all the same does not take the answer's place."""
    async with Client(connector=connector) as client:
        result = await client.call(MODEL, ONE, parameters={"tell": "well"})
        assert result.arrays().keys() == {"x"}
        assert client.dropped_replies == 0
    assert PROGRESS_HEADER not in responder.seen.get(timeout=5).properties.headers


async def test_progress_that_cannot_be_read_is_dropped(amqp_url: str, responder: Responder) -> None:
    """It is counted, and harms neither the rest nor the answer."""
    told: list[Progress] = []
    async with Client(amqp_url) as client:
        await client.call(MODEL, ONE, parameters={"tell": "badly"}, progress=told.append)
        assert client.dropped_replies == 1
    assert [str(each) for each in told] == TOLD


async def test_what_the_callers_function_raises_ends_its_call(connector: Connector, responder: Responder) -> None:
    """And no other: the connection, and whoever else waits on it, feel nothing."""

    def stumble(progress: Progress) -> None:
        raise LookupError(progress.state)

    async with Client(connector=connector) as client:
        other = asyncio.get_running_loop().create_task(client.call(MODEL, ONE, parameters={"act": "hold"}))
        with pytest.raises(LookupError, match="queued"):
            await client.call(MODEL, ONE, parameters={"tell": "well"}, progress=stumble)
        await wait_until(lambda: responder.seen.qsize() == 2)
        responder.release()
        await other
        assert client.calls_in_flight == 0


def test_without_asyncio(amqp_url: str, responder: Responder) -> None:
    """The blocking client hands the function on."""
    told: list[Progress] = []
    with SyncClient(amqp_url) as client:
        client.call(MODEL, ONE, parameters={"tell": "well"}, progress=told.append)
    assert [str(each) for each in told] == TOLD


async def test_a_reply_queue_never_hands_it_out_as_an_answer(connector: Connector, responder: Responder) -> None:
    """Told by the correlation id to who wants it; acked and left out for who does not."""
    told: list[tuple[str, str]] = []
    async with Client(connector=connector) as client:
        async with client.reply_queue(on_progress=lambda job, progress: told.append((job, progress.state))) as replies:
            for name in ("one", "two"):
                await client.publish(
                    MODEL, ONE, reply_to=replies.name, correlation_id=name, parameters={"tell": "well"}, progress=True
                )
                assert (await replies.receive()).correlation_id == name
        async with client.reply_queue() as replies:
            for name in ("three", "four"):
                await client.publish(
                    MODEL, ONE, reply_to=replies.name, correlation_id=name, parameters={"tell": "well"}, progress=True
                )
                assert (await replies.receive()).correlation_id == name
    told_of_one = [state for job, state in told if job == "one"]
    assert told_of_one[:3] == ["queued", "loading", "running"]
    assert {job for job, _ in told} == {"one", "two"}


def test_on_a_shell(amqp_url: str, responder: Responder) -> None:
    """Lines on standard error, where it is no terminal; standard output is the answer's alone."""
    asked = ("call", MODEL, "-i", "x=1", "-p", 'tell="well"', "--broker", amqp_url, "--json")
    ran = qworker(*asked, "--progress")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines() == [f"{MODEL}: {line}" for line in TOLD]
    assert ran.stdout.startswith("{")
    assert qworker(*asked).stderr == ""


# --- when its time is over -------------------------------------------------------------------------


async def test_a_time_out_says_what_was_heard_last(amqp_url: str, responder: Responder) -> None:
    """Also of a caller that only asked, and has no function to be told by."""
    async with Client(amqp_url) as client:
        with pytest.raises(CallTimeout, match=r"loading 60 % .*on w, as of \d+\.\d s ago.*doctor"):
            await client.call(MODEL, ONE, timeout=1, parameters={"act": "hold", "tell": "well"}, progress=True)
        responder.release()


async def test_a_time_out_looks_at_the_broker(connector: Connector) -> None:
    """Of a caller that did not ask: no queue, no worker, nobody who takes the model up, loading, overrun, in hand."""
    async with (
        Client(connector=connector) as client,
        await connector.connect() as worker,
    ):

        async def said() -> str:
            with pytest.raises(CallTimeout) as caught:
                await client.call("slow", ONE, timeout=0.05)
            return str(caught.value)

        await worker.declare(*static_topology("classic"))
        assert "no worker takes up cold models" in await said()
        hints = await worker.consume(ACTIVATION, lambda _: None, prefetch=1)
        assert "its model has no queue" in await said()
        await worker.declare(*lane_topology("jobs", "slow", "classic"))
        body = encode_job(Job("1", "slow", (tensor("x", ONE["x"]),)), MSGPACK)
        for _ in range(3):
            await worker.publish(JOBS, "slow", body, Properties(persistent=True))
        assert "no worker has taken up its model yet, and " in await said()
        assert await worker.lease(lease_queue("slow", 0))
        assert "it is loading, and " in await said()
        taken = await worker.consume(lane_queue("jobs", "slow"), lambda _: None, prefetch=1)
        assert "its model is hot, and " in await said()
        await taken.close()
        taken = await worker.consume(lane_queue("jobs", "slow"), lambda _: None, prefetch=100)

        async def all_taken() -> bool:
            depth = await worker.depth(lane_queue("jobs", "slow"))
            return depth is not None and depth.ready == 0

        await wait_until(all_taken)
        assert "in a worker's hands" in await said()
        await hints.cancel()


async def test_a_time_out_without_a_platform(connector: Connector) -> None:
    """No queue of ours is there at all: nobody is there, and the connection outlives the question."""
    async with Client(connector=connector) as client, await connector.connect() as session:
        await session.declare(Queue("other"))
        await session.declare(*[each for each in static_topology("classic") if getattr(each, "name", "") == JOBS])
        with pytest.raises(CallTimeout, match="no worker takes up cold models"):
            await client.call("slow", ONE, timeout=0.05)
        with pytest.raises(CallTimeout, match="no worker takes up cold models"):
            await client.call("slow", ONE, timeout=0.05)


@pytest.mark.parametrize(
    ("jobs", "leased", "takers", "words"),
    [
        (None, False, 0, "no worker takes up cold models"),
        (None, True, 2, "no queue"),
        (Depth(1, 0), False, 0, "no worker takes up cold models"),
        (Depth(1, 0), False, 2, "no worker has taken up its model yet, and 1 job waits"),
        (Depth(5, 0), True, 0, "it is loading, and 5 jobs wait"),
        (Depth(5, 1), True, 2, "is hot, and 5 jobs wait"),
        (Depth(0, 3), True, 2, "in a worker's hands"),
    ],
)
def test_words(jobs: Depth | None, leased: bool, takers: int, words: str) -> None:
    """Each sentence by the counts that it is told by."""
    assert words in waits_for(jobs, leased=leased, takers=takers)
