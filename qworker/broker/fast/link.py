"""One AMQP connection on asyncio: handshake, heartbeats, channels, back-pressure. No tasks of its own.

Everything happens in callbacks of the event loop: events are handed to the channel they are for while
the socket is read, and what was written in one turn of the loop leaves in one ``writelines``. When
anything breaks, the link ends once, with one reason, and every waiter and channel is told.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from pamqp.base import Frame
from pamqp.commands import Channel, Connection

from qworker.broker.fast.channel import ChannelClosed, ConnectionClosed, LinkChannel
from qworker.broker.fast.fields import FrameError
from qworker.broker.fast.frames import (
    HEARTBEAT,
    PROTOCOL_HEADER,
    Called,
    Confirmed,
    Delivered,
    Event,
    FrameReader,
    write_method,
)
from qworker.broker.fast.outbox import Outbox
from qworker.broker.fast.pulse import Pulse
from qworker.broker.fast.url import Address, Limits, negotiate, refusal, start_ok, tls_refusal
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable

_TICKS_PER_HEARTBEAT = 4
_MAX_TICK_S = 1.0
_CLOSE_TIMEOUT_S = 3.0


async def open_link(
    address: Address,
    *,
    name: str,
    heartbeat: int,
    connect_timeout: float,
    tls: ssl.SSLContext | None = None,
    max_tick: float = _MAX_TICK_S,
) -> Link:
    """Connect and shake hands. Raises BrokerUnavailable or BrokerRefused, as ``Connector.connect`` says."""
    link = Link(address, name=name, heartbeat=heartbeat, max_tick=max_tick)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(connect_timeout):
            await loop.create_connection(
                lambda: link,
                address.host,
                address.port,
                ssl=tls,
                server_hostname=address.host if tls else None,
            )
            await link.wait_open()
    except TimeoutError as exc:
        link.end(BrokerUnavailable("the handshake took too long"))
        raise BrokerUnavailable(f"expected {address} to answer within {connect_timeout:g} s, found no answer") from exc
    except ssl.SSLError as exc:
        raise tls_refusal(address, exc) from exc
    except OSError as exc:
        raise BrokerUnavailable(f"expected a broker at {address}, found: {exc}. Is it running?") from exc
    except asyncio.CancelledError:
        link.end(BrokerUnavailable("connecting was given up"))
        raise
    return link


class Link(asyncio.BufferedProtocol):
    """A connection from handshake to end. Opened by ``open_link``."""

    def __init__(self, address: Address, *, name: str, heartbeat: int, max_tick: float = _MAX_TICK_S) -> None:
        self.address = address
        self.limits = Limits(channel_max=0, frame_max=0, heartbeat=heartbeat)
        self.blocked: str | None = None
        """Why the broker refuses publishes, while it does."""
        self.on_tick: Callable[[], None] = _nothing
        """Called about once a second, or more often: for time-outs."""
        self.on_unblocked: Callable[[], None] = _nothing
        self._name = name
        self._max_tick = max_tick
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[BrokerError | None] = self._loop.create_future()
        self._closing = False
        self._channels: dict[int, LinkChannel] = {}
        self._free_ids: list[int] = []
        self._next_id = 1
        self._outbox = Outbox()
        self.write = self._outbox.write
        self.before_flush = self._outbox.before_flush
        self._write_paused = False
        self._read_paused = False
        self._writable: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pulse = Pulse(0, max_tick)  # no heartbeats before they are negotiated
        self._heard = True

    # --- life ---

    async def wait_open(self) -> None:
        await self._opened

    async def wait_ended(self) -> BrokerError | None:
        """Why the link ended; None when we closed it."""
        return await asyncio.shield(self._ended)

    @property
    def is_open(self) -> bool:
        return not self._ended.done() and not self._closing

    def when_ended(self, told: Callable[[BrokerError | None], None]) -> None:
        self._ended.add_done_callback(lambda ended: told(ended.result()))

    async def close(self) -> None:
        """Say goodbye and end; what was written before still leaves. Bounded in time; idempotent."""
        if self.is_open:
            self._outbox.flush()  # acks that are still to be said
            self._closing = True
            self.write_method(0, Connection.Close(reply_code=200, reply_text="done", class_id=0, method_id=0))
            self._outbox.flush()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.wait_ended()
        except TimeoutError:
            pass  # a broker that does not answer a goodbye loses us all the same
        finally:
            self.end(None)

    def end(self, reason: BrokerError | None, *, politely: Connection.Close | None = None) -> None:
        """End now, for this reason; the first reason stays."""
        if self._ended.done():
            return
        self._ended.set_result(reason)
        error = reason or BrokerUnavailable("the connection was closed")
        if self._timer is not None:
            self._timer.cancel()
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # marks it as seen: open_link may have given up already
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        for channel in tuple(self._channels.values()):
            channel.end(error)
        self._channels.clear()
        self._outbox.detach()
        if self._transport is not None:
            if politely is None:
                self._transport.abort()
            else:
                self._transport.write(write_method(0, politely))
                self._transport.close()

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._ended.done():
            self._transport.abort()
            return
        self._outbox.transport = self._transport
        self._transport.write(PROTOCOL_HEADER)
        self._timer = self._loop.call_later(self._pulse.tick_s, self._tick)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the reader knows better
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        if self._ended.done():
            return
        try:
            for event in self._reader.received(nbytes):
                self._dispatch(event)
                if self._ended.done():
                    return
            if self._reader.broken is not None:
                raise self._reader.broken
        except FrameError as exc:
            self.end(exc, politely=Connection.Close(reply_code=501, reply_text=str(exc)[:200], class_id=0, method_id=0))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing and exc is None:
            self.end(None)
            return
        reason = BrokerUnavailable(f"the connection to {self.address} was lost: {exc or 'the broker closed it'}")
        reason.__cause__ = exc
        self.end(reason)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # --- writing ---

    @property
    def write_paused(self) -> bool:
        """True while the broker takes bytes slower than we write them."""
        return self._write_paused

    async def wait_writable(self) -> None:
        """Wait until the broker takes publishes again, or the link has ended."""
        while (self._write_paused or self.blocked is not None) and not self._ended.done():
            if self._writable is None or self._writable.done():
                self._writable = self._loop.create_future()
            await asyncio.shield(self._writable)

    def write_method(self, channel: int, method: Frame) -> None:
        raw = write_method(channel, method)
        self.write([raw], len(raw))

    # --- reading ---

    @property
    def read_paused(self) -> bool:
        return self._read_paused

    def pause_reading(self) -> None:
        """Take nothing more from the socket until ``resume_reading``."""
        if not self._read_paused and self._transport is not None and not self._ended.done():
            self._read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._read_paused and self._transport is not None and not self._ended.done():
            self._read_paused = False
            self._heard = True
            self._transport.resume_reading()

    def _dispatch(self, event: Event) -> None:
        channel = self._channels.get(event.channel)
        if channel is None:
            if event.channel != 0 or not isinstance(event, Called):
                raise FrameError(f"expected a frame on an open channel, found one on channel {event.channel}")
            self._on_connection_method(event.method)
        elif channel.closing:
            if isinstance(event, Called):
                self._on_method_while_closing(channel, event.method)
        elif isinstance(event, Delivered):
            channel.on_delivered(event)
        elif isinstance(event, Confirmed):
            channel.on_confirmed(event)
        elif isinstance(event, Called):
            self._on_channel_method(channel, event.method)
        else:
            channel.on_returned(event)

    def _on_connection_method(self, method: Frame) -> None:
        match method:
            case Connection.Start():
                self._refuse_unless_handshake(method)
                self._answer(lambda: start_ok(method, self.address, self._name))
            case Connection.Tune():
                self._refuse_unless_handshake(method)
                self._answer(lambda: self._tuned(method))
                self.write_method(0, Connection.Open(virtual_host=self.address.vhost))
            case Connection.OpenOk():
                self._refuse_unless_handshake(method)
                self._opened.set_result(None)
            case Connection.Close():
                self._on_close(method)
            case Connection.CloseOk():
                self.end(None)
            case Connection.Blocked():
                self.blocked = method.reason or "alarm"
            case Connection.Unblocked():
                self.blocked = None
                self.on_unblocked()
                self.resume_writing()
            case _:
                raise FrameError(f"expected a connection method that a client gets, found {method.name}")

    def _refuse_unless_handshake(self, method: Frame) -> None:
        if self._opened.done():
            raise FrameError(f"expected no second handshake, found {method.name}")

    def _answer(self, answer: Callable[[], Frame]) -> None:
        try:
            self.write_method(0, answer())
        except BrokerRefused as exc:
            self.end(exc)

    def _tuned(self, tune: Connection.Tune) -> Connection.TuneOk:
        self.limits = limits = negotiate(tune, self.limits.heartbeat)
        self._reader.limit_frames(limits.frame_max)
        if limits.heartbeat:
            self._pulse = Pulse(limits.heartbeat, min(self._max_tick, limits.heartbeat / _TICKS_PER_HEARTBEAT))
        return Connection.TuneOk(channel_max=limits.channel_max, frame_max=limits.frame_max, heartbeat=limits.heartbeat)

    def _on_close(self, close: Connection.Close) -> None:
        code, text = close.reply_code or 0, close.reply_text
        if self._transport is not None:
            self._transport.write(write_method(0, Connection.CloseOk()))
        if self._opened.done():
            self.end(ConnectionClosed(self.address, code, text))
        else:
            self.end(refusal(code, text, self.address))

    # --- channels ---

    def open_channel(self) -> LinkChannel:
        """A new channel, usable at once: what is sent on it follows its opening. Raises BrokerUnavailable."""
        if not self.is_open:
            raise BrokerUnavailable(f"expected an open connection to {self.address}, found a closed one")
        if self._free_ids:
            number = self._free_ids.pop()
        elif self._next_id <= self.limits.channel_max:
            number = self._next_id
            self._next_id += 1
        else:
            raise BrokerUnavailable(
                f"expected a free channel on the connection to {self.address}, found all "
                f"{self.limits.channel_max} in use: raise channel_max on the broker or serve fewer queues"
            )
        channel = self._channels[number] = LinkChannel(self, number)
        channel.opening = channel.rpc(Channel.Open())
        return channel

    def _on_channel_method(self, channel: LinkChannel, method: Frame) -> None:
        if isinstance(method, Channel.Close):
            self.write_method(channel.number, Channel.CloseOk())
            self._release(channel)
            channel.end(ChannelClosed(method.reply_code or 0, method.reply_text))
        elif isinstance(method, Channel.Flow):
            self.write_method(channel.number, Channel.FlowOk(active=method.active))
        else:
            channel.on_method(method)

    def _on_method_while_closing(self, channel: LinkChannel, method: Frame) -> None:
        if isinstance(method, Channel.Close):  # both sides closed at once
            self.write_method(channel.number, Channel.CloseOk())
        elif isinstance(method, Channel.CloseOk):
            self._release(channel)
            channel.closed()

    def _release(self, channel: LinkChannel) -> None:
        del self._channels[channel.number]
        self._free_ids.append(channel.number)

    # --- time ---

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._pulse.tick_s, self._tick)
        beat = self._pulse.tick(heard=self._heard or self._read_paused, wrote=self._outbox.wrote)
        self._outbox.wrote = self._heard = False
        if beat == "dead":
            seconds = self.limits.heartbeat
            self.end(
                BrokerUnavailable(
                    f"expected {self.address} to be heard every {seconds} s, found {2 * seconds} s of silence"
                )
            )
            return
        if beat == "send":
            self.write([HEARTBEAT], len(HEARTBEAT))
        self.on_tick()


def _nothing() -> None:
    return
