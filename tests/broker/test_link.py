"""The link against a scripted server on real sockets."""

from __future__ import annotations

import asyncio
import struct

import pytest
from pamqp.commands import Basic, Channel, Connection, Queue

from qworker.broker.fast.channel import ChannelClosed
from qworker.broker.fast.fields import FrameError
from qworker.broker.fast.frames import HEARTBEAT, Delivered
from qworker.broker.fast.url import parse_address
from qworker.errors import BrokerRefused, BrokerUnavailable, ConfigError
from tests.broker.fake_broker import Peer, broker, connect, forever, linked
from tests.broker.wire_samples import delivery
from tests.support.waiting import wait_until

PASSIVE = Queue.Declare(queue="q", passive=True)


async def reason(coroutine: object) -> str:
    async with asyncio.timeout(10):
        return str(await coroutine)  # type: ignore[misc]


# --- handshake ---


@pytest.mark.parametrize(
    ("options", "mechanism", "response"),
    [
        ("", "PLAIN", "\0us/er\0p@ss"),
        ("?auth=external", "EXTERNAL", ""),
        ("?auth=amqplain", "AMQPLAIN", "\x05LOGINS\0\0\0\x05us/er\x08PASSWORDS\0\0\0\x04p@ss"),
    ],
)
async def test_credentials(options: str, mechanism: str, response: str) -> None:
    """Each mechanism sends user and password as its RFC or RabbitMQ has it; limits and vhost are agreed on."""
    peers: list[Peer] = []

    async def script(peer: Peer) -> None:
        await peer.shake_hands(heartbeat=60, frame_max=0, channel_max=0)
        peers.append(peer)
        await forever(peer)

    async with linked(script, options=f"%2Fjobs{options}", user="us%2Fer:p%40ss@", heartbeat=7) as link:
        [peer] = peers
        assert peer.start_ok.mechanism == mechanism
        assert peer.start_ok.response == response
        assert peer.start_ok.client_properties["capabilities"]["consumer_cancel_notify"] is True  # type: ignore[index]
        assert (peer.tune_ok.heartbeat, peer.tune_ok.frame_max, peer.tune_ok.channel_max) == (7, 131_072, 2047)
        assert peer.open.virtual_host == "/jobs"
        assert link.limits.heartbeat == 7
        await link.close()


@pytest.mark.parametrize(
    ("code", "text", "error"),
    [
        (403, "ACCESS_REFUSED - Login was refused", BrokerRefused),
        (530, "NOT_ALLOWED - vhost x not found", BrokerRefused),
        (530, "NOT_ALLOWED - connection limit (1) is reached", BrokerUnavailable),
        (320, "CONNECTION_FORCED - shutting down", BrokerUnavailable),
    ],
)
async def test_refusals(code: int, text: str, error: type[Exception]) -> None:
    """A broker that closes during the handshake: refused when a retry cannot help, else unavailable."""

    async def script(peer: Peer) -> None:
        await peer.reader.readexactly(8)
        peer.send(0, Connection.Start())
        await peer.expect(Connection.StartOk)
        peer.send(0, Connection.Close(code, text, 0, 0))
        await peer.expect(Connection.CloseOk)

    async with broker(script) as port:
        with pytest.raises(error, match=text.replace("(", r"\(").replace(")", r"\)")):
            await connect(port)


async def test_mechanism_that_is_not_offered() -> None:
    """A broker that does not take our mechanism is refused with its list."""

    async def script(peer: Peer) -> None:
        await peer.reader.readexactly(8)
        peer.send(0, Connection.Start(mechanisms="PLAIN"))
        await peer.reader.read()

    async with broker(script) as port:
        with pytest.raises(BrokerRefused, match=r"EXTERNAL.*found PLAIN"):
            await connect(port, options="?auth=external")


async def test_not_a_broker() -> None:
    """A server that speaks something else is named as such, and left."""

    async def script(peer: Peer) -> None:
        peer.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await peer.reader.read()

    async with broker(script) as port:
        with pytest.raises(BrokerUnavailable, match="RabbitMQ listener"):
            await connect(port)


async def test_silent_server() -> None:
    """A server that never answers costs the connect time-out."""

    async def script(peer: Peer) -> None:
        await peer.reader.read()

    async with broker(script) as port:
        with pytest.raises(BrokerUnavailable, match=r"within 0\.3 s"):
            await connect(port, connect_timeout=0.3)


@pytest.mark.parametrize("url", ["http://host/", "amqp://host:notaport/", "amqp://host/?auth=kerberos"])
def test_bad_urls(url: str) -> None:
    """What is no AMQP URL, or asks for an unknown mechanism, is a configuration error."""
    with pytest.raises(ConfigError, match="expected"):
        parse_address(url)


# --- heartbeats ---


async def test_silence_ends_the_link() -> None:
    """A broker that sends nothing for two heartbeats is given up; we sent heartbeats meanwhile."""
    peers: list[Peer] = []

    async def script(peer: Peer) -> None:
        peers.append(peer)
        await peer.shake_hands(heartbeat=1)
        await forever(peer)

    async with linked(script, heartbeat=1) as link:
        assert "2 s of silence" in await reason(link.wait_ended())
        assert peers[0].heartbeats >= 2


async def test_heartbeats_keep_the_link() -> None:
    """Heartbeats alone keep a connection for longer than silence would."""

    async def script(peer: Peer) -> None:
        await peer.shake_hands(heartbeat=1)
        while peer.heartbeats < 6:  # one each half second: 3 s
            task = asyncio.ensure_future(peer.reader.readexactly(8))  # noqa: TID251  # awaited here
            assert await task == HEARTBEAT
            peer.heartbeats += 1
            peer.writer.write(HEARTBEAT)
        peer.send(0, Connection.Close(320, "enough", 0, 0))
        await peer.reader.read()

    async with linked(script, heartbeat=1) as link:
        assert "enough" in await reason(link.wait_ended())


# --- ends ---


async def test_abrupt_close_fails_every_waiter() -> None:
    """A lost connection ends the link once, with a reason, and all calls in flight with it."""

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        await peer.expect(Channel.Open)
        peer.writer.transport.abort()

    async with linked(script) as link:
        channel = link.open_channel()
        replies = [channel.rpc(PASSIVE) for _ in range(3)]
        assert "was lost" in await reason(link.wait_ended())
        for reply in replies:
            with pytest.raises(BrokerUnavailable, match="was lost"):
                await reply
        with pytest.raises(BrokerUnavailable):
            await channel.rpc(PASSIVE)
        with pytest.raises(BrokerUnavailable):
            link.open_channel()


async def test_close_by_the_broker_carries_its_reason() -> None:
    """The broker's goodbye is answered, and its code and text are the reason."""
    answered: list[bool] = []

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        peer.send(0, Connection.Close(320, "CONNECTION_FORCED - node goes down", 0, 0))
        await peer.expect(Connection.CloseOk)
        answered.append(True)

    async with linked(script) as link:
        assert "320 CONNECTION_FORCED - node goes down" in await reason(link.wait_ended())
        await wait_until(lambda: answered)


async def test_our_close_is_no_failure() -> None:
    """Closing says goodbye, and gives no reason; closing twice does nothing."""

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        await forever(peer)

    async with linked(script) as link:
        await link.close()
        assert await link.wait_ended() is None
        await link.close()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (struct.pack(">BHI", 3, 1, 200_000) + b"x", "at most 131064 bytes, found one of 200000"),
        (delivery(1, 1, b"x")[:-1] + b"\x00", "end-of-frame"),
        (delivery(9, 1, b"x"), "open channel"),
        (delivery(1, 1, b"x"), "no such frame"),
    ],
)
async def test_malformed_frames_end_the_link(raw: bytes, why: str) -> None:
    """Oversized, broken and unexpected frames end the link with FrameError, and the broker is told 501."""
    told: list[Connection.Close] = []

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        await peer.open_channel()
        peer.writer.write(raw)
        told.append(await peer.expect(Connection.Close))

    async with linked(script) as link:
        await link.open_channel().opening
        async with asyncio.timeout(5):
            found = await link.wait_ended()
        assert isinstance(found, FrameError)
        assert why in str(found)
        await wait_until(lambda: told)
        assert told[0].reply_code == 501


# --- channels ---


async def test_a_failing_call_takes_those_behind_it_along() -> None:
    """A channel closed by one call: that call gets the reason, those behind it that it was not theirs."""

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        await peer.open_channel()
        for _ in range(3):
            await peer.expect(Queue.Declare)
        peer.send(1, Queue.DeclareOk("q", 5, 0), Channel.Close(404, "NOT_FOUND - no queue", 50, 10))
        await peer.expect(Channel.CloseOk)
        await peer.open_channel()  # the same number again
        await forever(peer)

    async with linked(script) as link:
        channel = link.open_channel()
        good, bad, behind = (channel.rpc(PASSIVE) for _ in range(3))
        assert (await good).message_count == 5  # type: ignore[attr-defined]
        with pytest.raises(ChannelClosed, match="404 NOT_FOUND") as failed:
            await bad
        assert not failed.value.collateral
        with pytest.raises(ChannelClosed) as failed:
            await behind
        assert failed.value.collateral
        assert link.is_open
        again = link.open_channel()
        assert again.number == channel.number
        await again.opening


async def test_a_cancelled_call_leaves_its_reply_to_nobody() -> None:
    """The reply to a cancelled call is dropped; the next caller gets its own."""
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        await peer.open_channel()
        await peer.expect(Queue.Declare)
        await peer.expect(Queue.Declare)
        await go.wait()
        peer.send(1, Queue.DeclareOk("q", 1, 0), Queue.DeclareOk("q", 2, 0))
        await forever(peer)

    async with linked(script) as link:
        channel = link.open_channel()
        first, second = channel.rpc(PASSIVE), channel.rpc(PASSIVE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first, 0.01)
        go.set()
        assert (await second).message_count == 2  # type: ignore[attr-defined]


async def test_frames_for_a_closing_channel_are_dropped() -> None:
    """Deliveries that cross our channel.close reach nobody, and the close completes."""
    got: list[Delivered] = []

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        await peer.open_channel()
        await peer.expect(Channel.Close)
        peer.writer.write(delivery(1, 1, b"late"))
        peer.send(1, Basic.Cancel("c"), Channel.CloseOk())
        await forever(peer)

    async with linked(script) as link:
        channel = link.open_channel()
        channel.on_delivered = got.append
        await channel.opening
        await channel.close()
        await channel.close()
        assert not got
        assert link.is_open


async def test_channels_run_out_with_a_reason() -> None:
    """More channels than negotiated is an error that says so."""

    async def script(peer: Peer) -> None:
        await peer.shake_hands(channel_max=2)
        await forever(peer)

    async with linked(script) as link:
        link.open_channel()
        link.open_channel()
        with pytest.raises(BrokerUnavailable, match="all 2 in use"):
            link.open_channel()


# --- back-pressure ---


async def test_blocked_and_unblocked() -> None:
    """While the broker is under an alarm writers wait; they go on when it lifts it."""
    lift = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        peer.send(0, Connection.Blocked("low on memory"))
        await lift.wait()
        peer.send(0, Connection.Unblocked())
        await forever(peer)

    async with linked(script) as link:
        await wait_until(lambda: link.blocked == "low on memory")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.wait_writable(), 0.05)
        lift.set()
        async with asyncio.timeout(5):
            await link.wait_writable()
        assert link.blocked is None


async def test_a_broker_that_does_not_read_makes_writers_wait() -> None:
    """When the socket is full ``write_paused`` says so; it clears when the broker reads again."""
    read = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await read.wait()
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        while await peer.reader.read(1 << 20):
            pass

    async with linked(script) as link:
        chunk = b"\0" * (1 << 20)
        for _ in range(64):
            link.write([chunk], len(chunk))
            if link.write_paused:
                break
        assert link.write_paused
        read.set()
        async with asyncio.timeout(10):
            await link.wait_writable()
        assert not link.write_paused


async def test_reading_can_pause() -> None:
    """While reading is paused nothing is delivered; after resuming all of it is."""
    got: list[Delivered] = []

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        await peer.open_channel()
        await peer.expect(Basic.Qos)
        for tag in range(1, 101):
            peer.writer.write(delivery(1, tag, b"x" * 1000))
        peer.send(1, Basic.QosOk())
        await forever(peer)

    async with linked(script) as link:
        channel = link.open_channel()

        def take(message: Delivered) -> None:
            got.append(message)
            if len(got) == 1:
                link.pause_reading()

        channel.on_delivered = take
        await channel.opening
        qos = channel.rpc(Basic.Qos(prefetch_count=1))
        await wait_until(lambda: got)
        before = len(got)
        await asyncio.wait([qos], timeout=0.1)
        assert len(got) == before or qos.done()  # what was read at once is delivered
        link.resume_reading()
        async with asyncio.timeout(5):
            await qos
        assert [message.tag for message in got] == list(range(1, 101))


async def test_one_turn_of_the_loop_is_one_write() -> None:
    """Calls of one turn of the loop leave together, in order."""
    together: list[bytes] = []

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        together.append(await peer.reader.read(1 << 16))
        await forever(peer)

    async with linked(script) as link:
        for number in range(50):
            link.write([b"%d;" % number], 3)
        await wait_until(lambda: together)
        assert together[0] == b"".join(b"%d;" % number for number in range(50))
