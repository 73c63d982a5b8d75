"""The broker contract in trouble: alarms, stops, limits of the broker's own, TLS."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from qworker.broker.base import Connector, ConsumerLost, MessageTooLarge, Session
from qworker.broker.node import NodeTls, PrivateNode
from qworker.errors import BrokerRefused, BrokerUnavailable, ConfigError
from tests.support.broker import PLAIN, Connect, Inbox, classic, fill, outcome, quorum, ready
from tests.support.rabbitmq import start_node
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.broker]

_BROKERS_LIMIT = 100_000
_ACK_TIMEOUT_S = 5


@pytest.fixture(scope="module")
def tls() -> NodeTls:
    """An authority of our own and a certificate of it for 127.0.0.1."""
    return _certificates()


@pytest.fixture(scope="module")
def shared_node(tls: NodeTls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """One node for all tests here: a start takes seconds."""
    conf = [f"max_message_size = {_BROKERS_LIMIT}", f"consumer_timeout = {_ACK_TIMEOUT_S * 1000}"]
    node = start_node(tmp_path_factory.mktemp("rough"), conf=conf, tls=tls)
    yield node
    node.stop(timeout=10.0)


@pytest.fixture
def rough_node(shared_node: PrivateNode) -> Iterator[PrivateNode]:
    """A running node to alarm, pause, stop and kill. Its data stay from test to test: name queues apart."""
    shared_node.start()
    yield shared_node
    shared_node.resume()


async def test_a_blocked_broker_makes_publishes_wait(rough_node: PrivateNode, connect: Connect) -> None:
    """Under a memory alarm publishes wait, without a time-out, while consuming and settling go on."""
    session = await connect(rough_node.url, confirm_timeout=1.0)
    for left in ("in", "out"):  # by the other implementation's run
        await session.delete_queue(left)
    await session.declare(classic("in"), classic("out"))
    await fill(session, "in", *[b"x"] * 20)
    await asyncio.to_thread(rough_node.ctl, "set_vm_memory_high_watermark", "0.000001")
    async with asyncio.TaskGroup() as group:
        publishes = [group.create_task(session.publish("", "out", b"r", PLAIN)) for _ in range(5)]
        await wait_until(lambda: session.blocked)
        publishes += [group.create_task(session.publish("", "out", b"late", PLAIN)) for _ in range(5)]
        inbox = Inbox()
        await session.consume("in", inbox.take, prefetch=1)
        await wait_until(lambda: _settled(inbox, 20))
        started = time.monotonic()
        await wait_until(lambda: time.monotonic() - started > 1.5)  # longer than the confirm time-out
        assert session.is_open
        assert not any(publish.done() for publish in publishes)
        assert session.outbox().messages == 10
        assert session.outbox().nbytes == len(b"r") * 5 + len(b"late") * 5
        await asyncio.to_thread(rough_node.ctl, "set_vm_memory_high_watermark", "0.4")
    await wait_until(lambda: not session.blocked)
    assert session.outbox().messages == 0
    assert await ready(session, "out") == 10
    assert await ready(session, "in") == 0


async def _settled(inbox: Inbox, count: int) -> bool:
    for delivery in inbox.deliveries:
        await delivery.ack()
    return len(inbox) == count


async def test_a_delivery_held_for_too_long(rough_node: PrivateNode, connect: Connect) -> None:
    """The broker's consumer timeout ends one consumer, which is told how long it was; its late ack is harmless.

    The session and its other consumers go on, and the delivery comes again to a new one.
    """
    # It looks once a minute unless told otherwise.
    await asyncio.to_thread(rough_node.ctl, "eval", "application:set_env(rabbit, channel_tick_interval, 1000).")
    session = await connect(rough_node.url)
    for left in ("held", "beside"):  # by the other implementation's run
        await session.delete_queue(left)
    await session.declare(quorum("held"), quorum("beside"))
    await fill(session, "held", b"x")
    inbox, beside = Inbox(), Inbox()
    lost: list[ConsumerLost] = []
    await session.consume("held", inbox.take, prefetch=1, on_lost=lost.append)
    await session.consume("beside", beside.take, prefetch=1, on_lost=lost.append)
    await wait_until(lambda: lost, 30)
    (told,) = lost
    assert told.ack_timeout in (None, _ACK_TIMEOUT_S), "from 4.3 on the broker does not say"
    await inbox.deliveries[0].ack()
    await session.consume("held", inbox.take, prefetch=1, on_lost=lost.append)
    await wait_until(lambda: len(inbox) == 2)
    assert inbox.deliveries[1].redelivered
    await inbox.deliveries[1].ack()
    await fill(session, "beside", b"y")
    await wait_until(lambda: len(beside) == 1)
    assert session.is_open
    assert lost == [told]


async def test_a_hung_broker_ends_the_session(rough_node: PrivateNode, connect: Connect) -> None:
    """A confirm that does not come in time ends the session, for everyone who waits on it."""
    session = await connect(rough_node.url, confirm_timeout=1.0)
    await session.declare(classic("q"))
    await session.publish("", "q", b"x", PLAIN)
    rough_node.pause()
    try:
        async with asyncio.timeout(10):
            raised = await outcome(session.publish("", "q", b"x", PLAIN))
            reason = await session.wait_closed()
        assert isinstance(raised, BrokerUnavailable)
        assert "within 1 s" in str(reason)
        async with asyncio.timeout(15):
            await session.__aexit__(None, None, None)
    finally:
        rough_node.resume()


async def test_no_heartbeat_ends_the_session(rough_node: PrivateNode, connect: Connect) -> None:
    """An idle session notices a broker that has gone silent by its heartbeat."""
    session = await connect(rough_node.url, heartbeat=1)
    await session.declare(classic("q"))
    await session.consume("q", Inbox().take, prefetch=1)
    rough_node.pause()
    try:
        async with asyncio.timeout(20):
            reason = await session.wait_closed()
        assert reason is not None
    finally:
        rough_node.resume()


async def test_a_stopped_broker_ends_the_session(rough_node: PrivateNode, connect: Connect) -> None:
    """Stop: the session ends with a reason, every publish in flight raises or was confirmed, nothing hangs.

    After the restart a new session finds what was confirmed, and late settles of the old one do nothing.
    """
    session = await connect(rough_node.url)
    await session.declare(quorum("stopped"), classic("c"))
    await fill(session, "stopped", b"1", b"2")
    inbox = Inbox()
    consumer = await session.consume("stopped", inbox.take, prefetch=2)
    await wait_until(lambda: len(inbox) == 2)
    assert await session.lease("l")

    async def publish_until_it_ends() -> int:
        confirmed = 0
        while session.is_open:
            if await outcome(session.publish("", "c", b"x", PLAIN)) is None:
                confirmed += 1
        return confirmed

    async with asyncio.TaskGroup() as group:
        publishers = [group.create_task(publish_until_it_ends()) for _ in range(10)]
        await wait_until(lambda: _has(session, "c", 20))
        await asyncio.to_thread(rough_node.stop)
    reason = await session.wait_closed()
    assert reason is not None
    assert reason.retryable
    await consumer.cancel()
    await consumer.close()
    await inbox.deliveries[0].ack()
    await session.__aexit__(None, None, None)

    await asyncio.to_thread(rough_node.start)
    again = await connect(rough_node.url)
    confirmed = sum(publisher.result() for publisher in publishers)
    await wait_until(lambda: _has(again, "c", confirmed))
    assert await again.lease("l")
    back = Inbox()
    await again.consume("stopped", back.take, prefetch=2)
    await wait_until(lambda: len(back) == 2)
    assert all(delivery.redelivered for delivery in back.deliveries)


async def _has(session: Session, queue: str, count: int) -> bool:
    return await ready(session, queue) >= count


async def test_a_killed_broker_ends_the_session(rough_node: PrivateNode, connect: Connect) -> None:
    """SIGKILL of the broker: everyone who waits is told."""
    session = await connect(rough_node.url)
    await session.declare(classic("q"))
    await session.consume("q", Inbox().take, prefetch=1)
    await asyncio.to_thread(rough_node.kill)
    async with asyncio.timeout(5):
        assert isinstance(await session.wait_closed(), BrokerUnavailable)
        assert isinstance(await outcome(session.depth("q")), BrokerUnavailable)


async def test_the_brokers_own_limit(rough_node: PrivateNode, connect: Connect) -> None:
    """A message over the broker's limit is refused by type; those beside it arrive."""
    session = await connect(rough_node.url)
    await session.declare(classic("limited"))
    sizes = [_BROKERS_LIMIT + 1 if number == 7 else 10 for number in range(20)]
    works = [session.publish("", "limited", b"x" * size, PLAIN) for size in sizes]
    results = await asyncio.gather(*works, return_exceptions=True)
    assert [number for number, result in enumerate(results) if result is not None] == [7]
    assert isinstance(results[7], MessageTooLarge)
    assert str(_BROKERS_LIMIT) in str(results[7])
    assert await ready(session, "limited") >= 19
    assert session.is_open


# --- TLS ---


async def test_tls(
    rough_node: PrivateNode,
    tls: NodeTls,
    make_connector: Callable[..., Connector],
    connect: Connect,
    tmp_path: Path,
) -> None:
    """amqps works with the authority's certificate; without it, with another's or for another name it is refused."""
    authority, other = tmp_path / "ca.pem", tmp_path / "other.pem"
    authority.write_bytes(tls.ca)
    other.write_bytes(_certificates().ca)
    url = f"amqps://guest:guest@127.0.0.1:{rough_node.tls_port}/"

    session = await connect(f"{url}?cafile={authority}")
    await session.delete_queue("secret")
    await session.declare(classic("secret"))
    await fill(session, "secret", b"x" * 90_000)
    assert await ready(session, "secret") == 1

    of_another_host = url.replace("127.0.0.1", "localhost")
    for refused in (url, f"{url}?cafile={other}", f"{of_another_host}?cafile={authority}"):
        with pytest.raises(BrokerRefused, match=r"certificate.*cafile"):
            await make_connector(refused).connect()
    trusting = await make_connector(f"{of_another_host}?no_verify_ssl=1").connect()
    await trusting.__aexit__(None, None, None)
    with pytest.raises(ConfigError, match="PEM"):
        await make_connector(f"{url}?cafile={tmp_path}/none.pem").connect()


async def test_tls_and_plain_ports_mixed_up(rough_node: PrivateNode, make_connector: Callable[..., Connector]) -> None:
    """TLS to a plain port is refused by name; plain AMQP to a TLS port fails in bounded time."""
    with pytest.raises(BrokerRefused, match="TLS"):
        await make_connector(rough_node.url.replace("amqp:", "amqps:")).connect()
    with pytest.raises(BrokerUnavailable):
        await make_connector(f"amqp://guest:guest@127.0.0.1:{rough_node.tls_port}/", connect_timeout=3.0).connect()


def _certificates() -> NodeTls:
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = _unsigned("node", key, is_authority=False).add_extension(loopback, critical=False)
    return NodeTls(
        ca=_pem(_unsigned("authority", authority, is_authority=True), authority),
        certificate=_pem(signed, authority),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def _unsigned(name: str, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )


def _pem(unsigned: x509.CertificateBuilder, authority: ec.EllipticCurvePrivateKey) -> bytes:
    return unsigned.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
