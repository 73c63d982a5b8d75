"""The broker contract, first half: life of a session, declares, depths, leases."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qworker.broker.base import Connector, Depth, Session
from qworker.broker.node import PrivateNode
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable, TopologyMismatch
from qworker.wire.topology import Binding, Exchange, Queue, announcement, hot_exchange, lease_queue
from tests.support.broker import PLAIN, Connect, Inbox, classic, fill, outcome, quorum, ready
from tests.support.rabbitmq import STRANGER
from tests.support.waiting import wait_until

# --- life ---


async def test_a_closed_session_gives_no_reason(session: Session) -> None:
    """Closing by us is no error, can be done twice, and everything after it says that the session is closed."""
    assert session.is_open
    assert not session.blocked
    await session.__aexit__(None, None, None)
    await session.__aexit__(None, None, None)
    assert await session.wait_closed() is None
    assert not session.is_open
    for work in (session.depth("q"), session.publish("", "q", b"", PLAIN), session.lease("q"), session.declare()):
        assert isinstance(await outcome(work), BrokerUnavailable)


async def test_wrong_password_is_refused(make_connector: Callable[..., Connector], amqp_url: str) -> None:
    """A wrong password says so, at once, and shows no credential."""
    with pytest.raises(BrokerRefused, match="password") as refused:
        await make_connector(amqp_url.replace("guest:guest", "guest:s3cret")).connect()
    assert "s3cret" not in str(refused.value)


async def test_missing_vhost_is_refused(make_connector: Callable[..., Connector], node: PrivateNode) -> None:
    """A virtual host that does not exist is named."""
    with pytest.raises(BrokerRefused, match="nowhere"):
        await make_connector(node.url_of("nowhere")).connect()


async def test_broker_down_is_unavailable(make_connector: Callable[..., Connector]) -> None:
    """A closed port is worth another try later; the address is shown without the password."""
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1\b") as down:
        await make_connector("amqp://me:s3cret@127.0.0.1:1/").connect()
    assert "s3cret" not in str(down.value)


async def test_unknown_host_is_unavailable(make_connector: Callable[..., Connector]) -> None:
    """A name that does not resolve may resolve later."""
    with pytest.raises(BrokerUnavailable, match="no-such-host"):
        await make_connector("amqp://no-such-host.invalid/").connect()


async def test_silent_host_is_unavailable(make_connector: Callable[..., Connector]) -> None:
    """A listener that never answers does not hold us longer than the connect time-out."""

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await say_nothing(reader, writer)

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BrokerUnavailable, match=r"within 0\.3 s"):
            await make_connector(f"amqp://127.0.0.1:{port}/", connect_timeout=0.3).connect()


async def test_credentials_from_files(make_connector: Callable[..., Connector], amqp_url: str, tmp_path: Path) -> None:
    """User and password may come from files, and are not in the connector's text."""
    (tmp_path / "user").write_text("guest\n")
    (tmp_path / "password").write_text("guest\n")
    bare = amqp_url.replace("guest:guest@", "")
    connector = make_connector(bare, username_file=tmp_path / "user", password_file=tmp_path / "password")
    session = await connector.connect()
    assert session.is_open
    await session.__aexit__(None, None, None)
    (tmp_path / "password").write_text("rotated")
    with pytest.raises(BrokerRefused):
        await connector.connect()
    assert "rotated" not in repr(connector)


# --- declare ---


async def test_declare_is_idempotent(session: Session) -> None:
    """The same entities can be declared again, by anybody."""
    entities = (
        Exchange("e", "topic", arguments={"alternate-exchange": "f"}),
        Exchange("f", "fanout", internal=True),
        quorum("q"),
        classic("c", **{"x-max-length": 5, "x-max-priority": 9}),
        Binding("e", "q", "a.b"),
        Binding("f", "q", ""),
        Binding("e", "f", "x.#", to_exchange=True),
    )
    await session.declare(*entities)
    await session.declare(*entities)
    assert await session.depth("q") == Depth(0, 0)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (classic("q", **{"x-max-length": 5}), classic("q", **{"x-max-length": 7}), ("x-max-length", "5", "7")),
        (quorum("q"), classic("q"), ("x-queue-type", "quorum", "classic")),
        (quorum("q"), quorum("q", **{"x-delivery-limit": 3}), ("x-delivery-limit", "none", "3")),
        (Exchange("q", "topic"), Exchange("q", "fanout"), ("type", "topic", "fanout")),
    ],
)
async def test_mismatch_names_both(
    session: Session, first: Exchange | Queue, second: Exchange | Queue, named: tuple[str, ...]
) -> None:
    """An entity with other arguments is told with its name, both values, and what to do; nothing breaks."""
    await session.declare(first)
    with pytest.raises(TopologyMismatch) as mismatch:
        await session.declare(second)
    for part in (*named, "'q'", "Delete it"):
        assert part in str(mismatch.value)
    await session.declare(first)
    assert session.is_open


async def test_binding_to_nothing_is_an_error(session: Session) -> None:
    """A binding whose ends are missing names them."""
    with pytest.raises(BrokerError, match=r"binding 'nowhere' -> queue 'q'.*no exchange 'nowhere'"):
        await session.declare(classic("q"), Binding("nowhere", "q", "k"))
    assert await session.depth("q") == Depth(0, 0)


async def test_missing_permissions_are_named(connect: Connect, amqp_url: str) -> None:
    """Who may do nothing is told which permission each thing needs."""
    owner = await connect(amqp_url)
    await owner.declare(classic("q"), Exchange("e", "topic"))
    stranger = await connect(amqp_url.replace("guest:guest", ":".join(STRANGER)))
    for work, permission in (
        (stranger.declare(classic("mine")), "configure"),
        (stranger.declare(Binding("e", "q", "k")), "write"),
        (stranger.lease("mine"), "configure"),
        (stranger.consume("q", Inbox().take, prefetch=1), "read"),
        (stranger.publish("e", "k", b"", PLAIN), "write"),
    ):
        with pytest.raises(BrokerRefused, match=f"{permission}.* permission"):
            await work
    assert stranger.is_open


# --- depth ---


async def test_depth_is_exact_and_fresh(session: Session) -> None:
    """Each depth is the count of now: ready messages without the unacked, and the consumers."""
    await session.declare(quorum("q"))
    for count in range(3):
        assert await session.depth("q") == Depth(count, 0)
        await fill(session, "q", b"x")
    inbox = Inbox()
    consumer = await session.consume("q", inbox.take, prefetch=2)
    await wait_until(lambda: len(inbox) == 2)
    assert await session.depth("q") == Depth(1, 1)
    await consumer.close()
    await wait_until(lambda: _is(session, "q", Depth(3, 0)))


async def _is(session: Session, queue: str, depth: Depth) -> bool:
    return await session.depth(queue) == depth


async def test_depth_of_missing_is_none(session: Session) -> None:
    """A missing queue is None, however often one asks, and harms no other question."""
    await session.declare(classic("here"))
    assert [await session.depth("gone") for _ in range(10)] == [None] * 10
    assert await session.depth("here") == Depth(0, 0)


async def test_depths_of_many(session: Session) -> None:
    """Many depths keep the order, with None for the missing."""
    names = [f"q{number}" for number in range(20)]
    await session.declare(*(classic(name) for name in names[::2]))
    await fill(session, "q4", b"x", b"y")
    expected = [None if number % 2 else Depth(2 if number == 4 else 0, 0) for number in range(20)]
    assert await session.depths(names) == expected
    assert await session.depths([]) == []


# --- leases ---


async def test_lease_is_exclusive(connect: Connect, amqp_url: str) -> None:
    """One session has it; the other is told no, sees it as empty, and gets it after the release."""
    first, second = await connect(amqp_url), await connect(amqp_url)
    assert await first.lease("l")
    assert await first.lease("l")
    assert not await second.lease("l")
    assert not await second.lease("l")
    assert await second.depth("l") == Depth(0, 0)
    await second.release("l")  # not its own: nothing happens
    assert not await second.lease("l")
    await first.release("l")
    await first.release("l")
    assert await second.lease("l")
    assert not await first.lease("l")


async def test_lease_ends_with_the_session(connect: Connect, amqp_url: str) -> None:
    """Closing the session frees its leases within moments."""
    first, second = await connect(amqp_url), await connect(amqp_url)
    assert await first.lease("l")
    await first.__aexit__(None, None, None)
    await wait_until(lambda: second.lease("l"), 2.0)


_HOLDER = """
import asyncio, sys
from qworker.broker.reference.session import AioPikaConnector
async def main():
    session = await AioPikaConnector(sys.argv[1]).connect()
    assert await session.lease("l")
    print("held", flush=True)
    await session.wait_closed()
asyncio.run(main())
"""


async def test_lease_ends_with_a_killed_holder(session: Session, amqp_url: str) -> None:
    """SIGKILL of the holder frees the lease: the broker drops it with the connection."""
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLDER, amqp_url, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"held\n"
        assert not await session.lease("l")
    finally:
        holder.kill()
        await holder.communicate()
    await wait_until(lambda: session.lease("l"), 2.0)


async def test_release_takes_the_hot_exchange_away(session: Session) -> None:
    """The hot exchange hangs on the lease queue: one delete removes both."""
    await session.declare(Exchange("qworker.presence", "topic", internal=True))
    assert await session.lease(lease_queue("m", 0))
    await session.declare(*announcement("m", 0))
    await session.release(lease_queue("m", 0))
    with pytest.raises(BrokerError, match="no exchange"):
        await session.declare(classic("q"), Binding(hot_exchange("m", 0), "q", "k"))


async def test_a_cancelled_lease_is_not_kept(connect: Connect, amqp_url: str) -> None:
    """Cancelling a lease on its way never leaves one that nobody knows of."""
    first, second = await connect(amqp_url), await connect(amqp_url)
    for attempt in range(20):
        taking = asyncio.get_running_loop().create_task(first.lease(f"l{attempt}"))
        await asyncio.sleep(random.Random(attempt).random() * 0.004)
        taking.cancel()
        await asyncio.wait([taking])
        if taking.cancelled():
            await wait_until(lambda: second.lease(f"l{attempt}"), 2.0)  # noqa: B023


async def test_delete_queue(session: Session) -> None:
    """A queue goes with its messages, of both kinds; an absent one is fine."""
    await session.declare(quorum("q"), classic("c"))
    await fill(session, "q", b"x")
    for name in ("q", "c", "q", "never"):
        await session.delete_queue(name)
        assert await session.depth(name) is None


async def test_cancelled_calls_harm_nothing(session: Session) -> None:
    """A storm of cancelled RPCs costs no delivery, no consumer and no session."""
    await session.declare(quorum("q"), classic("c"))
    inbox = Inbox()
    await session.consume("q", inbox.take, prefetch=10)
    await fill(session, "q", b"1", b"2")
    await wait_until(lambda: len(inbox) == 2)
    chance = random.Random(1)

    async def cut_short(number: int) -> None:
        works = [
            lambda: session.declare(classic("c"), quorum("q")),
            lambda: session.depth("c" if number % 2 else "gone"),
            lambda: session.depths(["c", "gone", "q"]),
            lambda: session.lease("l"),
            lambda: session.consume("c", Inbox().take, prefetch=1),
            lambda: session.publish("", "c", b"x", PLAIN),
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.random() * 0.006):
                await works[number % len(works)]()

    async with asyncio.TaskGroup() as group:
        for number in range(120):
            group.create_task(cut_short(number))

    assert session.is_open
    assert await session.depth("q") == Depth(0, 1)
    await wait_until(lambda: _has_no_consumer(session, "c"))
    for delivery in inbox.deliveries:
        await delivery.ack()
    await fill(session, "q", b"3")
    await wait_until(lambda: len(inbox) == 3)
    assert not any(delivery.redelivered for delivery in inbox.deliveries)
    assert await ready(session, "q") == 0


async def _has_no_consumer(session: Session, queue: str) -> bool:
    depth = await session.depth(queue)
    return depth is not None and depth.consumers == 0
