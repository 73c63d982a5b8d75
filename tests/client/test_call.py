"""Calls: what is sent, what comes back, and what a caller is told when nothing does."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from qworker import Client, Tensor
from qworker.broker.base import MessageTooLarge
from qworker.errors import (
    BrokerRefused,
    BrokerUnavailable,
    CallTimeout,
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    JobFailed,
    ModelTooLarge,
    ModelUnavailable,
    PoisonJob,
    QworkerError,
    ResultTooLarge,
    UnknownModel,
)
from qworker.wire.messages import JSON, MSGPACK
from tests.client.responder import MODEL, Responder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.broker

ONE = {"x": np.float32([1, 2, 3])}


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
async def test_a_call_returns_what_the_worker_answers(amqp_url: str, responder: Responder, content_type: str) -> None:
    """Arrays, text and lists come back by name, in either form of body."""
    inputs = {"x": np.arange(6, dtype=np.int64).reshape(2, 3), "s": ["a", "b"], "f": [[0.5]], "n": 3}
    async with Client(amqp_url) as client:
        result = await client.call(MODEL, inputs, content_type=content_type)
    arrays = result.arrays()
    assert np.array_equal(arrays["x"], inputs["x"])
    assert arrays["s"].tolist() == [b"a", b"b"]
    assert arrays["f"].tolist() == [[0.5]]
    assert arrays["n"].shape == ()
    assert (result.model, result.version) == (MODEL, "1")


async def test_what_a_call_sends(amqp_url: str, responder: Responder) -> None:
    """The envelope that workers rely on: ids, reply address, deadline, persistence."""
    before = time.time()
    async with Client(amqp_url) as client:
        result = await client.call(MODEL, ONE, timeout=7, version="1", outputs=["x"], parameters={"top": 3}, priority=4)
    seen = responder.seen.get(timeout=5)
    properties = seen.properties
    assert properties.message_id == properties.correlation_id == result.id
    assert properties.delivery_mode == 2
    assert properties.priority == 4
    assert properties.reply_to.startswith("amq.rabbitmq.reply-to")
    assert 6000 < int(properties.expiration) <= 7000, "the broker watches the time while the job waits"
    published = properties.headers["x-published"] / 1000
    assert before - 0.01 <= published <= time.time()
    assert properties.headers["x-deadline"] / 1000 == pytest.approx(published + 7, abs=0.002)
    assert (seen.job.version, seen.job.outputs, dict(seen.job.parameters)) == ("1", ("x",), {"top": 3})


async def test_a_deadline_replaces_the_timeouts(amqp_url: str, responder: Responder) -> None:
    """A caller may wait shorter than the job may take."""
    deadline = time.time() + 90
    async with Client(amqp_url) as client:
        await client.call(MODEL, ONE, timeout=7, deadline=deadline)
        properties = responder.seen.get(timeout=5).properties
        assert properties.headers["x-deadline"] == int(deadline * 1000)
        assert 80_000 < int(properties.expiration) <= 90_000


async def test_a_deadline_that_no_expiration_can_say(amqp_url: str, responder: Responder) -> None:
    """The broker takes 32 bits of milliseconds: a later deadline goes without, and the job is taken all the same."""
    deadline = time.time() + 90 * 86_400
    async with Client(amqp_url) as client:
        await client.call(MODEL, ONE, timeout=7, deadline=deadline)
    properties = responder.seen.get(timeout=5).properties
    assert properties.headers["x-deadline"] == int(deadline * 1000)
    assert properties.expiration is None


async def test_a_tensor_keeps_its_datatype(amqp_url: str, responder: Responder) -> None:
    """BF16 has no numpy dtype, so a Tensor says it."""
    raw = np.array([0x3F80, 0x4000], dtype=np.uint16)
    async with Client(amqp_url) as client:
        result = await client.call(MODEL, {"x": Tensor("x", "BF16", raw)})
    assert result.outputs[0].datatype == "BF16"
    assert np.array_equal(result.outputs[0].array, raw)


@pytest.mark.parametrize(
    "expected",
    [
        InvalidInput,
        UnknownModel,
        ModelUnavailable,
        ModelTooLarge,
        InferenceFailed,
        DeadlineExceeded,
        ResultTooLarge,
        PoisonJob,
    ],
)
async def test_a_failure_comes_as_its_class(amqp_url: str, responder: Responder, expected: type[QworkerError]) -> None:
    """Each wire code has an exception that a caller can catch."""
    async with Client(amqp_url) as client:
        with pytest.raises(expected, match=f"no luck: {expected.code}"):
            await client.call(MODEL, ONE, parameters={"act": "fail", "code": expected.code})


async def test_a_code_of_the_future_is_a_job_failure(amqp_url: str, responder: Responder) -> None:
    """A newer worker may know codes that this client does not."""
    async with Client(amqp_url) as client:
        with pytest.raises(JobFailed, match="no luck") as caught:
            await client.call(MODEL, ONE, parameters={"act": "fail", "code": "later"})
    assert caught.value.code == "later"
    assert caught.value.retryable


async def test_a_reply_that_is_none_is_told_apart(amqp_url: str, responder: Responder) -> None:
    """Something else may be answering: that is neither a timeout nor a crash."""
    async with Client(amqp_url) as client:
        with pytest.raises(JobFailed, match="not a result or a failure") as caught:
            await client.call(MODEL, ONE, parameters={"act": "garbage"})
    assert caught.value.code == "bad_reply"


async def test_no_reply_in_time(amqp_url: str, responder: Responder) -> None:
    """The error says the model, how long, and what to look at; the late reply is dropped and counted."""
    async with Client(amqp_url) as client:
        with pytest.raises(CallTimeout, match=r"no reply from echo within 0\.2 s.*doctor"):
            await client.call(MODEL, ONE, timeout=0.2, parameters={"act": "hold"})
        assert client.calls_in_flight == 0
        assert client.dropped_replies == 0
        responder.release()
        await wait_until(lambda: client.dropped_replies == 1)
        assert (await client.call(MODEL, ONE)).arrays().keys() == {"x"}


async def test_a_callers_own_timeout_is_not_ours(amqp_url: str, responder: Responder) -> None:
    """A TimeoutError of an outer scope passes through as it is."""
    async with Client(amqp_url) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.call(MODEL, ONE, parameters={"act": "hold"})
        assert client.calls_in_flight == 0


@pytest.mark.parametrize("act", ["twice", "stray"])
async def test_duplicates_and_strays_are_dropped(amqp_url: str, responder: Responder, act: str) -> None:
    """A redelivered job is answered twice; only the first answer is the caller's."""
    async with Client(amqp_url) as client:
        for number in range(3):
            result = await client.call(MODEL, {"x": number}, parameters={"act": act})
            assert result.arrays()["x"] == number
        await wait_until(lambda: client.dropped_replies == 3)


async def test_many_calls_at_once_each_get_their_own_answer(amqp_url: str, responder: Responder) -> None:
    """Replies are matched by id, whatever their order."""
    async with Client(amqp_url) as client:
        results = await asyncio.gather(*(client.call(MODEL, {"x": number}) for number in range(200)))
        assert [int(result.arrays()["x"]) for result in results] == list(range(200))
        assert client.calls_in_flight == client.dropped_replies == 0


async def test_a_cancelled_call_leaves_nothing(amqp_url: str, responder: Responder) -> None:
    """Cancelled at any moment, also before it was sent; the next call works."""
    async with Client(amqp_url) as client:
        for turns in range(12):
            task = asyncio.get_running_loop().create_task(client.call(MODEL, ONE, parameters={"act": "hold"}))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert client.calls_in_flight == 0
        assert (await client.call(MODEL, {"x": 5})).arrays()["x"] == 5


@pytest.mark.parametrize(
    ("model", "inputs"),
    [("no spaces", ONE), ("../up", ONE), ("a.*", ONE), ("echo", {"x": [[1], [2, 3]]}), ("echo", {"x": 1j})],
)
async def test_what_cannot_be_sent_is_refused_here(
    amqp_url: str, responder: Responder, model: str, inputs: dict[str, object]
) -> None:
    """No round trip for what no worker could answer otherwise."""
    async with Client(amqp_url) as client:
        with pytest.raises(InvalidInput):
            await client.call(model, inputs)
        await client.call(MODEL, ONE)
    assert responder.seen.qsize() == 1


async def test_too_large_a_job_harms_no_other_call(amqp_url: str, responder: Responder) -> None:
    """Sent all the same, it would close the channel that other calls wait on."""
    async with Client(amqp_url, max_body=10_000) as client:
        waiting = asyncio.get_running_loop().create_task(client.call(MODEL, ONE, parameters={"act": "hold"}))
        await wait_until(lambda: client.calls_in_flight == 1)
        with pytest.raises(MessageTooLarge, match="at most 10000 bytes"):
            await client.call(MODEL, {"x": np.zeros(10_000, np.uint8)})
        await wait_until(lambda: responder.seen.qsize() == 1)
        responder.release()
        await waiting


async def test_nobody_there() -> None:
    """A closed port is told at once, when the client opens."""
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        async with Client("amqp://guest:guest@127.0.0.1:1/"):
            pass


async def test_a_wrong_password(amqp_url: str) -> None:
    """Trying again would not help, so it is another class."""
    with pytest.raises(BrokerRefused):
        async with Client(amqp_url.replace("guest:guest", "guest:wrong")):
            pass


async def test_a_closed_client_says_so(amqp_url: str) -> None:
    """Not a hang, and not an attribute error."""
    client = Client(amqp_url)
    async with client:
        pass
    with pytest.raises(BrokerUnavailable, match="closed"):
        await client.call(MODEL, ONE)


async def test_closing_ends_the_calls_in_flight(amqp_url: str, responder: Responder) -> None:
    """A task that still waits is told, and the block ends."""
    async with asyncio.timeout(20):
        async with Client(amqp_url) as client:
            waiting = asyncio.get_running_loop().create_task(client.call(MODEL, ONE, parameters={"act": "hold"}))
            await wait_until(lambda: responder.seen.qsize() == 1)
        with pytest.raises(BrokerUnavailable, match="closed while"):
            await waiting


async def test_an_error_of_the_callers_comes_out_as_it_is(amqp_url: str) -> None:
    """Not wrapped in an exception group, whatever runs inside the client."""
    with pytest.raises(KeyError, match="mine"):
        async with Client(amqp_url):
            raise KeyError("mine")


def test_a_client_needs_one_address() -> None:
    """Neither none nor two."""
    with pytest.raises(TypeError, match="one of the two"):
        Client()
