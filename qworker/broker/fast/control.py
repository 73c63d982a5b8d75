"""Declares, counts, leases: calls that the broker may answer by closing the channel."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, cast

from pamqp.base import Frame
from pamqp.commands import Exchange as ExchangeMethods
from pamqp.commands import Queue as QueueMethods
from pamqp.common import FieldTable

from qworker.broker.base import Depth
from qworker.broker.fast.channel import ChannelClosed, LinkChannel
from qworker.broker.fast.link import Link
from qworker.errors import BrokerError, BrokerRefused, TopologyMismatch
from qworker.wire.topology import Binding, Entity, Exchange, Queue

_CHANNELS: Final = 4
_WINDOW: Final = 16 * _CHANNELS
_LEASE_ARGUMENTS: Final[FieldTable] = {"x-queue-type": "classic"}  # a quorum queue cannot be exclusive
_INEQUIVALENT: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']*)' for .*?: received (?:the value )?(?P<ours>.*?) "
    r"but current is (?P<theirs>.*)"
)
_ACCESS_REFUSED, _NOT_FOUND, _RESOURCE_LOCKED, _PRECONDITION_FAILED = 403, 404, 405, 406


class Control:
    """Calls on a few channels of ``link``, safe to cancel and to run at once.

    Calls share channels, and one that fails takes those behind it on its channel with it. All calls here
    may be repeated, so those are sent again on another channel. Owned here: which leases we hold.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._channels: list[LinkChannel] = []
        self._leasing: LinkChannel | None = None
        self._leases: set[str] = set()
        self._taking: Counter[str] = Counter()

    async def declare(self, *entities: Entity) -> None:
        """See ``Session.declare``. All go out at once; a failing one stops those behind it, on the broker."""
        channel = self._channel()
        methods = [_declaration(entity) for entity in entities]
        replies = [channel.rpc(method) for method in methods]
        for entity, method, reply in zip(entities, methods, replies, strict=True):
            try:
                try:
                    await reply
                except ChannelClosed as exc:
                    if not exc.collateral:
                        raise
                    await self._call(method)
            except ChannelClosed as exc:
                raise _declare_error(entity, exc) from exc

    async def depth(self, queue: str) -> Depth | None:
        """See ``Session.depth``."""
        try:
            return _depth(await self._call(_passive(queue)))
        except ChannelClosed as exc:
            return _depth_of_failure(queue, exc)

    async def depths(self, queues: Sequence[str]) -> list[Depth | None]:
        """See ``Session.depths``."""
        found: list[Depth | None] = []
        for at in range(0, len(queues), _WINDOW):
            window = queues[at : at + _WINDOW]
            for queue, reply in [(queue, self._channel().rpc(_passive(queue))) for queue in window]:
                try:
                    found.append(_depth(await reply))
                except ChannelClosed as exc:
                    found.append(await self.depth(queue) if exc.collateral else _depth_of_failure(queue, exc))
        return found

    async def lease(self, queue: str) -> bool:
        """See ``Session.lease``."""
        if queue in self._leases:
            return True
        self._taking[queue] += 1
        try:
            await self._call_in_order(QueueMethods.Declare(queue=queue, exclusive=True, arguments=_LEASE_ARGUMENTS))
        except ChannelClosed as exc:
            if exc.reply_code == _RESOURCE_LOCKED:
                return False
            if exc.reply_code == _ACCESS_REFUSED:
                raise _call_error(f"to let us take the lease {queue!r}", exc) from exc
            raise TopologyMismatch(
                f"expected {queue!r} to be free or an exclusive queue, found something else: {exc.reply_code} "
                f"{exc.text}. Delete it on the broker"
            ) from exc
        except asyncio.CancelledError:
            if self._taking[queue] == 1 and queue not in self._leases and self._link.is_open:
                # Nobody learned that we may have it: without this it would be ours, unused, until the session ends.
                self._lease_channel().rpc(QueueMethods.Delete(queue=queue))
            raise
        finally:
            self._taking[queue] -= 1
            if not self._taking[queue]:
                del self._taking[queue]
        self._leases.add(queue)
        return True

    async def release(self, queue: str) -> None:
        """See ``Session.release``."""
        if queue in self._leases:
            self._leases.discard(queue)
            try:
                await self._call_in_order(QueueMethods.Delete(queue=queue))
            except ChannelClosed as exc:
                if exc.reply_code not in (_NOT_FOUND, _RESOURCE_LOCKED):
                    raise _call_error(f"to delete {queue}", exc) from exc

    async def delete(self, queue: str) -> None:
        """See ``Session.delete_queue``."""
        try:
            await self._call(QueueMethods.Delete(queue=queue))
        except ChannelClosed as exc:
            if exc.reply_code != _NOT_FOUND:
                raise _call_error(f"to delete queue {queue!r}", exc) from exc

    async def _call(self, method: Frame) -> Frame:
        while True:
            try:
                return await self._channel().rpc(method)
            except ChannelClosed as exc:
                if not exc.collateral:
                    raise

    async def _call_in_order(self, method: Frame) -> Frame:
        """Lease calls share one channel: what is given up is given up before it is taken again."""
        while True:
            try:
                return await self._lease_channel().rpc(method)
            except ChannelClosed as exc:
                if not exc.collateral:
                    raise

    def _lease_channel(self) -> LinkChannel:
        if self._leasing is None or not self._leasing.is_open:
            self._leasing = self._link.open_channel()
        return self._leasing

    def _channel(self) -> LinkChannel:
        """The channel with the least to do; another one while there are few."""
        self._channels = channels = [channel for channel in self._channels if channel.is_open]
        least = min(channels, key=lambda channel: channel.in_flight, default=None)
        if least is None or (least.in_flight and len(channels) < _CHANNELS):
            least = self._link.open_channel()
            channels.append(least)
        return least


def _passive(queue: str) -> Frame:
    return QueueMethods.Declare(queue=queue, passive=True)


def _depth(reply: Frame) -> Depth:
    assert isinstance(reply, QueueMethods.DeclareOk)
    return Depth(ready=reply.message_count or 0, consumers=reply.consumer_count or 0)


def _depth_of_failure(queue: str, closed: ChannelClosed) -> Depth | None:
    if closed.reply_code == _RESOURCE_LOCKED:
        return Depth(0, 0)
    if closed.reply_code == _NOT_FOUND:
        # A durable queue whose node is down is "not found" too, but it is there, and nothing in it can be had now.
        return Depth(0, 0) if "is down or inaccessible" in closed.text else None
    raise _call_error(f"to look at queue {queue!r}", closed, "configure, write or read") from closed


def _declaration(entity: Entity) -> Frame:
    match entity:
        case Exchange():
            return ExchangeMethods.Declare(
                exchange=entity.name,
                exchange_type=entity.type,
                durable=entity.durable,
                auto_delete=entity.auto_delete,
                internal=entity.internal,
                arguments=cast("FieldTable", dict(entity.arguments)),
            )
        case Queue():
            return QueueMethods.Declare(
                queue=entity.name,
                durable=entity.durable,
                exclusive=entity.exclusive,
                auto_delete=entity.auto_delete,
                arguments=cast("FieldTable", dict(entity.arguments)),
            )
        case Binding(to_exchange=True):
            return ExchangeMethods.Bind(
                destination=entity.destination,
                source=entity.source,
                routing_key=entity.routing_key,
                arguments=cast("FieldTable", dict(entity.arguments)),
            )
        case Binding():
            return QueueMethods.Bind(
                queue=entity.destination,
                exchange=entity.source,
                routing_key=entity.routing_key,
                arguments=cast("FieldTable", dict(entity.arguments)),
            )


def _declare_error(entity: Entity, closed: ChannelClosed) -> BrokerError:
    text = f"{closed.reply_code} {closed.text}"
    if isinstance(entity, Binding):
        kind = "exchange" if entity.to_exchange else "queue"
        what = f"binding {entity.source!r} -> {kind} {entity.destination!r} by key {entity.routing_key!r}"
    else:
        what = f"{type(entity).__name__.lower()} {entity.name!r}"
    if closed.reply_code == _ACCESS_REFUSED:
        permission = "write and read" if isinstance(entity, Binding) else "configure"
        return _call_error(f"to declare {what}", closed, permission)
    if closed.reply_code == _NOT_FOUND:
        return BrokerError(f"cannot declare {what}: {text}. Declare both of its ends first")
    if closed.reply_code == _RESOURCE_LOCKED:
        return BrokerError(f"cannot declare {what}: another connection holds it exclusively ({text})")
    return _mismatch(what, entity, closed.text)


def _mismatch(what: str, entity: Entity, text: str) -> TopologyMismatch:
    ours: Mapping[str, object] = {} if isinstance(entity, Binding) else _declared(entity)
    match = _INEQUIVALENT.search(text)
    if match is None:
        return TopologyMismatch(f"the broker cannot have {what} with {ours}: {text}")
    argument = match["argument"]
    return TopologyMismatch(
        f"{what} exists with other arguments: the broker has {argument} = {_plain(match['theirs'])}, we declare "
        f"{argument} = {_plain(match['ours'])} (all of ours: {ours}). Delete it on the broker if its messages may "
        "go, or start with the settings it was made with"
    )


def _plain(value: str) -> str:
    return value.removeprefix("the value ").partition(" of type ")[0].strip("'")


def _declared(entity: Exchange | Queue) -> Mapping[str, object]:
    names = ("type", "durable", "exclusive", "auto_delete", "internal")
    flags = {name: getattr(entity, name) for name in names if hasattr(entity, name)}
    return {**flags, **entity.arguments}


def _call_error(what: str, closed: ChannelClosed, permission: str = "configure") -> BrokerError:
    found = f"{closed.reply_code} {closed.text}"
    if closed.reply_code == _ACCESS_REFUSED:
        return BrokerRefused(
            f"the broker refused {what}: {found}. Give the user the {permission} permission "
            "(rabbitmqctl set_permissions)"
        )
    return BrokerError(f"expected the broker {what}, found: {found}")
