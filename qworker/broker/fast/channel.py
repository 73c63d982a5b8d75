"""One channel of a link: its RPCs, and who gets its messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from pamqp.base import Frame
from pamqp.commands import Basic, Channel

from qworker.broker.fast.fields import FrameError
from qworker.broker.fast.frames import Buffer, Confirmed, Delivered, Returned
from qworker.errors import BrokerError, BrokerUnavailable


class ChannelClosed(BrokerError):
    """The broker closed a channel, and why. ``collateral``: because of another call than this one."""

    def __init__(self, reply_code: int, text: str, *, collateral: bool = False) -> None:
        super().__init__(f"the broker closed the channel: {reply_code} {text}")
        self.reply_code = reply_code
        self.text = text
        self.collateral = collateral


class ConnectionClosed(BrokerUnavailable):
    """The broker closed the connection, and why."""

    def __init__(self, where: object, reply_code: int, text: str) -> None:
        super().__init__(f"the broker at {where} closed the connection: {reply_code} {text}")
        self.reply_code = reply_code


def fresh(error: BrokerError) -> BrokerError:
    """The same error for another caller: tracebacks of many must not pile up on one."""
    if isinstance(error, ChannelClosed):
        return ChannelClosed(error.reply_code, error.text, collateral=True)
    again = BrokerUnavailable(str(error))
    again.__cause__ = error
    return again


class Carrier(Protocol):
    """The link, as a channel sees it."""

    def write(self, buffers: list[Buffer], nbytes: int) -> None: ...
    def write_method(self, channel: int, method: Frame) -> None: ...


class LinkChannel:
    """RPCs in order, one waiter each; messages to whoever has set the ``on_...`` hooks.

    A waiter that is cancelled leaves its place in the order: the reply is taken and dropped, and
    neither the channel nor the calls behind it are harmed.
    """

    def __init__(self, link: Carrier, number: int) -> None:
        self.number = number
        self.link = link
        self.opening: asyncio.Future[Frame]
        self.closing = False
        self.error: BrokerError | None = None
        """Why it can be used no more."""
        self.on_delivered: Callable[[Delivered], None] = _unexpected
        self.on_confirmed: Callable[[Confirmed], None] = _unexpected
        self.on_returned: Callable[[Returned], None] = _unexpected
        self.on_cancelled: Callable[[str], None] = _unexpected
        self.on_end: Callable[[BrokerError], None] = _ignore
        """Called once when the broker or the link ends the channel, not when we close it."""
        self._loop = asyncio.get_running_loop()
        self._waiters: deque[tuple[list[str], asyncio.Future[Frame]]] = deque()
        self._close_waiter: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self.error is None

    @property
    def in_flight(self) -> int:
        """RPCs that are not answered yet."""
        return len(self._waiters)

    def rpc(self, method: Frame) -> asyncio.Future[Frame]:
        """Send a method and get its reply. Fails with ChannelClosed or BrokerUnavailable.

        Whoever does not await the reply may drop the future.
        """
        reply: asyncio.Future[Frame] = self._loop.create_future()
        reply.add_done_callback(_seen)
        if self.error is not None:
            reply.set_exception(fresh(self.error))
            return reply
        self.link.write_method(self.number, method)
        self._waiters.append((method.valid_responses, reply))
        return reply

    def send(self, buffers: list[Buffer], nbytes: int) -> None:
        self.link.write(buffers, nbytes)

    def on_method(self, method: Frame) -> None:
        if isinstance(method, Basic.Cancel):
            self.on_cancelled(method.consumer_tag or "")
            return
        if not self._waiters or method.name not in self._waiters[0][0]:
            expected = " or ".join(self._waiters[0][0]) if self._waiters else "no method"
            raise FrameError(f"expected {expected} on channel {self.number}, found {method.name}")
        _, reply = self._waiters.popleft()
        if not reply.done():
            reply.set_result(method)

    def end(self, error: BrokerError) -> None:
        """The channel is gone: the first call in flight is told the reason, those behind it that it was not theirs."""
        if self._close_waiter is not None and not self._close_waiter.done():
            self._close_waiter.set_result(None)
        if self.error is None:
            self._fail_waiters(error)
            self.on_end(error)

    def close(self) -> asyncio.Future[None]:
        """Close it; resolves when the broker has. Idempotent. What still comes on it is dropped."""
        if self._close_waiter is None:
            self._close_waiter = self._loop.create_future()
            if self.error is None:
                self.closing = True
                self.link.write_method(
                    self.number, Channel.Close(reply_code=200, reply_text="done", class_id=0, method_id=0)
                )
                self._fail_waiters(BrokerUnavailable("the channel was closed"))
            else:
                self._close_waiter.set_result(None)
        return self._close_waiter

    def closed(self) -> None:
        if self._close_waiter is not None and not self._close_waiter.done():
            self._close_waiter.set_result(None)

    def _fail_waiters(self, error: BrokerError) -> None:
        self.error = error
        waiters, self._waiters = self._waiters, deque()
        for place, (_, reply) in enumerate(waiters):
            if not reply.done():
                reply.set_exception(error if place == 0 else fresh(error))


def _seen(reply: asyncio.Future[Frame]) -> None:
    """Marks a failure as looked at: pipelined calls await only what they need."""
    if not reply.cancelled():
        reply.exception()


def _unexpected(event: object) -> None:
    raise FrameError(f"expected no such frame on this channel, found {event!r}")


def _ignore(error: BrokerError) -> None:  # noqa: ARG001
    return
