"""Publishing with confirms: bookkeeping, returns, size limits, and a channel that can be lost."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

from pamqp.commands import Confirm

from qworker.broker.base import Body, MessageTooLarge, Outbox, Properties, Told
from qworker.broker.direct_reply import Suspects, is_direct_reply, is_well_formed
from qworker.broker.fast.channel import ChannelClosed, ConnectionClosed, LinkChannel
from qworker.broker.fast.fields import EncodeError
from qworker.broker.fast.frames import Confirmed, Returned, write_publish
from qworker.broker.fast.link import Link
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable, PublishFailed, Unroutable

_LOG = logging.getLogger(__name__)
_ATTEMPTS: Final = 5
_INTERNAL_ERROR: Final = 541
_MAX_SIZE: Final = re.compile(r"message size \d+ .*?max size (\d+)")
_EXCHANGE: Final = re.compile(r"(?:no|access to) exchange '([^']*)'")

_MandatoryKey = tuple[str, str, str | None]


@lru_cache(maxsize=4096)  # a requester keeps its name for all its requests
def _is_harmless(routing_key: str) -> bool:
    return not is_direct_reply("", routing_key) or is_well_formed(routing_key)


class Outgoing:
    """A message on its way: ``told`` hears of the broker's confirm, or why there is none."""

    __slots__ = ("exchange", "mandatory", "routing_key", "sent_at", "size", "told")

    def __init__(
        self,
        told: Told,
        sent_at: float,
        exchange: str,
        routing_key: str,
        size: int,
        mandatory: Mandatory | None = None,
    ) -> None:
        self.told = told
        self.sent_at = sent_at
        self.exchange = exchange
        self.routing_key = routing_key
        self.size = size
        self.mandatory = mandatory


class Mandatory:
    """What a mandatory message has besides: by what a return names it, and the reason of the return."""

    __slots__ = ("key", "returned", "settled")

    def __init__(self, key: _MandatoryKey, settled: asyncio.Future[None]) -> None:
        self.key = key
        self.settled = settled
        self.returned: str | None = None


class ConfirmLedger:
    """Messages of one channel that are not confirmed yet, by delivery tag. Pure."""

    def __init__(self) -> None:
        self._pending: dict[int, Outgoing] = {}
        self._floor = 1
        """No tag below this one is pending."""
        self._next = 1

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, message: Outgoing) -> None:
        """``message`` is the next one that is published on the channel."""
        self._pending[self._next] = message
        self._next += 1

    def outbox(self) -> Outbox:
        return Outbox(len(self._pending), sum(message.size for message in self._pending.values()))

    def settle(self, tag: int, *, multiple: bool) -> list[Outgoing]:
        """Take out what a confirm covers. Tags that are settled already, or not yet sent, are none."""
        if not multiple:
            message = self._pending.pop(tag, None)
            return [] if message is None else [message]
        last = self._next - 1 if tag == 0 else min(tag, self._next - 1)
        found = [self._pending.pop(each, None) for each in range(self._floor, last + 1)]
        self._floor = max(self._floor, last + 1)
        return [message for message in found if message is not None]

    def oldest(self) -> Outgoing | None:
        while self._floor < self._next and self._floor not in self._pending:
            self._floor += 1
        return self._pending.get(self._floor)

    def drain(self) -> list[Outgoing]:
        """Take out all that is left."""
        left, self._pending = list(self._pending.values()), {}
        self._floor = self._next
        return left


class Publisher:
    """Publishes on one channel of ``link``.

    RabbitMQ answers some bad publishes (no such exchange, no permission, too large) by closing the
    channel, and with it the confirms of all messages in flight. The bad one gets its reason, the others
    are published again on a new channel. With ``on_broken`` there is no new one.
    """

    def __init__(
        self,
        link: Link,
        max_bytes: int,
        suspects: Suspects,
        *,
        reply_to: str | None = None,
        on_broken: Callable[[BrokerError], None] | None = None,
    ) -> None:
        self._link = link
        self._max_bytes = max_bytes
        self._suspects = suspects
        self._reply_to = reply_to
        self._on_broken = on_broken
        self._ledger = ConfirmLedger()
        self._mandatory: dict[_MandatoryKey, Mandatory] = {}
        self._waiting = Outbox()  # publishes that the broker does not take now
        self._clock_from = 0.0
        self._loop = asyncio.get_running_loop()
        self.channel = self._open()

    def send(self, exchange: str, routing_key: str, body: Body, properties: Properties, told: Told) -> bool:
        """See ``Session.send``."""
        link = self._link
        size = len(body) if isinstance(body, bytes) else sum(map(len, body))
        if (
            size > self._max_bytes
            or link.blocked is not None
            or link.write_paused
            or self.channel.error is not None
            or (not exchange and not self._may_answer(routing_key))
        ):
            return False
        try:
            self._write(exchange, routing_key, body, size, properties, told)
        except EncodeError:
            return False  # ``publish`` says what is wrong with it
        return True

    def _may_answer(self, routing_key: str) -> bool:
        """False for a direct reply whose name would end the connection."""
        return _is_harmless(routing_key) and not self._suspects.is_convicted(routing_key)

    async def publish(
        self, exchange: str, routing_key: str, body: Body, properties: Properties, *, mandatory: bool = False
    ) -> None:
        """See ``Session.publish``."""
        link = self._link
        size = len(body) if isinstance(body, bytes) else sum(map(len, body))
        if size > self._max_bytes:
            raise _too_large(size, self._max_bytes)
        if is_direct_reply(exchange, routing_key):
            mandatory = False  # RabbitMQ 3.10 and 4.0 deliver a mandatory direct reply and return it as well
            if not self._may_answer(routing_key):
                _LOG.warning("a direct reply was dropped: its name is not one that this broker gave out")
                return
        for _ in range(_ATTEMPTS):
            if link.blocked is not None or link.write_paused:
                await self._wait_writable(size)
            stub = await self._take_key((exchange, routing_key, properties.message_id)) if mandatory else None
            try:
                if self.channel.error is not None:
                    raise _lost(self.channel.error)
                done: asyncio.Future[None] = self._loop.create_future()
                self._write(exchange, routing_key, body, size, properties, partial(_resolve, done), stub)
                await done
            except ChannelClosed as exc:
                if not exc.collateral:
                    raise _lost(exc) from exc
            else:
                return
        raise PublishFailed(f"other publishes broke the channel {_ATTEMPTS} times under this one: try again")

    def outbox(self) -> Outbox:
        """See ``Session.outbox``."""
        waiting, sent = self._waiting, self._ledger.outbox()
        return Outbox(waiting.messages + sent.messages, waiting.nbytes + sent.nbytes)

    async def _wait_writable(self, size: int) -> None:
        self._waiting = Outbox(self._waiting.messages + 1, self._waiting.nbytes + size)
        try:
            await self._link.wait_writable()
        finally:
            self._waiting = Outbox(self._waiting.messages - 1, self._waiting.nbytes - size)

    def _write(
        self,
        exchange: str,
        routing_key: str,
        body: Body,
        size: int,
        properties: Properties,
        told: Told,
        stub: Mandatory | None = None,
    ) -> None:
        """Write the message; ``told`` hears of its confirm. Raises EncodeError."""
        link = self._link
        buffers = write_publish(
            self.channel.number,
            exchange,
            routing_key,
            properties,
            body,
            mandatory=stub is not None,
            frame_max=link.limits.frame_max,
            reply_to=self._reply_to,
        )
        if stub is not None:
            self._mandatory[stub.key] = stub
        self._ledger.add(Outgoing(told, self._loop.time(), exchange, routing_key, size, stub))
        link.write(buffers, size)

    async def _take_key(self, key: _MandatoryKey) -> Mandatory:
        """A return names its message by this key alone, so only one of a kind is on its way at a time."""
        while (twin := self._mandatory.get(key)) is not None:
            await asyncio.wait((twin.settled,))
        return Mandatory(key, self._loop.create_future())

    def overdue(self, confirm_timeout: float) -> bool:
        """True when a confirm is later than that. The time that the broker was blocked does not count."""
        oldest = None if self._link.blocked is not None else self._ledger.oldest()
        if oldest is None:
            return False
        return self._loop.time() - max(oldest.sent_at, self._clock_from) > confirm_timeout

    def restart_clock(self) -> None:
        """The broker takes publishes again: confirms are due from now on."""
        self._clock_from = self._loop.time()

    def _open(self) -> LinkChannel:
        channel = self._link.open_channel()
        channel.on_confirmed = self._confirmed
        channel.on_returned = self._returned
        channel.on_end = self._ended
        channel.rpc(Confirm.Select())
        return channel

    def _confirmed(self, confirm: Confirmed) -> None:
        for message in self._ledger.settle(confirm.tag, multiple=confirm.multiple):
            stub = message.mandatory
            if stub is not None:
                del self._mandatory[stub.key]
                stub.settled.set_result(None)
            if stub is not None and stub.returned is not None:
                message.told(Unroutable(stub.returned))
            elif confirm.ok:
                message.told(None)
            else:
                message.told(
                    PublishFailed(
                        f"the broker nacked a message for exchange {message.exchange!r}: a queue is full or "
                        "unavailable. Try again later"
                    )
                )

    def _returned(self, event: Returned) -> None:
        stub = self._mandatory.get((event.exchange, event.routing_key, event.properties.message_id))
        if stub is not None:  # its confirm follows
            stub.returned = (
                f"no queue is bound to exchange {event.exchange!r} by key {event.routing_key!r} ({event.code} "
                f"{event.reason}): register the model or declare the reply queue first"
            )

    def _ended(self, error: BrokerError) -> None:
        left = self._ledger.drain()
        self._ledger = ConfirmLedger()
        stubs, self._mandatory = self._mandatory, {}
        for stub in stubs.values():
            stub.settled.set_result(None)
        if isinstance(error, ChannelClosed) and self._on_broken is None and self._link.is_open:
            self.channel = self._open()
        elif isinstance(error, ConnectionClosed) and error.reply_code == _INTERNAL_ERROR:
            self._suspects.died_with(m.routing_key for m in left if is_direct_reply(m.exchange, m.routing_key))
        for message in left:
            message.told(_failure(message, error, may_retry=self._on_broken is None))
        if self._on_broken is not None:
            self._on_broken(error)


def _resolve(done: asyncio.Future[None], error: BrokerError | None) -> None:
    if done.done():
        return  # whoever published it has gone
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _failure(message: Outgoing, error: BrokerError, *, may_retry: bool) -> BrokerError:
    """What the loss of the channel means for one message that was in flight on it."""
    if not isinstance(error, ChannelClosed):
        return _lost(error)
    failure: BrokerError
    text = f"{error.reply_code} {error.text}"
    if limit := _MAX_SIZE.search(error.text):
        to_blame, failure = message.size > int(limit[1]), _too_large(message.size, int(limit[1]))
    elif exchange := _EXCHANGE.search(error.text):
        to_blame = message.exchange == exchange[1]
        if error.reply_code == 403:
            failure = BrokerRefused(
                f"the broker refused to publish to exchange {message.exchange!r}: {text}. Give the user the write "
                "permission (rabbitmqctl set_permissions)"
            )
        else:
            failure = PublishFailed(
                f"there is no exchange {message.exchange!r}: {text}. Declare it first, or start a worker: it does"
            )
    else:
        to_blame = may_retry  # the broker does not say whose it was
        failure = PublishFailed(f"the broker did not take a message for exchange {message.exchange!r}: {text}")
    if to_blame:
        failure.__cause__ = error
        return failure
    return ChannelClosed(error.reply_code, error.text, collateral=True) if may_retry else _lost(error)


def _too_large(size: int, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"expected a message of at most {limit} bytes, found {size}. Send the large tensors by reference, or raise "
        "max_message_size in rabbitmq.conf and the limit here"
    )


def _lost(error: BrokerError) -> BrokerUnavailable:
    """The session ended before the confirm. A new error for each caller: tracebacks must not pile up on one."""
    lost = BrokerUnavailable(str(error))
    lost.__cause__ = error
    return lost
