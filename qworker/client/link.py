"""The client's connection: opened, watched, and opened again after it was lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from qworker.broker.base import Connector, OnReply, RpcChannel, Session
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


class Link:
    """One session at a time. ``watch`` is the only writer of its state after ``open``."""

    def __init__(
        self,
        connector: Connector,
        *,
        on_reply: OnReply,
        on_lost: Callable[[BrokerUnavailable], None],
        on_reopened: Callable[[Session], Awaitable[None]],
    ) -> None:
        self._connector = connector
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._on_reopened = on_reopened
        self._open_now: tuple[Session, RpcChannel] | None = None
        self._trouble: BrokerError | None = None
        """Why there is no session now, for whoever waits in vain."""
        self._changed = asyncio.Event()
        """Set by ``watch`` and ``close``; cleared by whoever starts to wait."""
        self._closed = False

    async def open(self) -> None:
        """Connect once. Raises BrokerUnavailable or BrokerRefused."""
        session = await self._connector.connect()
        try:
            rpc = await session.open_rpc(self._on_reply)
        except BaseException:
            await session.__aexit__(None, None, None)
            raise
        self._open_now, self._trouble = (session, rpc), None
        self._changed.set()

    async def close(self) -> None:
        """Close the session and end all waiting. Idempotent."""
        self._closed = True
        self._changed.set()
        opened, self._open_now = self._open_now, None
        if opened is not None:
            await opened[0].__aexit__(None, None, None)

    async def watch(self) -> None:
        """Reopen the session whenever it is lost, with a growing pause. Runs until it is cancelled."""
        while self._open_now is not None:
            session, _ = self._open_now
            reason = await session.wait_closed()
            if self._closed:
                return
            lost = reason or BrokerUnavailable("the connection to the broker was closed")
            self._open_now, self._trouble = None, lost
            self._on_lost(lost)
            _LOG.warning("connection to the broker lost, reopening it: %s", lost)
            await session.__aexit__(None, None, None)
            await self._reopen()

    async def _reopen(self) -> None:
        pause = _FIRST_PAUSE
        while self._open_now is None:
            try:
                await self.open()
            except BrokerUnavailable as exc:
                self._trouble = exc
            except BrokerRefused as exc:
                # A broker that is still starting refuses too, so this goes on; but who waits is told now.
                self._trouble = exc
                self._changed.set()
            if self._open_now is None:
                # Jitter, so that a thousand clients do not return to a restarted broker at one instant.
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, keeps no secret
                pause = min(2 * pause, _LONGEST_PAUSE)
        _LOG.info("connection to the broker reopened")
        await self._on_reopened(self._open_now[0])

    def rpc(self) -> RpcChannel | None:
        """The channel for requests, if the session is open now."""
        opened = self._open_now
        return opened[1] if opened is not None and opened[0].is_open else None

    def session(self) -> Session | None:
        """The session, if it is open now."""
        opened = self._open_now
        return opened[0] if opened is not None and opened[0].is_open else None

    async def ready(self) -> tuple[Session, RpcChannel]:
        """The open session, waiting for it if need be. The caller sets the limit."""
        while True:
            if self._closed:
                raise BrokerUnavailable("the client is closed; use it inside its `async with` block")
            opened = self._open_now
            if opened is not None and opened[0].is_open:
                return opened
            if isinstance(self._trouble, BrokerRefused):
                raise BrokerRefused(str(self._trouble)) from self._trouble
            self._changed.clear()
            await self._changed.wait()

    @property
    def closed(self) -> bool:
        """True once ``close`` was called."""
        return self._closed

    @property
    def trouble(self) -> BrokerError | None:
        """Why nothing can be sent now; None while all is well."""
        if self._open_now is not None and self._open_now[0].blocked:
            return BrokerUnavailable(
                "the broker takes no messages now: a memory or disk alarm; free some there (rabbitmqctl status)"
            )
        return self._trouble
