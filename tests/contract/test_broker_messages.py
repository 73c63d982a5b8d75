"""The broker contract, second half: consuming, settling, publishing, direct replies."""

from __future__ import annotations

import asyncio
import base64
import logging
import struct
from collections.abc import Callable

import aio_pika
import aiormq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.header import ContentHeader

from qworker.broker.base import Connector, ConsumerLost, Delivery, Depth, Properties, Session
from qworker.broker.reference.reader import decodable_header
from qworker.errors import BrokerError, BrokerUnavailable, PublishFailed, Unroutable
from qworker.wire.topology import DIRECT_REPLY_TO, Exchange, Queue
from tests.support import leaks
from tests.support.broker import PLAIN, Connect, Inbox, classic, fill, outcome, quorum, ready
from tests.support.waiting import wait_until

# --- consume ---


async def test_delivery_carries_everything(session: Session) -> None:
    """Body, envelope and origin of a message arrive as they were published."""
    await session.declare(classic("q"))
    sent = Properties(
        message_id="id",
        correlation_id="corr",
        reply_to="somewhere",
        content_type="application/msgpack",
        expiration_ms=60_000,
        timestamp_ms=1_700_000_000_000,
        priority=3,
        persistent=True,
        headers={
            "x-deadline": 1 << 40,
            "text": "ä",
            "yes": True,
            "raw": b"\x00\xff",
            "list": [1, "a"],
            "map": {"k": -1},
        },
    )
    await session.publish("", "q", b"\x00body", sent)
    inbox = Inbox()
    await session.consume("q", inbox.take, prefetch=1)
    await wait_until(lambda: len(inbox) == 1)
    (got,) = inbox.deliveries
    assert (got.body, got.exchange, got.routing_key, got.queue, got.redelivered) == (b"\x00body", "", "q", "q", False)
    assert got.properties == sent
    await got.ack()


async def test_large_and_empty_bodies(session: Session) -> None:
    """Bodies of no byte and of many frames arrive whole and in order."""
    await session.declare(classic("q"))
    bodies = [b"", b"x", bytes(range(256)) * 4096, b"\xce" * 131_064, b"last"]
    await fill(session, "q", *bodies)
    inbox = Inbox()
    await session.consume("q", inbox.take, prefetch=10)
    await wait_until(lambda: len(inbox) == len(bodies))
    assert inbox.bodies == bodies


async def test_prefetch_is_respected(session: Session) -> None:
    """No more than ``prefetch`` unsettled deliveries are in hand; each settle lets one more come."""
    await session.declare(quorum("q"))
    await fill(session, "q", *(b"%d" % number for number in range(10)))
    inbox = Inbox()
    await session.consume("q", inbox.take, prefetch=3)
    await wait_until(lambda: len(inbox) == 3)
    assert await ready(session, "q") == 7
    await inbox.deliveries[0].ack()
    await wait_until(lambda: len(inbox) == 4)
    assert await ready(session, "q") == 6


@pytest.mark.parametrize("prefetch", [0, -1, 65_536])
async def test_prefetch_out_of_range(session: Session, prefetch: int) -> None:
    """A prefetch that AMQP cannot say, or that means "no limit", is refused before anything is sent."""
    with pytest.raises(ValueError, match="prefetch"):
        await session.consume("q", Inbox().take, prefetch=prefetch)


async def test_a_stream_is_read_from_its_first_message_by_each_reader(session: Session) -> None:
    """What one has acked is there for the next one; without a place to begin, a reader gets what comes from now on."""
    await session.declare(Queue("s", arguments={"x-queue-type": "stream", "x-max-age": "1D"}))
    bodies = [b"%d" % number for number in range(50)]
    await fill(session, "s", *bodies)
    for _ in range(2):
        inbox = Inbox()
        consumer = await session.consume("s", inbox.take, prefetch=10, stream_from="first")
        acked = 0
        while acked < 50:
            await wait_until(lambda: len(inbox) > acked)  # noqa: B023  # it is awaited within the round
            await inbox.deliveries[acked].ack()
            acked += 1
        assert inbox.bodies == bodies
        await consumer.close()
    late = Inbox()
    await session.consume("s", late.take, prefetch=10, stream_from="next")
    await fill(session, "s", b"new")
    await wait_until(lambda: late.bodies == [b"new"])


async def test_consumer_priority(session: Session) -> None:
    """While the consumer of higher priority has room, it gets everything."""
    await session.declare(quorum("q"))
    low, high = Inbox(), Inbox()
    await session.consume("q", low.take, prefetch=100)
    await session.consume("q", high.take, prefetch=100, priority=5)
    await fill(session, "q", *[b"x"] * 20)
    await wait_until(lambda: len(high) == 20)
    assert not low.deliveries


async def test_consume_from_nothing(session: Session) -> None:
    """A queue that does not exist is named, and the session goes on."""
    with pytest.raises(BrokerError, match="'gone'"):
        await session.consume("gone", Inbox().take, prefetch=1)
    assert session.is_open


async def test_cancel_is_exact(session: Session) -> None:
    """After ``cancel`` nothing is delivered; what was can be settled; the rest stays in the queue."""
    await session.declare(quorum("q"))
    await fill(session, "q", *[b"x"] * 50)
    inbox = Inbox()
    consumer = await session.consume("q", inbox.take, prefetch=20)
    await wait_until(lambda: inbox.deliveries)
    await consumer.cancel()
    got = len(inbox)
    await consumer.cancel()
    await fill(session, "q", b"later")
    for delivery in inbox.deliveries:
        await delivery.ack()
    await wait_until(lambda: _ready_is(session, "q", 51 - got))
    assert len(inbox) == got
    await consumer.close()

    async def nobody_consumes() -> bool:  # a quorum queue counts a closed consumer for a moment
        return await session.depth("q") == Depth(51 - got, 0)

    await wait_until(nobody_consumes)


async def test_close_gives_back(session: Session) -> None:
    """Closing a consumer puts back what is unsettled, marked as redelivered; settling it later does nothing."""
    await session.declare(quorum("q"))
    await fill(session, "q", b"1", b"2", b"3")
    first, second = Inbox(), Inbox()
    consumer = await session.consume("q", first.take, prefetch=3)
    await wait_until(lambda: len(first) == 3)
    await first.deliveries[0].ack()
    await consumer.close()
    await consumer.close()
    await consumer.cancel()
    await first.deliveries[1].ack()
    await wait_until(lambda: _ready_is(session, "q", 2))
    await session.consume("q", second.take, prefetch=3)
    await wait_until(lambda: len(second) == 2)
    assert sorted(second.bodies) == [b"2", b"3"]
    assert all(delivery.redelivered for delivery in second.deliveries)


async def test_settling(session: Session) -> None:
    """ack removes, reject dead-letters or requeues, give_back requeues; a second settle changes nothing."""
    await session.declare(
        classic("dead"), classic("q", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    )
    await fill(session, "q", b"ack", b"dead", b"again", b"back")
    inbox = Inbox()
    consumer = await session.consume("q", inbox.take, prefetch=4)
    await wait_until(lambda: len(inbox) == 4)
    await consumer.cancel()
    ack, dead, again, back = inbox.deliveries
    await ack.ack()
    await ack.ack()
    await dead.reject(requeue=False)
    await dead.give_back()
    await again.reject(requeue=True)
    await back.give_back()
    await back.reject(requeue=False)
    await wait_until(lambda: _ready_is(session, "q", 2))
    await wait_until(lambda: _ready_is(session, "dead", 1))
    assert session.is_open


async def test_session_end_gives_everything_back(connect: Connect, amqp_url: str) -> None:
    """What a closed session had in hand comes back; its late settles are harmless, and hit nobody else's."""
    first, second = await connect(amqp_url), await connect(amqp_url)
    await first.declare(quorum("q"))
    await fill(first, "q", b"1", b"2")
    old, new = Inbox(), Inbox()
    await first.consume("q", old.take, prefetch=2)
    await wait_until(lambda: len(old) == 2)
    await first.__aexit__(None, None, None)
    await second.consume("q", new.take, prefetch=2)
    await wait_until(lambda: len(new) == 2)
    assert all(delivery.redelivered for delivery in new.deliveries)
    await old.deliveries[0].ack()
    await old.deliveries[1].reject(requeue=False)
    for delivery in new.deliveries:
        await delivery.give_back()
    await wait_until(lambda: len(new) == 4)
    assert second.is_open


async def test_broker_cancel_ends_the_session(connect: Connect, amqp_url: str) -> None:
    """When the broker cancels a consumer (here: its queue is deleted), the owner is told by the session's end."""
    watched, other = await connect(amqp_url), await connect(amqp_url)
    await other.declare(classic("q"))
    await watched.consume("q", Inbox().take, prefetch=1)
    await other.delete_queue("q")
    async with asyncio.timeout(5):
        reason = await watched.wait_closed()
    assert reason is not None
    assert "'q'" in str(reason)
    assert other.is_open


async def test_broker_cancel_is_told(connect: Connect, amqp_url: str) -> None:
    """With ``on_lost`` only that consumer ends: its owner is told once, the others go on, and it can be made anew."""
    session, other = await connect(amqp_url), await connect(amqp_url)
    await other.declare(classic("q"), classic("beside"))
    lost: list[ConsumerLost] = []
    inbox, beside = Inbox(), Inbox()
    consumer = await session.consume("q", inbox.take, prefetch=1, on_lost=lost.append)
    await session.consume("beside", beside.take, prefetch=2, on_lost=lost.append)
    await fill(other, "q", b"1")
    await wait_until(lambda: len(inbox) == 1)
    await other.delete_queue("q")
    await wait_until(lambda: lost)
    assert "'q'" in str(lost[0])
    assert lost[0].ack_timeout is None
    await inbox.deliveries[0].ack()
    await consumer.cancel()
    await consumer.close()
    await other.declare(classic("q"))
    await session.consume("q", inbox.take, prefetch=1, on_lost=lost.append)
    await fill(other, "q", b"2")
    await fill(other, "beside", b"3")
    await wait_until(lambda: inbox.bodies == [b"1", b"2"] and beside.bodies == [b"3"])
    assert len(lost) == 1
    assert session.is_open


async def test_a_callback_that_raises_is_not_swallowed(connect: Connect, amqp_url: str) -> None:
    """A bug in ``on_delivery`` ends the session, and comes out where the session is closed."""
    session, other = await connect(amqp_url), await connect(amqp_url)
    await session.declare(classic("q"))

    def broken(delivery: Delivery) -> None:
        raise KeyError("bug")

    await session.consume("q", broken, prefetch=1)
    await fill(other, "q", b"x")
    async with asyncio.timeout(5):
        assert "bug" in str(await session.wait_closed())
    with pytest.raises(KeyError, match="bug"):
        await session.__aexit__(None, None, None)


async def test_hostile_properties_are_delivered(session: Session, amqp_url: str) -> None:
    """Properties that cannot be decoded are left out; the rest of the envelope and the next message arrive."""
    await session.declare(classic("q"))
    good = b"\x04good" + b"\x05reply"  # correlation id, reply to
    nanoseconds = struct.pack(">Q", 1_700_000_000 * 10**9)
    deep = b"\x01a" + _nested(3000)
    table = struct.pack(">I", len(deep)) + deep
    strangers = [
        (0x0400 | 0x0200 | 0x0040, good + nanoseconds),
        (0x2000 | 0x0400 | 0x0200, table + good),
        (0x0400 | 0x0200 | 0x0080, good + b"\x02\xff\xfe"),  # a message id that is no UTF-8
    ]
    await _publish_raw(amqp_url, "q", strangers)
    await fill(session, "q", b"after")
    inbox = Inbox()
    await session.consume("q", inbox.take, prefetch=10)
    await wait_until(lambda: len(inbox) == 4)
    assert session.is_open
    assert [delivery.body for delivery in inbox.deliveries] == [b"raw"] * 3 + [b"after"]
    for delivery in inbox.deliveries[:3]:
        assert delivery.properties.correlation_id == "good"
        assert delivery.properties.reply_to == "reply"
        assert delivery.properties.headers == {}
        await delivery.ack()


def _nested(depth: int) -> bytes:
    value = b"V"
    for _ in range(depth):
        value = b"A" + struct.pack(">I", len(value)) + value
    return value


async def _publish_raw(url: str, queue: str, messages: list[tuple[int, bytes]]) -> None:
    """Publish with property bytes that no client library would write."""
    connection = await aiormq.connect(url)
    channel = await connection.channel(publisher_confirms=True)
    for flags, properties in messages:
        encoded = struct.pack(">H", flags) + properties

        class Raw(aiormq.spec.Basic.Properties):
            def marshal(self, encoded: bytes = encoded) -> bytes:
                return encoded

        await channel.basic_publish(b"raw", routing_key=queue, properties=Raw())
    await connection.close()


@given(st.binary(max_size=400), st.integers(0, 0xFFFF))
def test_any_content_header_becomes_decodable(noise: bytes, flags: int) -> None:
    """Whatever bytes stand in a content header: same length, same size field, and pamqp decodes it."""
    payload = struct.pack(">HHQH", 60, 0, 7, flags) + noise + b"\xce"
    cleaned = decodable_header(payload)
    assert len(cleaned) == len(payload)
    assert cleaned[-1:] == b"\xce"
    header = ContentHeader()
    header.unmarshal(cleaned[:-1])
    assert header.body_size == 7


# --- publish ---


async def test_confirmed_is_in_the_queue(session: Session) -> None:
    """When ``publish`` returns, the message is counted by the next depth: 50 of 50 times."""
    await session.declare(quorum("q"))
    for count in range(1, 51):
        await session.publish("", "q", b"x", PLAIN)
        assert await ready(session, "q") == count


async def test_many_publishes_at_once(session: Session) -> None:
    """Concurrent publishes are all confirmed and all there."""
    await session.declare(quorum("q"))
    async with asyncio.TaskGroup() as group:
        for number in range(500):
            group.create_task(session.publish("", "q", b"%d" % number, PLAIN))
    assert await ready(session, "q") == 500


async def test_mandatory_to_nowhere(session: Session) -> None:
    """A mandatory message that no queue takes raises; the same without mandatory vanishes, as AMQP has it."""
    await session.declare(Exchange("e", "topic"))
    with pytest.raises(Unroutable, match=r"'e'.*'nobody'"):
        await session.publish("e", "nobody", b"x", PLAIN, mandatory=True)
    await session.publish("e", "nobody", b"x", PLAIN)


async def test_returns_hit_the_right_publish(session: Session) -> None:
    """Publishes with one message id in flight together: only the unroutable ones raise."""
    await session.declare(classic("q"))
    same = Properties(message_id="same")
    works = [
        session.publish("", "q" if number % 3 else "nobody", b"x", same, mandatory=number % 2 == 0)
        for number in range(30)
    ]
    results = await asyncio.gather(*works, return_exceptions=True)
    for number, result in enumerate(results):
        assert isinstance(result, Unroutable) == (number % 3 == 0 and number % 2 == 0), number
    assert await ready(session, "q") == 20


async def test_full_queue_nacks(session: Session) -> None:
    """A queue that rejects what is over its length makes the publish fail, and the session goes on."""
    await session.declare(classic("q", **{"x-max-length": 1, "x-overflow": "reject-publish"}))
    await session.publish("", "q", b"1", PLAIN)
    with pytest.raises(PublishFailed, match="nacked"):
        await session.publish("", "q", b"2", PLAIN)
    await session.delete_queue("q")
    await session.declare(classic("q"))
    await session.publish("", "q", b"3", PLAIN, mandatory=True)


async def test_missing_exchange(session: Session) -> None:
    """A publish to no exchange fails by name; those in flight beside it arrive all the same."""
    await session.declare(quorum("q"))
    works = [session.publish("gone" if number == 25 else "", "q", b"x", PLAIN) for number in range(50)]
    results = await asyncio.gather(*works, return_exceptions=True)
    assert [number for number, result in enumerate(results) if result is not None] == [25]
    assert isinstance(results[25], PublishFailed)
    assert "'gone'" in str(results[25])
    assert await ready(session, "q") >= 49  # at least once


async def test_unencodable_properties(session: Session) -> None:
    """A name that AMQP cannot carry fails that publish alone, before anything is sent."""
    await session.declare(classic("q"))
    for properties in (Properties(correlation_id="x" * 256), Properties(headers={"object": object()})):
        with pytest.raises(PublishFailed):
            await session.publish("", "q", b"x", properties)
    with pytest.raises(PublishFailed):
        await session.publish("", "k" * 256, b"x", PLAIN)
    await session.publish("", "q", b"x", PLAIN)
    assert await ready(session, "q") == 1


async def test_our_own_limit(connect: Connect, amqp_url: str) -> None:
    """A body over the session's limit is refused without being sent."""
    session = await connect(amqp_url, max_message_bytes=1000)
    await session.declare(classic("q"))
    with pytest.raises(PublishFailed, match=r"at most 1000 bytes, found 1001") as refused:
        await session.publish("", "q", b"x" * 1001, PLAIN)
    assert not refused.value.retryable
    await session.publish("", "q", b"x" * 1000, PLAIN)


async def test_no_payload_in_logs(
    session: Session, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Returned and refused messages leave no body and no password in any log."""
    with caplog.at_level(logging.DEBUG):
        for work in (
            session.publish("", "nobody", b"payl0ad", Properties(message_id="a"), mandatory=True),
            session.publish("gone", "nobody", b"payl0ad", PLAIN, mandatory=True),
        ):
            assert isinstance(await outcome(work), PublishFailed)
    text = caplog.text + "".join(capsys.readouterr())
    assert "payl0ad" not in text
    assert "guest:guest" not in text


# --- direct replies ---


async def test_direct_replies(connect: Connect, amqp_url: str) -> None:
    """Requests of many go out and each reply finds its requester, through the plain publish of another session."""
    server, client = await connect(amqp_url), await connect(amqp_url)
    await server.declare(classic("requests"))
    requests = Inbox()
    await server.consume("requests", requests.take, prefetch=100)
    replies: dict[str | None, bytes] = {}
    rpc = await client.open_rpc(lambda body, properties: replies.update({properties.correlation_id: body}))
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(rpc.publish("", "requests", b"%d" % number, Properties(correlation_id=str(number))))
    await wait_until(lambda: len(requests) == 20)
    # RabbitMQ 4.0.5 loses the first direct reply after it boots.
    await _answer(server, requests.deliveries[0])
    for request in requests.deliveries:
        await _answer(server, request)
        await request.ack()
    await wait_until(lambda: len(replies) == 20)
    assert replies == {str(number): b"re:%d" % number for number in range(20)}
    await rpc.close()
    await rpc.close()
    assert isinstance(await outcome(rpc.publish("", "requests", b"x", PLAIN)), BrokerUnavailable)
    assert client.is_open


async def _answer(server: Session, request: Delivery) -> None:
    properties = request.properties
    assert properties.reply_to is not None
    assert properties.reply_to.startswith(DIRECT_REPLY_TO)
    envelope = Properties(correlation_id=properties.correlation_id)
    await server.publish("", properties.reply_to, b"re:" + request.body, envelope, mandatory=True)


@pytest.mark.parametrize(
    "name", ["", "gone", "a.b.c", "g1h2AA5yZXBseUA.cut", "AAAA.noterm", "g2EB.nopid", "not base64!.k", "\u00e4.k"]
)
async def test_reply_to_nobody_is_no_error(session: Session, name: str) -> None:
    """A direct reply to a made-up or broken name is dropped: RabbitMQ itself ends the connection over some."""
    await session.publish("", f"{DIRECT_REPLY_TO}.{name}", b"x", Properties(), mandatory=True)
    await session.declare(classic("q"))
    await session.publish("", "q", b"x", PLAIN, mandatory=True)


async def test_a_foreign_reply_name_is_survived(make_connector: Callable[..., Connector], amqp_url: str) -> None:
    """A well-formed direct reply name of another broker ends at most two connections of a connector."""
    node = b"reply@1"
    pid = base64.b64encode(b"\x83Xw" + bytes([len(node)]) + node + bytes(12)).decode()
    connector = make_connector(amqp_url)
    for attempt in range(3):
        session = leaks.register_session(await connector.connect())
        raised = await outcome(session.publish("", f"{DIRECT_REPLY_TO}.{pid}.a2V5", b"x", Properties()))
        assert raised is None or (isinstance(raised, BrokerUnavailable) and attempt < 2)
        assert session.is_open == (raised is None)
        await session.__aexit__(None, None, None)


async def test_another_client_understands_us(session: Session, amqp_url: str) -> None:
    """aio-pika reads what we publish, and we read what it publishes with nothing but a body."""
    await session.declare(classic("ours"), classic("theirs"))
    connection = await aio_pika.connect(amqp_url)
    async with connection:
        channel = await connection.channel()
        await session.publish("", "ours", b"hello", Properties(correlation_id="c", headers={"n": 1}, persistent=True))
        queue = await channel.get_queue("ours")
        message = await queue.get(no_ack=True)
        assert message is not None
        assert (message.body, message.correlation_id, message.headers) == (b"hello", "c", {"n": 1})
        await channel.default_exchange.publish(aio_pika.Message(b"bare"), "theirs")
    inbox = Inbox()
    await session.consume("theirs", inbox.take, prefetch=1)
    await wait_until(lambda: len(inbox) == 1)
    assert inbox.bodies == [b"bare"]
    assert inbox.deliveries[0].properties.reply_to is None


async def _ready_is(session: Session, queue: str, count: int) -> bool:
    return await ready(session, queue) == count
