"""The broker contract on our own frames: two connections, one life.

Consumers, leases and control calls live on one connection, publishes on the other: under an alarm the
broker stops reading a connection that has published, and with it acks and cancels.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from pamqp.commands import Basic

from qworker.broker.address import broker_url, shown
from qworker.broker.base import (
    Body,
    Consumer,
    Depth,
    OnDelivery,
    OnLost,
    OnReply,
    Outbox,
    Properties,
    RpcChannel,
    Session,
    Told,
)
from qworker.broker.direct_reply import Suspects
from qworker.broker.fast.channel import ChannelClosed
from qworker.broker.fast.consumer import FastConsumer
from qworker.broker.fast.control import Control
from qworker.broker.fast.frames import Delivered
from qworker.broker.fast.link import Link, open_link
from qworker.broker.fast.publisher import Publisher
from qworker.broker.fast.url import Address, parse_address, tls_context
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable
from qworker.wire.topology import DIRECT_REPLY_TO, Binding, Exchange, Queue

_MAX_TICK_S: Final = 1.0
_MAX_PREFETCH: Final = 65_535


class FastConnector:
    """Opens sessions on our own data plane; see ``Connector``.

    The URL is read as ``url`` says; the credential files, when given, are read at each connect.
    ``heartbeat`` and ``confirm_timeout`` are seconds; the URL's ``heartbeat=`` wins. ``name`` is what the
    broker's listings show. Reading pauses while deliveries of more than ``max_held_bytes`` are unsettled.
    """

    def __init__(
        self,
        url: str,
        *,
        username_file: Path | None = None,
        password_file: Path | None = None,
        name: str = "qworker",
        heartbeat: int = 10,
        connect_timeout: float = 15.0,
        confirm_timeout: float = 30.0,
        max_message_bytes: int = 16 << 20,
        max_held_bytes: int = 1 << 30,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url = url
        self._username_file = username_file
        self._password_file = password_file
        self._name = name
        self._heartbeat = heartbeat
        self._connect_timeout = connect_timeout
        self._confirm_timeout = confirm_timeout
        self._max_message_bytes = max_message_bytes
        self._max_held_bytes = max_held_bytes
        self._tls = tls
        self._suspects = Suspects()

    def __repr__(self) -> str:
        return f"FastConnector({shown(self._url)!r})"

    async def connect(self) -> Session:
        """Open a session. Raises BrokerUnavailable, BrokerRefused, ConfigError."""
        address = parse_address(
            await asyncio.to_thread(broker_url, self._url, self._username_file, self._password_file)
        )
        tls = self._tls
        if address.tls and tls is None:
            tls = await asyncio.to_thread(tls_context, address)
        consuming = await self._open(address, tls, "consume")
        try:
            publishing = await self._open(address, tls, "publish")
        except BaseException:
            consuming.end(None)
            raise
        session = FastSession(
            consuming,
            publishing,
            self._suspects,
            confirm_timeout=self._confirm_timeout,
            max_message_bytes=self._max_message_bytes,
            max_held_bytes=self._max_held_bytes,
        )
        return await session.__aenter__()

    async def _open(self, address: Address, tls: ssl.SSLContext | None, role: str) -> Link:
        wanted = address.options.get("heartbeat", "")
        return await open_link(
            address,
            name=f"{address.options.get('name', self._name)} {role}",
            heartbeat=int(wanted) if wanted.isdecimal() else self._heartbeat,
            connect_timeout=self._connect_timeout,
            tls=tls if address.tls else None,
            max_tick=min(_MAX_TICK_S, self._confirm_timeout / 4),
        )


class FastSession:
    """See ``Session``. Made by ``FastConnector.connect``."""

    def __init__(
        self,
        consuming: Link,
        publishing: Link,
        suspects: Suspects,
        *,
        confirm_timeout: float,
        max_message_bytes: int,
        max_held_bytes: int,
    ) -> None:
        self._consuming = consuming
        self._publishing = publishing
        self._suspects = suspects
        self._confirm_timeout = confirm_timeout
        self._max_message_bytes = max_message_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._control: Control
        self._publisher: Publisher
        self._publishers: list[Publisher] = []
        self._ended: asyncio.Future[BrokerUnavailable | None]
        self._entered = False
        self._crash: Exception | None = None

    # --- life ---

    async def __aenter__(self) -> Session:
        if not self._entered:
            self._entered = True
            self._ended = asyncio.get_running_loop().create_future()
            self._consuming.when_ended(self._link_ended)
            self._publishing.when_ended(self._link_ended)
            self._publisher = Publisher(self._publishing, self._max_message_bytes, self._suspects)
            self._publishers = [self._publisher]
            self._publishing.on_tick = self._check_confirms
            self._publishing.on_unblocked = self._unblocked
            self._control = Control(self._consuming)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Write out what is settled, and close both connections."""
        async with asyncio.TaskGroup() as closing:
            closing.create_task(self._consuming.close())
            closing.create_task(self._publishing.close())
        self._end(None)
        crash, self._crash = self._crash, None
        if crash is not None:
            raise crash

    async def wait_closed(self) -> BrokerUnavailable | None:
        return await asyncio.shield(self._ended)

    @property
    def is_open(self) -> bool:
        return self._entered and not self._ended.done() and self._consuming.is_open and self._publishing.is_open

    @property
    def blocked(self) -> bool:
        return self._publishing.blocked is not None

    def outbox(self) -> Outbox:
        waiting = [publisher.outbox() for publisher in self._publishers]
        return Outbox(sum(each.messages for each in waiting), sum(each.nbytes for each in waiting))

    def fail(self, reason: BrokerUnavailable) -> None:
        """End the session at once, for this reason."""
        self._end(reason)

    def crash(self, error: Exception) -> None:
        """End the session because of a bug: ``error`` is raised when it is closed."""
        self._crash = self._crash or error
        self._end(BrokerUnavailable(f"a callback of the session raised {type(error).__name__}: {error}"))

    def _link_ended(self, reason: BrokerError | None) -> None:
        if reason is None:
            return  # closed by us: __aexit__ says when both are
        if not isinstance(reason, BrokerUnavailable):
            reason = BrokerUnavailable(str(reason))
        self._end(reason)

    def _end(self, reason: BrokerUnavailable | None) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)
        self._consuming.end(reason)
        self._publishing.end(reason)

    def _check_confirms(self) -> None:
        if any(publisher.overdue(self._confirm_timeout) for publisher in self._publishers):
            self._end(
                BrokerUnavailable(
                    f"expected the broker to confirm a publish within {self._confirm_timeout:g} s, found none"
                )
            )

    def _unblocked(self) -> None:
        for publisher in self._publishers:
            publisher.restart_clock()

    # --- control ---

    async def declare(self, *entities: Exchange | Queue | Binding) -> None:
        await self._control.declare(*entities)

    async def depth(self, queue: str) -> Depth | None:
        return await self._control.depth(queue)

    async def depths(self, queues: Sequence[str]) -> list[Depth | None]:
        return await self._control.depths(queues)

    async def lease(self, queue: str) -> bool:
        return await self._control.lease(queue)

    async def release(self, queue: str) -> None:
        await self._control.release(queue)

    async def delete_queue(self, queue: str) -> None:
        await self._control.delete(queue)

    # --- data ---

    async def consume(
        self,
        queue: str,
        on_delivery: OnDelivery,
        *,
        prefetch: int,
        priority: int = 0,
        on_lost: OnLost | None = None,
        stream_from: str | None = None,
    ) -> Consumer:
        if not 1 <= prefetch <= _MAX_PREFETCH:
            raise ValueError(f"expected a prefetch from 1 to {_MAX_PREFETCH}, found {prefetch}")
        consumer = FastConsumer(queue, self._consuming.open_channel(), self, on_delivery, on_lost)
        await consumer.start(prefetch, priority, stream_from)
        return consumer

    def send(self, exchange: str, routing_key: str, body: Body, properties: Properties, told: Told) -> bool:
        return self._publisher.send(exchange, routing_key, body, properties, told)

    async def publish(
        self,
        exchange: str,
        routing_key: str,
        body: Body,
        properties: Properties,
        *,
        mandatory: bool = False,
    ) -> None:
        await self._publisher.publish(exchange, routing_key, body, properties, mandatory=mandatory)

    async def open_rpc(self, on_reply: OnReply) -> RpcChannel:
        publisher = Publisher(
            self._publishing,
            self._max_message_bytes,
            self._suspects,
            reply_to=DIRECT_REPLY_TO,
            on_broken=self._rpc_broken,
        )
        rpc = FastRpcChannel(publisher, partial(self._publishers.remove, publisher), self.crash)
        self._publishers.append(publisher)
        await rpc.start(on_reply)
        return rpc

    def _rpc_broken(self, error: BrokerError) -> None:
        if isinstance(error, ChannelClosed):
            self._end(BrokerUnavailable(f"the broker closed a channel for direct replies: {error}"))

    # --- a consumer's host ---

    def hold(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        if self._held_bytes > self._max_held_bytes:
            self._consuming.pause_reading()
        elif self._consuming.read_paused and self._held_bytes <= self._max_held_bytes // 2:
            self._consuming.resume_reading()

    def before_flush(self, call: Callable[[], None]) -> None:
        self._consuming.before_flush(call)


class FastRpcChannel:
    """See ``RpcChannel``."""

    def __init__(self, publisher: Publisher, forget: Callable[[], None], crash: Callable[[Exception], None]) -> None:
        self._publisher = publisher
        self._channel = publisher.channel
        self._forget = forget
        self._crash = crash
        self._closed = False

    async def start(self, on_reply: OnReply) -> None:
        """Consume direct replies. Raises BrokerRefused or BrokerUnavailable."""

        def deliver(message: Delivered) -> None:
            try:
                on_reply(message.body, message.properties)
            except Exception as error:  # noqa: BLE001  # not swallowed: the session ends, and its exit raises it
                self._crash(error)

        self._channel.on_delivered = deliver
        try:
            await self._channel.rpc(Basic.Consume(queue=DIRECT_REPLY_TO, consumer_tag="qworker.replies", no_ack=True))
        except ChannelClosed as exc:
            raise BrokerRefused(f"expected to consume direct replies, found: {exc.reply_code} {exc.text}") from exc
        except asyncio.CancelledError:
            self._forget()
            self._channel.close()
            raise

    def send(self, exchange: str, routing_key: str, body: Body, properties: Properties, told: Told) -> bool:
        return self._publisher.send(exchange, routing_key, body, properties, told)

    async def publish(self, exchange: str, routing_key: str, body: Body, properties: Properties) -> None:
        await self._publisher.publish(exchange, routing_key, body, properties)

    async def close(self) -> None:
        closing = self._channel.close()
        if not self._closed:
            self._closed = True
            self._forget()
        await asyncio.shield(closing)
