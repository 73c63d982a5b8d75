"""The broker contract on aiormq, the protocol layer of aio-pika: the reference implementation.

Two plain connections, never aio-pika's robust ones: those take leases and bindings again behind their
owner's back. One connection consumes, holds the leases and runs the control RPCs; the other publishes,
because under a memory or disk alarm the broker stops reading from whoever publishes, acks included.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path

from qworker.broker.address import broker_url, shown
from qworker.broker.base import Body, Depth, OnDelivery, OnLost, OnReply, Properties, Told
from qworker.broker.base import Outbox as Unconfirmed
from qworker.broker.direct_reply import Suspects
from qworker.broker.reference.consuming import MAX_PREFETCH, AioPikaConsumer
from qworker.broker.reference.control import Control
from qworker.broker.reference.errors import LIBRARY_ERRORS
from qworker.broker.reference.life import Life
from qworker.broker.reference.link import Link
from qworker.broker.reference.publishing import AioPikaRpcChannel, Outbox, Publisher
from qworker.errors import BrokerUnavailable
from qworker.wire.topology import Binding, Exchange, Queue

DEFAULT_MAX_MESSAGE_BYTES = 16 << 20
"""RabbitMQ's own limit from 4.0 on. It cuts the channel only after it has read the whole body."""

_TICK_SECONDS = 0.25


class AioPikaConnector:
    """Opens sessions on one broker.

    ``url`` is ``amqp[s]://user:password@host:port/vhost``; TLS verifies the broker and takes its files from
    the URL's query (``cafile``, ``certfile``, ``keyfile``; ``no_verify_ssl=1`` trusts anybody) or from ``tls``. The
    credential files, when given, are read at each connect.
    """

    def __init__(
        self,
        url: str,
        *,
        username_file: Path | None = None,
        password_file: Path | None = None,
        name: str = "qworker",
        heartbeat: int = 10,
        confirm_timeout: float = 30.0,
        connect_timeout: float = 10.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url = url
        self._username_file = username_file
        self._password_file = password_file
        self._name = name
        self._heartbeat = heartbeat
        self._confirm_timeout = confirm_timeout
        self._connect_timeout = connect_timeout
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._suspects = Suspects()

    def __repr__(self) -> str:
        return f"AioPikaConnector({shown(self._url)!r})"

    async def connect(self) -> AioPikaSession:
        """Open a session. Raises BrokerUnavailable, BrokerRefused, ConfigError."""
        url = await asyncio.to_thread(broker_url, self._url, self._username_file, self._password_file)
        session = AioPikaSession(
            self._link(url, "consume"),
            self._link(url, "publish"),
            self._suspects,
            confirm_timeout=self._confirm_timeout,
            max_message_bytes=self._max_message_bytes,
        )
        return await session.__aenter__()

    def _link(self, url: str, role: str) -> Link:
        return Link(
            url,
            name=f"{self._name} ({role})",
            heartbeat=self._heartbeat,
            connect_timeout=self._connect_timeout,
            tls=self._tls,
        )


class AioPikaSession:
    """One life of two connections. Made by the connector."""

    def __init__(
        self,
        consume_link: Link,
        publish_link: Link,
        suspects: Suspects,
        *,
        confirm_timeout: float,
        max_message_bytes: int,
    ) -> None:
        self._consume_link = consume_link
        self._publish_link = publish_link
        self._life = Life()
        self._control = Control(consume_link, self._life)
        self._outbox = Outbox(
            publish_link, self._life, suspects, confirm_timeout=confirm_timeout, max_message_bytes=max_message_bytes
        )
        self._publisher = Publisher(publish_link, self._life, self._outbox)
        self._watch: asyncio.Task[None] | None = None  # until the session is closed

    # --- life ---

    async def __aenter__(self) -> AioPikaSession:
        if self._watch is None:
            try:
                await self._consume_link.open(self._life.end)
                await self._publish_link.open(self._on_publish_link_lost)
            except BaseException:
                await self._consume_link.close()
                raise
            # Owned by this session: it ends when the session does, and __aexit__ waits for it.
            self._watch = asyncio.get_running_loop().create_task(self._attend())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close: leases and consumers end, unsettled deliveries go back. Closing twice does nothing."""
        self._life.end(None)
        if self._watch is not None:
            await asyncio.shield(self._watch)
        self._life.raise_crash()

    async def wait_closed(self) -> BrokerUnavailable | None:
        await self._life.wait()
        return self._life.reason

    @property
    def is_open(self) -> bool:
        return self._life.is_open

    @property
    def blocked(self) -> bool:
        return self._publish_link.blocked

    def outbox(self) -> Unconfirmed:
        return self._outbox.unconfirmed()

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
        await self._control.delete_queue(queue)

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
    ) -> AioPikaConsumer:
        if not 1 <= prefetch <= MAX_PREFETCH:
            raise ValueError(f"expected a prefetch from 1 to {MAX_PREFETCH}, found {prefetch}")
        consumer = AioPikaConsumer(queue, on_delivery, self._life, on_lost)
        try:
            await self._life.run(consumer.start(self._consume_link, prefetch, priority, stream_from))
        except asyncio.CancelledError:
            if self._life.is_open:
                self._life.start(consumer.close_abandoned())
            raise
        return consumer

    def send(self, exchange: str, routing_key: str, body: Body, properties: Properties, told: Told) -> bool:  # noqa: ARG002
        return False  # aiormq has no way to publish without a coroutine

    async def publish(
        self, exchange: str, routing_key: str, body: Body, properties: Properties, *, mandatory: bool = False
    ) -> None:
        await self._publisher.publish(exchange, routing_key, body, properties, mandatory=mandatory)

    async def open_rpc(self, on_reply: OnReply) -> AioPikaRpcChannel:
        async def open_channel() -> AioPikaRpcChannel:
            channel = await self._publish_link.channel(confirms=True)
            rpc = AioPikaRpcChannel(channel, self._life, self._outbox, on_reply)
            try:
                await rpc.start()
            except LIBRARY_ERRORS as error:
                raise await self._life.ended_soon() from error
            return rpc

        return await self._life.run(open_channel())

    # --- the end ---

    def _on_publish_link_lost(self, reason: BrokerUnavailable) -> None:
        if self._publish_link.died_inside:
            self._outbox.suspect_direct_replies()
        self._life.end(reason)

    async def _attend(self) -> None:
        while not await self._life.wait(_TICK_SECONDS):
            self._outbox.tick()
        self._outbox.release()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._consume_link.close())
            group.create_task(self._publish_link.close())
        await self._life.finish()
