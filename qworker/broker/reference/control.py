"""Declares, depths and leases: RPCs on control channels, away from the channels that carry messages.

An RPC that the broker refuses closes its channel, and so does one that is cut short. Here that costs
nothing: the channel is thrown away and the next RPC opens another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import aiormq
from aiormq.abc import AbstractChannel

from qworker.broker.base import Depth
from qworker.broker.reference.errors import LIBRARY_ERRORS, declare_error, described, is_phantom, refused
from qworker.broker.reference.life import Life
from qworker.broker.reference.link import Link
from qworker.errors import BrokerError, TopologyMismatch
from qworker.wire.topology import Binding, Exchange, Queue

T = TypeVar("T")

_CONTROL_CHANNELS = 4
_SWEEP_CHANNELS = 8


class Control:
    """The control half of a session. Owned here: which leases we hold."""

    def __init__(self, link: Link, life: Life) -> None:
        self._life = life
        self._channels = _Channels(link, life, _CONTROL_CHANNELS)
        self._sweep_channels = _Channels(link, life, _SWEEP_CHANNELS)
        self._leases: set[str] = set()
        # First come, first served: a lease that follows on an abandoned one finds it released.
        self._lease_order = asyncio.Lock()

    async def declare(self, *entities: Exchange | Queue | Binding) -> None:
        async def declare_all(channel: AbstractChannel) -> None:
            for entity in entities:
                try:
                    await _declare(channel, entity)
                except aiormq.ChannelClosed as error:
                    raise declare_error(error, entity) from None

        await self._life.run(self._channels.run(declare_all))

    async def depth(self, queue: str) -> Depth | None:
        return await self._life.run(_depth(self._channels, queue))

    async def depths(self, queues: Sequence[str]) -> list[Depth | None]:
        found: list[Depth | None] = [None] * len(queues)

        async def look(share: range) -> None:
            for at in share:
                found[at] = await _depth(self._sweep_channels, queues[at])

        async def look_at_all() -> None:
            failed: list[BaseException] = []
            try:
                async with asyncio.TaskGroup() as group:
                    for first in range(min(_SWEEP_CHANNELS, len(queues))):
                        group.create_task(look(range(first, len(queues), _SWEEP_CHANNELS)))
            except* BrokerError as errors:
                failed.extend(errors.exceptions)
            if failed:
                raise failed[0]

        await self._life.run(look_at_all())
        return found

    async def lease(self, queue: str) -> bool:
        held_before = queue in self._leases
        try:
            return await self._life.run(self._take(queue))
        except asyncio.CancelledError:
            # Nobody learned that we have it now: without this it would be ours, unused, until the session ends.
            if not held_before and self._life.is_open:
                self._life.start(self._give_up(queue))
            raise

    async def release(self, queue: str) -> None:
        await self._life.run(self._drop(queue))

    async def delete_queue(self, queue: str) -> None:
        async def delete(channel: AbstractChannel) -> None:
            try:
                await channel.queue_delete(queue)
            except aiormq.ChannelNotFoundEntity:
                return
            except aiormq.ChannelAccessRefused as error:
                raise refused(error, f"delete queue {queue!r}", "configure") from None
            except aiormq.ChannelClosed as error:
                raise BrokerError(f"cannot delete queue {queue!r}: {described(error)}") from None

        await self._life.run(self._channels.run(delete))

    # --- leases, one at a time ---

    async def _take(self, queue: str) -> bool:
        async def declare(channel: AbstractChannel) -> bool:
            try:
                await channel.queue_declare(queue, exclusive=True, arguments={"x-queue-type": "classic"})
            except aiormq.ChannelLockedResource:
                return False
            except aiormq.ChannelAccessRefused as error:
                raise refused(error, f"take the lease {queue!r}", "configure") from None
            except aiormq.ChannelClosed as error:
                raise TopologyMismatch(
                    f"expected {queue!r} to be free or an exclusive queue, found something else: {described(error)}. "
                    "Delete it on the broker"
                ) from None
            return True

        async with self._lease_order:
            if queue in self._leases:
                return True
            taken = await self._channels.run(declare)
            if taken:
                self._leases.add(queue)
            return taken

    async def _drop(self, queue: str) -> None:
        async def delete(channel: AbstractChannel) -> None:
            await channel.queue_delete(queue)

        async with self._lease_order:
            if queue in self._leases:
                self._leases.discard(queue)
                await self._channels.run(delete)

    async def _give_up(self, queue: str) -> None:
        with suppress(BrokerError):  # the session ended: so did the lease
            await self._drop(queue)


class _Channels:
    """A few channels, opened when needed, each for one RPC at a time."""

    def __init__(self, link: Link, life: Life, size: int) -> None:
        self._link = link
        self._life = life
        self._slots = asyncio.Semaphore(size)
        self._free: list[AbstractChannel] = []

    async def run(self, rpc: Callable[[AbstractChannel], Awaitable[T]]) -> T:
        """Run ``rpc`` on a channel of its own. Raises what it raises of ours, else BrokerUnavailable."""
        async with self._slots:
            self._life.raise_if_ended()
            channel = self._pop() or await self._link.channel(confirms=False)
            try:
                return await rpc(channel)
            except asyncio.CancelledError as cancelled:
                if is_phantom(cancelled):
                    raise await self._life.ended_soon() from None
                await _throw_away(channel)
                raise
            except LIBRARY_ERRORS as error:
                await _throw_away(channel)
                if isinstance(error, aiormq.ChannelClosed):
                    raise BrokerError(f"the broker closed a control channel: {described(error)}") from error
                raise await self._life.ended_soon() from error
            except Exception as error:
                if type(error) is not Exception:
                    raise
                # aiormq cuts short what is under way when its connection closes, with an error of no kind.
                raise await self._life.ended_soon() from error
            finally:
                # A refusal that ``rpc`` has understood has closed the channel as well.
                if not channel.is_closed:
                    self._free.append(channel)

    def _pop(self) -> AbstractChannel | None:
        while self._free:
            channel = self._free.pop()
            if not channel.is_closed:
                return channel
        return None


async def _throw_away(channel: AbstractChannel) -> None:
    with suppress(*LIBRARY_ERRORS):
        await channel.close(aiormq.ChannelInvalidStateError("thrown away"))


async def _declare(channel: AbstractChannel, entity: Exchange | Queue | Binding) -> None:
    match entity:
        case Exchange():
            await channel.exchange_declare(
                entity.name,
                exchange_type=entity.type,
                durable=entity.durable,
                auto_delete=entity.auto_delete,
                internal=entity.internal,
                arguments=_arguments(entity),
            )
        case Queue():
            await channel.queue_declare(
                entity.name,
                durable=entity.durable,
                exclusive=entity.exclusive,
                auto_delete=entity.auto_delete,
                arguments=_arguments(entity),
            )
        case Binding(to_exchange=True):
            await channel.exchange_bind(
                entity.destination, entity.source, entity.routing_key, arguments=_arguments(entity)
            )
        case Binding():
            await channel.queue_bind(
                entity.destination, entity.source, entity.routing_key, arguments=_arguments(entity)
            )


def _arguments(entity: Exchange | Queue | Binding) -> dict[str, Any]:
    return dict(entity.arguments)


async def _depth(channels: _Channels, queue: str) -> Depth | None:
    async def look(channel: AbstractChannel) -> Depth | None:
        try:
            found = await channel.queue_declare(queue, passive=True)
        except aiormq.ChannelNotFoundEntity:
            return None
        except aiormq.ChannelLockedResource:
            return Depth(0, 0)
        except aiormq.ChannelAccessRefused as error:
            raise refused(error, f"look at queue {queue!r}", "configure, write or read") from None
        return Depth(found.message_count or 0, found.consumer_count or 0)

    return await channels.run(look)
