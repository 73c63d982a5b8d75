"""Consumers and the deliveries they hand out."""

from __future__ import annotations

from contextlib import suppress

import aiormq
from aiormq import spec
from aiormq.abc import AbstractChannel, DeliveredMessage

from qworker.broker.base import ConsumerLost, OnDelivery, OnLost, Properties
from qworker.broker.reference.errors import LIBRARY_ERRORS, described, refused
from qworker.broker.reference.life import Life
from qworker.broker.reference.link import Link, when_closed
from qworker.broker.reference.properties import from_amqp
from qworker.errors import BrokerError, BrokerUnavailable

MAX_PREFETCH = 65_535


class AioPikaDelivery:
    """A message and the channel that settles it."""

    __slots__ = (
        "_channel",
        "_message",
        "_properties",
        "_settled",
        "_tag",
        "exchange",
        "queue",
        "redelivered",
        "routing_key",
    )

    def __init__(self, message: DeliveredMessage, queue: str) -> None:
        self._channel = message.channel
        self._message = message
        self._properties: Properties | None = None
        self._settled = False
        self._tag = message.delivery_tag or 0
        self.exchange = message.exchange or ""
        self.routing_key = message.routing_key or ""
        self.queue = queue
        self.redelivered = bool(message.redelivered)

    @property
    def body(self) -> bytes:
        return self._message.body

    @property
    def properties(self) -> Properties:
        if self._properties is None:
            self._properties = from_amqp(self._message.header.properties)
        return self._properties

    async def ack(self) -> None:
        if self._may_settle():
            with suppress(*LIBRARY_ERRORS):  # the session ended: the broker has the message back
                await self._channel.basic_ack(self._tag, wait=False)

    def ack_soon(self) -> bool:
        return False  # aiormq has no way to write without a coroutine

    async def reject(self, *, requeue: bool) -> None:
        if self._may_settle():
            with suppress(*LIBRARY_ERRORS):
                await self._channel.basic_reject(self._tag, requeue=requeue, wait=False)

    async def give_back(self) -> None:
        if self._may_settle():
            with suppress(*LIBRARY_ERRORS):
                await self._channel.basic_nack(self._tag, requeue=True, wait=False)

    def _may_settle(self) -> bool:
        """Once: a second settle would close the channel, and with it the session."""
        settled, self._settled = self._settled, True
        return not settled


class AioPikaConsumer:
    """A subscription on a channel of its own. Its unexpected end is told to ``on_lost``, or ends the session."""

    def __init__(self, queue: str, on_delivery: OnDelivery, life: Life, on_lost: OnLost | None = None) -> None:
        self.queue = queue
        self._on_delivery = on_delivery
        self._on_lost = on_lost
        self._life = life
        self._channel: AbstractChannel | None = None
        self._tag = ""
        self._cancelled = False
        self._closed = False

    async def start(self, link: Link, prefetch: int, priority: int, stream_from: str | None = None) -> None:
        """Subscribe. To be run to its end: cut short, it would leave a channel that nobody closes."""
        channel = self._channel = await link.channel(confirms=False)
        try:
            await channel.basic_qos(prefetch_count=prefetch)
            channel.on_consumer_cancel_callbacks.add(self._on_broker_cancel)
            arguments: dict[str, object] = {"x-priority": priority} if priority else {}
            if stream_from is not None:
                arguments["x-stream-offset"] = stream_from
            started = await channel.basic_consume(self.queue, self._receive, arguments=arguments)  # pyright: ignore[reportArgumentType]
        except aiormq.ChannelNotFoundEntity:
            raise BrokerError(f"expected queue {self.queue!r} to consume from, found none: declare it first") from None
        except aiormq.ChannelAccessRefused as error:
            raise refused(error, f"consume from queue {self.queue!r}", "read") from None
        except aiormq.ChannelClosed as error:
            raise BrokerError(f"cannot consume from queue {self.queue!r}: {described(error)}") from None
        except LIBRARY_ERRORS as error:
            raise await self._life.ended_soon() from error
        self._tag = started.consumer_tag or ""
        when_closed(channel, self._on_channel_closed)
        if self._closed:
            await self._close()

    async def cancel(self) -> None:
        if not self._cancelled and not self._closed and self._life.is_open:
            with suppress(BrokerUnavailable):
                await self._life.run(self._cancel())

    async def close(self) -> None:
        if not self._closed:
            self._closed = self._cancelled = True
            if self._life.is_open:
                with suppress(BrokerUnavailable):
                    await self._life.run(self._close())

    async def close_abandoned(self) -> None:
        """Close what is, or will soon be, subscribed: its owner was cancelled and never got it."""
        self._closed = self._cancelled = True
        if self._tag:
            await self._close()

    async def _cancel(self) -> None:
        assert self._channel is not None
        try:
            await self._channel.basic_cancel(self._tag)
        except LIBRARY_ERRORS as error:
            raise await self._life.ended_soon() from error
        self._cancelled = True

    async def _close(self) -> None:
        if self._channel is not None:
            with suppress(*LIBRARY_ERRORS):
                await self._channel.close(aiormq.ChannelInvalidStateError("closed by us"))

    async def _receive(self, message: DeliveredMessage) -> None:
        if self._closed:
            return  # the channel is on its way out, and the message goes back with it
        try:
            self._on_delivery(AioPikaDelivery(message, self.queue))
        except BaseException as error:
            self._life.crash(error)
            raise

    def _on_broker_cancel(self, _: spec.Basic.Cancel) -> None:
        why = f"the broker cancelled the consumer of {self.queue!r}: the queue was deleted, or a message held too long"
        if self._lost(why):
            self._life.start(self._close())  # RabbitMQ 4.3 goes on counting the consumer while its channel is open

    def _on_channel_closed(self, error: BaseException | None) -> None:
        why = f"the channel that consumed {self.queue!r} was closed: {described(error) if error else 'no reason'}"
        if not isinstance(error, aiormq.ChannelClosed):
            self._end(why)  # with its connection
        else:
            self._lost(why)

    def _lost(self, why: str) -> bool:
        """The broker has ended the subscription; False when it is none of ours any more, or the session ends."""
        if self._closed:
            return False
        if self._on_lost is None:
            self._end(why)
            return False
        self._closed = self._cancelled = True
        try:
            self._on_lost(ConsumerLost(why))
        except BaseException as error:
            self._life.crash(error)
            raise
        return True

    def _end(self, reason: str) -> None:
        if not self._closed:
            self._life.end(BrokerUnavailable(reason))
