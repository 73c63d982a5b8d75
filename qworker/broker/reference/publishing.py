"""Publishes with confirms: none is lost in silence, whatever becomes of its channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiormq
import msgspec
from aiormq import spec
from aiormq.abc import DeliveredMessage

from qworker.broker.base import Body, OnReply, Properties, Told
from qworker.broker.base import Outbox as Unconfirmed
from qworker.broker.direct_reply import Suspects, is_direct_reply, is_well_formed
from qworker.broker.reference.errors import ENCODE_ERRORS, is_phantom, is_to_blame, publish_error, too_large
from qworker.broker.reference.life import Life
from qworker.broker.reference.link import Link, when_closed
from qworker.broker.reference.properties import from_amqp, to_amqp
from qworker.errors import BrokerUnavailable, PublishFailed, Unroutable
from qworker.wire.topology import DIRECT_REPLY_TO

_LOG = logging.getLogger(__name__)

_ATTEMPTS = 5
_DRAIN_FROM_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Message:
    exchange: str
    routing_key: str
    body: bytes
    properties: spec.Basic.Properties
    mandatory: bool


class Outbox:
    """What is on its way to the broker, on all channels of one link.

    Owned here: the start times of the publishes in flight. ``tick`` ends the session when the oldest
    waits too long while the broker is not blocked.
    """

    def __init__(
        self, link: Link, life: Life, suspects: Suspects, *, confirm_timeout: float, max_message_bytes: int
    ) -> None:
        self._link = link
        self._life = life
        self._suspects = suspects
        self._confirm_timeout = confirm_timeout
        self._max_message_bytes = max_message_bytes
        self._in_flight: dict[object, tuple[float, _Message]] = {}  # in the order of their start
        self._waiting = Unconfirmed()  # publishes that the broker does not take now
        self._blocked_until = 0.0
        self._look_again = asyncio.Event()
        self._by_message_id: dict[str, asyncio.Future[None]] = {}

    def tick(self) -> None:
        """Look at the clock; called a few times a second while the session is open."""
        now = asyncio.get_running_loop().time()
        if self._link.blocked:
            self._blocked_until = now
            return
        self._look_again.set()
        oldest = next((started for started, _ in self._in_flight.values()), now)
        if now - max(oldest, self._blocked_until) > self._confirm_timeout:
            self._life.end(
                BrokerUnavailable(f"the broker did not confirm a publish within {self._confirm_timeout:g} s")
            )

    def release(self) -> None:
        """The session has ended: nobody waits for the broker any more."""
        self._look_again.set()

    def suspect_direct_replies(self) -> None:
        """The connection died of an internal error: it may have been one of the direct replies on their way."""
        messages = [message for _, message in self._in_flight.values()]
        self._suspects.died_with(m.routing_key for m in messages if is_direct_reply(m.exchange, m.routing_key))

    def drops(self, exchange: str, routing_key: str) -> bool:
        """True for a direct reply whose name would end the connection: it is dropped, as the broker drops
        those to requesters that are gone."""
        if not is_direct_reply(exchange, routing_key):
            return False
        if is_well_formed(routing_key) and not self._suspects.is_convicted(routing_key):
            return False
        _LOG.warning("a direct reply was dropped: its name is not one that this broker gave out")
        return True

    def message(
        self, exchange: str, routing_key: str, body: Body, properties: Properties, *, mandatory: bool
    ) -> _Message:
        """Raises PublishFailed for what AMQP, or our limit, does not let through."""
        if not isinstance(body, bytes):
            body = b"".join(body)
        if len(body) > self._max_message_bytes:
            raise too_large(len(body), self._max_message_bytes)
        try:
            encoded = to_amqp(properties)
        except ENCODE_ERRORS as error:
            raise _not_encodable(error) from error
        # RabbitMQ 3.10 and 4.0 deliver a mandatory direct reply and return it as well.
        return _Message(exchange, routing_key, body, encoded, mandatory and not is_direct_reply(exchange, routing_key))

    def unconfirmed(self) -> Unconfirmed:
        """See ``Session.outbox``."""
        sizes = [len(message.body) for _, message in self._in_flight.values()]
        return Unconfirmed(self._waiting.messages + len(sizes), self._waiting.nbytes + sum(sizes))

    async def wait_until_unblocked(self, size: int) -> None:
        """``size`` bytes wait. Raises BrokerUnavailable when the session ends first."""
        self._waiting = Unconfirmed(self._waiting.messages + 1, self._waiting.nbytes + size)
        try:
            while self._life.is_open and self._link.blocked:
                self._look_again.clear()
                await self._look_again.wait()
        finally:
            self._waiting = Unconfirmed(self._waiting.messages - 1, self._waiting.nbytes - size)
        self._life.raise_if_ended()

    async def send(self, channel: aiormq.Channel, message: _Message) -> None:
        """Publish once and wait for the confirm.

        Raises our errors, or aiormq's ChannelClosed when the broker closed the channel, or
        ChannelInvalidStateError when it was closed before the message left.
        """
        ticket = object()
        self._in_flight[ticket] = asyncio.get_running_loop().time(), message
        try:
            async with self._alone_with_its_id(message.properties.message_id):
                if not self._link.may_send(channel):
                    raise aiormq.ChannelInvalidStateError("closed by the broker")
                await channel.basic_publish(
                    message.body,
                    exchange=message.exchange,
                    routing_key=message.routing_key,
                    properties=message.properties,
                    mandatory=message.mandatory,
                    wait=len(message.body) > _DRAIN_FROM_BYTES,  # back-pressure of the socket
                )
        except aiormq.PublishError:
            raise Unroutable(
                f"no queue is bound to exchange {message.exchange!r} by key {message.routing_key!r}: register "
                "the model or declare the reply queue first"
            ) from None
        except aiormq.DeliveryError:
            raise PublishFailed(
                f"the broker nacked a message for exchange {message.exchange!r}, key {message.routing_key!r}: a queue "
                "is full or unavailable. Try again later"
            ) from None
        except aiormq.AMQPConnectionError:
            raise await self._life.ended_soon() from None
        except ENCODE_ERRORS as error:
            raise _not_encodable(error) from error
        except asyncio.CancelledError as cancelled:
            if is_phantom(cancelled):
                raise await self._life.ended_soon() from None
            raise
        finally:
            del self._in_flight[ticket]

    @asynccontextmanager
    async def _alone_with_its_id(self, message_id: str | None) -> AsyncGenerator[None]:
        """One publish in flight for each message id: aiormq tells returned messages apart by it."""
        if message_id is None:
            yield
            return
        while (other := self._by_message_id.get(message_id)) is not None:
            await asyncio.wait([other])
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._by_message_id[message_id] = mine
        try:
            yield
        finally:
            del self._by_message_id[message_id]
            mine.set_result(None)


class Publisher:
    """Publishes on one channel, which is opened again when a publish breaks it."""

    def __init__(self, link: Link, life: Life, outbox: Outbox) -> None:
        self._link = link
        self._life = life
        self._outbox = outbox
        self._opening = asyncio.Lock()
        self._channel: aiormq.Channel | None = None  # written under the lock

    async def publish(
        self, exchange: str, routing_key: str, body: Body, properties: Properties, *, mandatory: bool
    ) -> None:
        message = self._outbox.message(exchange, routing_key, body, properties, mandatory=mandatory)
        if self._outbox.drops(exchange, routing_key):
            return
        for _ in range(_ATTEMPTS):
            await self._outbox.wait_until_unblocked(len(message.body))
            channel = await self._open_channel()
            try:
                await self._outbox.send(channel, message)
                return
            except aiormq.ChannelClosed as error:
                # All publishes in flight fall with the channel; those that are not to blame go again.
                if is_to_blame(error, exchange, len(message.body), properties.reply_to) is not False:
                    raise publish_error(error, exchange, len(message.body)) from None
            except aiormq.ChannelInvalidStateError:
                if not self._link.is_open:
                    raise await self._life.ended_soon() from None
        raise PublishFailed(f"other publishes broke the channel {_ATTEMPTS} times under this one: try again")

    async def _open_channel(self) -> aiormq.Channel:
        if self._channel is None or not self._link.may_send(self._channel):
            async with self._opening:
                if self._channel is None or not self._link.may_send(self._channel):
                    self._channel = await self._link.channel(confirms=True)
        return self._channel


class AioPikaRpcChannel:
    """Requests with direct replies: the broker wants both on one channel."""

    def __init__(self, channel: aiormq.Channel, life: Life, outbox: Outbox, on_reply: OnReply) -> None:
        self._channel = channel
        self._life = life
        self._outbox = outbox
        self._on_reply = on_reply
        self._closing = False

    async def start(self) -> None:
        await self._channel.basic_consume(DIRECT_REPLY_TO, self._receive, no_ack=True)
        when_closed(self._channel, self._on_closed)

    def send(self, exchange: str, routing_key: str, body: Body, properties: Properties, told: Told) -> bool:  # noqa: ARG002
        return False  # aiormq has no way to publish without a coroutine

    async def publish(self, exchange: str, routing_key: str, body: Body, properties: Properties) -> None:
        envelope = msgspec.structs.replace(properties, reply_to=DIRECT_REPLY_TO)
        message = self._outbox.message(exchange, routing_key, body, envelope, mandatory=False)
        await self._outbox.wait_until_unblocked(len(message.body))
        try:
            await self._outbox.send(self._channel, message)
        except aiormq.ChannelClosed as error:
            if is_to_blame(error, exchange, len(message.body), DIRECT_REPLY_TO) is not False:
                raise publish_error(error, exchange, len(message.body)) from None
            raise await self._life.ended_soon() from None
        except aiormq.ChannelInvalidStateError:
            if self._closing:
                raise BrokerUnavailable("the request channel is closed") from None
            raise await self._life.ended_soon() from None

    async def close(self) -> None:
        self._closing = True
        if self._life.is_open and not self._channel.is_closed:
            await self._life.run(self._channel.close(aiormq.ChannelInvalidStateError("closed by us")))

    async def _receive(self, message: DeliveredMessage) -> None:
        try:
            self._on_reply(message.body, from_amqp(message.header.properties))
        except BaseException as error:
            self._life.crash(error)
            raise

    def _on_closed(self, _: BaseException | None) -> None:
        if not self._closing:
            self._life.end(BrokerUnavailable("the broker closed the request channel; replies on their way are lost"))


def _not_encodable(error: BaseException) -> PublishFailed:
    return PublishFailed(f"expected properties and a routing key that AMQP can carry, found: {error}")
