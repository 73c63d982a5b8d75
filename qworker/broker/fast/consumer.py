"""A subscription on a channel of its own, its deliveries, and the acks that several of them share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from pamqp.base import Frame
from pamqp.commands import Basic
from pamqp.common import FieldTable

from qworker.broker.base import ConsumerLost, OnDelivery, OnLost, Properties
from qworker.broker.fast.channel import ChannelClosed, LinkChannel
from qworker.broker.fast.frames import Buffer, Delivered, write_ack, write_nack, write_reject
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable


class AckLedger:
    """Which deliveries of a channel are settled, and how to say so in few frames. Pure.

    One ``multiple`` ack covers a prefix of the delivery tags, and only one that is settled in full: it
    would ack what is still running with it. What is settled out of order is acked by itself.
    """

    def __init__(self) -> None:
        self.floor = 0
        """All tags up to this one are settled."""
        self._above: set[int] = set()
        self._unsaid: list[int] = []

    @property
    def has_unsaid(self) -> bool:
        return bool(self._unsaid)

    def settled(self, tag: int) -> None:
        """``tag`` is settled, and the broker has been told."""
        if tag != self.floor + 1:
            self._above.add(tag)
            return
        above = self._above
        while tag + 1 in above:
            tag += 1
            above.remove(tag)
        self.floor = tag

    def acked(self, tag: int) -> None:
        """``tag`` is settled; the broker is told with the next ``unsaid``."""
        self._unsaid.append(tag)
        self.settled(tag)

    def unsaid(self) -> tuple[int | None, list[int]]:
        """What to ack now: a prefix up to a tag, if any, and single tags. They count as told then."""
        tags, self._unsaid = self._unsaid, []
        prefix = max((tag for tag in tags if tag <= self.floor), default=None)
        return prefix, [tag for tag in tags if tag > self.floor]


class Host(Protocol):
    """The session, as a consumer sees it."""

    def hold(self, nbytes: int) -> None:
        """``nbytes`` of bodies came in hand (or, negative, are settled)."""
        ...

    def fail(self, reason: BrokerUnavailable) -> None: ...
    def crash(self, error: Exception) -> None: ...
    def before_flush(self, call: Callable[[], None]) -> None: ...


class FastDelivery:
    """A message in hand; see ``Delivery``."""

    __slots__ = ("_consumer", "_settled", "_tag", "body", "exchange", "properties", "redelivered", "routing_key")

    def __init__(self, message: Delivered, consumer: FastConsumer) -> None:
        self.body: bytes = message.body
        self.properties: Properties = message.properties
        self.exchange: str = message.exchange
        self.routing_key: str = message.routing_key
        self.redelivered: bool = message.redelivered
        self._consumer = consumer
        self._tag = message.tag
        self._settled = False

    @property
    def queue(self) -> str:
        return self._consumer.queue

    async def ack(self) -> None:
        self.ack_soon()

    async def reject(self, *, requeue: bool) -> None:
        if self._settle():
            raw = write_reject(self._consumer.number, self._tag, requeue=requeue)
            self._consumer.refuse(self._tag, len(self.body), raw)

    async def give_back(self) -> None:
        if self._settle():
            raw = write_nack(self._consumer.number, self._tag, requeue=True)
            self._consumer.refuse(self._tag, len(self.body), raw)

    def ack_soon(self) -> bool:
        """See ``Delivery``: it leaves with the other acks of this turn of the loop."""
        if self._settle():
            self._consumer.ack(self._tag, len(self.body))
        return True

    def _settle(self) -> bool:
        """True the first time, while there is somebody to tell."""
        if self._settled or not self._consumer.can_settle:
            return False
        self._settled = True
        return True


class FastConsumer:
    """A running subscription; see ``Consumer``."""

    def __init__(
        self, queue: str, channel: LinkChannel, host: Host, on_delivery: OnDelivery, on_lost: OnLost | None = None
    ) -> None:
        self.queue = queue
        self._channel = channel
        self._host = host
        self._on_delivery = on_delivery
        self._on_lost = on_lost
        self._ledger = AckLedger()
        self._held = 0
        self._tag = f"qworker.{channel.number}"
        self._started = False
        self._cancelling: asyncio.Future[Frame] | None = None
        channel.on_delivered = self._deliver
        channel.on_cancelled = self._cancelled_by_broker
        channel.on_end = self._ended

    async def start(self, prefetch: int, priority: int, stream_from: str | None = None) -> None:
        """Subscribe. Raises BrokerError when there is no such queue, BrokerRefused without permission."""
        self._channel.rpc(Basic.Qos(prefetch_count=prefetch))
        arguments: FieldTable = {"x-priority": priority} if priority else {}
        if stream_from is not None:
            arguments["x-stream-offset"] = stream_from
        try:
            await self._channel.rpc(
                Basic.Consume(queue=self.queue, consumer_tag=self._tag, arguments=arguments or None)
            )
        except ChannelClosed as exc:
            raise _consume_error(self.queue, exc) from exc
        except asyncio.CancelledError:
            # The broker may have subscribed us by now: what it sends goes back when the channel is closed.
            self._channel.close()
            raise
        self._started = True

    @property
    def number(self) -> int:
        return self._channel.number

    @property
    def can_settle(self) -> bool:
        return self._channel.is_open

    async def cancel(self) -> None:
        if self._cancelling is None:
            if not self._channel.is_open:
                return
            self._cancelling = self._channel.rpc(Basic.Cancel(consumer_tag=self._tag))
        try:
            await asyncio.shield(self._cancelling)
        except BrokerError:
            return  # the channel is gone, and the subscription with it

    async def close(self) -> None:
        self.flush_acks()
        closing = self._channel.close()
        self._let_go()
        await asyncio.shield(closing)

    # --- settling: FastDelivery's side ---

    def ack(self, tag: int, nbytes: int) -> None:
        ledger = self._ledger
        if not ledger.has_unsaid:
            self._host.before_flush(self.flush_acks)
        ledger.acked(tag)
        self._held -= nbytes
        self._host.hold(-nbytes)

    def refuse(self, tag: int, nbytes: int, raw: bytes) -> None:
        """``raw`` says that it is rejected or given back."""
        self._channel.send([raw], len(raw))
        self._ledger.settled(tag)
        self._held -= nbytes
        self._host.hold(-nbytes)

    def flush_acks(self) -> None:
        """Tell the broker all acks since the last time."""
        if not self._ledger.has_unsaid or not self._channel.is_open:
            return
        prefix, singles = self._ledger.unsaid()
        number = self._channel.number
        raws: list[Buffer] = [write_ack(number, tag) for tag in singles]
        if prefix is not None:
            raws.append(write_ack(number, prefix, multiple=True))
        self._channel.send(raws, sum(map(len, raws)))

    # --- the channel's side ---

    def _deliver(self, message: Delivered) -> None:
        nbytes = len(message.body)
        self._held += nbytes
        self._host.hold(nbytes)
        try:
            self._on_delivery(FastDelivery(message, self))
        except Exception as error:  # noqa: BLE001  # not swallowed: the session ends, and its exit raises it
            self._host.crash(error)

    def _cancelled_by_broker(self, _tag: str) -> None:
        if self._cancelling is None:
            # RabbitMQ 4.3 leaves the channel open and goes on counting the consumer: closed, it counts no more.
            self._channel.close()
            self._let_go()
            self._lost(
                f"the broker cancelled the consumer of {self.queue!r}: the queue was deleted, or a delivery was "
                "held longer than the broker's consumer timeout"
            )

    def _ended(self, error: BrokerError) -> None:
        self._let_go()
        if self._started and isinstance(error, ChannelClosed):
            self._lost(f"the broker closed the consumer of {self.queue!r}: {error}")

    def _lost(self, why: str) -> None:
        told = self._on_lost
        if told is None:
            self._host.fail(BrokerUnavailable(why))
            return
        try:
            told(ConsumerLost(why))
        except Exception as error:  # noqa: BLE001  # not swallowed: the session ends, and its exit raises it
            self._host.crash(error)

    def _let_go(self) -> None:
        self._host.hold(-self._held)
        self._held = 0


def _consume_error(queue: str, closed: ChannelClosed) -> BrokerError:
    found = f"{closed.reply_code} {closed.text}"
    if closed.reply_code == 404:
        return BrokerError(f"expected queue {queue!r} to consume from, found none: {found}. Declare it first")
    if closed.reply_code == 403:
        return BrokerRefused(
            f"the broker refused to consume from queue {queue!r}: {found}. Give the user the read permission"
        )
    return BrokerError(f"cannot consume from queue {queue!r}: {found}")
