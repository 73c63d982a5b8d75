"""What the fast session does beyond the contract, on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from qworker.broker.base import Delivery, Properties, Session
from qworker.broker.fast.consumer import FastConsumer
from qworker.broker.fast.session import FastConnector
from qworker.errors import BrokerError, BrokerUnavailable, PublishFailed, TopologyMismatch
from qworker.wire.topology import Exchange, Queue, lane_topology, static_topology
from tests.broker.fake_broker import Peer, broker, forever
from tests.support import leaks
from tests.support.waiting import wait_until

PLAIN = Properties(persistent=True)


def classic(name: str) -> Queue:
    return Queue(name, arguments={"x-queue-type": "classic"})


async def opened(url: str, **settings: float) -> Session:
    return leaks.register_session(await FastConnector(url, **settings).connect())  # type: ignore[arg-type]


@pytest.fixture
async def session(amqp_url: str) -> AsyncIterator[Session]:
    async with await opened(amqp_url) as found:
        yield found


async def fill(session: Session, queue: str, count: int, body: bytes = b"x") -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(session.publish("", queue, body, PLAIN))


async def test_bad_publishes_do_not_harm_good_ones(session: Session) -> None:
    """A publish that breaks the channel fails by itself; those in flight with it all arrive."""
    await session.declare(classic("q"))
    outcomes: list[str] = []

    async def publish(exchange: str) -> None:
        try:
            await session.publish(exchange, "q", b"x", PLAIN)
            outcomes.append("good")
        except PublishFailed as exc:
            outcomes.append("bad" if "'nowhere'" in str(exc) else f"other: {exc}")

    async with asyncio.TaskGroup() as group:
        for number in range(300):
            group.create_task(publish("nowhere" if number in (100, 200) else ""))
    assert outcomes.count("bad") == 2
    assert outcomes.count("good") == 298
    depth = await session.depth("q")
    assert depth is not None
    assert depth.ready >= 298  # at least once


async def test_acks_share_frames_and_never_cover_what_runs(session: Session) -> None:
    """Of many deliveries settled out of order exactly the unsettled ones come back."""
    await session.declare(classic("q"))
    await fill(session, "q", 200)
    got: list[Delivery] = []
    consumer = await session.consume("q", got.append, prefetch=200)
    await wait_until(lambda: len(got) == 200)
    for number, delivery in enumerate(got):
        if number % 10 != 7:
            await delivery.ack()
            if number % 37 == 0:
                await asyncio.sleep(0)  # another turn of the loop: another flush
    await consumer.close()
    await wait_until(lambda: _ready(session, "q", 20))


async def _ready(session: Session, queue: str, count: int) -> bool:
    depth = await session.depth(queue)
    return depth is not None and depth.ready == count


async def test_a_thousand_acks_are_one_frame(amqp_url: str) -> None:
    """Acks of one turn of the loop that leave no gap are one frame, and all of them are taken."""
    async with await opened(amqp_url) as session:
        await session.declare(classic("q"))
        await fill(session, "q", 1000)
        got: list[Delivery] = []
        consumer = await session.consume("q", got.append, prefetch=1000)
        assert isinstance(consumer, FastConsumer)
        await wait_until(lambda: len(got) == 1000)
        written: list[int] = []
        send = consumer._channel.send
        consumer._channel.send = lambda buffers, nbytes: (written.append(nbytes), send(buffers, nbytes))[1]  # type: ignore[method-assign]
        for delivery in reversed(got):
            await delivery.ack()
        await consumer.close()
        assert written == [21]
        assert await session.depth("q") is not None
        await wait_until(lambda: _ready(session, "q", 0))


async def test_reading_pauses_while_too_much_is_in_hand(amqp_url: str) -> None:
    """Bodies beyond ``max_held_bytes`` stay in the broker until some are settled; then all arrive."""
    async with await opened(amqp_url, max_held_bytes=4 << 20) as session, await opened(amqp_url) as other:
        await other.declare(classic("q"))
        await fill(other, "q", 60, b"x" * (1 << 20))
        got: list[Delivery] = []
        await session.consume("q", got.append, prefetch=60)
        await wait_until(lambda: len(got) >= 4)
        seen = 0
        while len(got) < 60:
            held = got[seen:]
            assert sum(len(delivery.body) for delivery in held) <= 5 << 20
            seen = len(got)
            for delivery in held:
                await delivery.ack()
            await wait_until(lambda before=seen: len(got) > before)
        assert len(got) == 60


async def test_an_abandoned_consume_takes_nothing(session: Session) -> None:
    """A ``consume`` that is cancelled half way leaves no consumer, and what it was sent goes back."""
    await session.declare(classic("q"))
    await fill(session, "q", 10)
    task = asyncio.get_running_loop().create_task(session.consume("q", lambda _: None, prefetch=10))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: _ready(session, "q", 10))


async def test_many_declares_at_once(session: Session) -> None:
    """Pipelined declares keep their order, are idempotent, and stop at the first that fails."""
    entities = [entity for number in range(40) for entity in lane_topology("jobs", f"m{number}", "classic")]
    await session.declare(*static_topology("classic"), *entities)
    await session.declare(*static_topology("classic"), *entities)
    with pytest.raises(TopologyMismatch, match=r"qworker\.results"):
        await session.declare(classic("before"), Exchange("qworker.results", "fanout"), classic("behind"))
    assert await session.depth("before") is not None
    assert await session.depth("behind") is None


async def test_failing_and_good_calls_at_once(session: Session) -> None:
    """Calls that close their channel and calls that share it all get their own answers."""
    await session.declare(*(classic(f"q{number}") for number in range(10)))
    names = [f"q{number % 10}" if number % 3 else f"none{number}" for number in range(300)]
    found = await session.depths(names)
    assert [depth is not None for depth in found] == [number % 3 != 0 for number in range(300)]
    async with asyncio.TaskGroup() as group:
        each = [group.create_task(session.depth(name)) for name in names[:100]]
    assert [task.result() is not None for task in each] == [number % 3 != 0 for number in range(100)]


async def test_a_lease_that_two_callers_want_survives_the_one_that_gives_up(session: Session, amqp_url: str) -> None:
    """When one of two concurrent callers for a lease is cancelled, the other still gets and keeps it."""
    loop = asyncio.get_running_loop()
    first, second = loop.create_task(session.lease("l")), loop.create_task(session.lease("l"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second
    async with await opened(amqp_url) as other:
        assert not await other.lease("l")


async def test_channels_are_given_back(session: Session) -> None:
    """Consumers and request channels that come and go do not use up the connection's channels."""
    await session.declare(classic("q"))
    for _ in range(30):
        consumer = await session.consume("q", lambda _: None, prefetch=1)
        rpc = await session.open_rpc(lambda _body, _properties: None)
        await consumer.close()
        await rpc.close()
    consumer = await session.consume("q", lambda _: None, prefetch=1)
    assert isinstance(consumer, FastConsumer)
    assert consumer.number < 10


async def test_no_confirm_in_time_ends_the_session() -> None:
    """A broker that takes publishes and confirms none costs the session after ``confirm_timeout``."""

    async def script(peer: Peer) -> None:
        await peer.shake_hands()
        await forever(peer)

    async with broker(script) as port:
        session = await opened(f"amqp://127.0.0.1:{port}/", confirm_timeout=0.4)
        with pytest.raises(BrokerUnavailable, match=r"within 0\.4 s"):
            await session.publish("", "q", b"x", PLAIN)
        assert "within 0.4 s" in str(await session.wait_closed())
        with pytest.raises(BrokerError):
            await session.depth("q")
        await session.__aexit__(None, None, None)
