"""Keeps one broker session open for the worker, and hands it to whoever needs it.

A session is never repaired: when it ends, the next one starts empty, and each hot model takes its lease
and its consumers again from the worker's own table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from qworker.broker.base import Connector, Session
from qworker.errors import BrokerUnavailable
from qworker.telemetry.counters import Counters

log = structlog.get_logger(__name__)

FIRST_RETRY = 0.5
LONGEST_RETRY = 10.0


class Sessions:
    """Owned here: ``_current``, the open session or None."""

    def __init__(self, connector: Connector, counters: Counters) -> None:
        self._connector = connector
        self._counters = counters
        self._current: Session | None = None
        self._changed = asyncio.Event()
        self._stopping = False

    @property
    def open(self) -> Session | None:
        """The session if one is open now."""
        return self._current if self._current is not None and self._current.is_open else None

    async def current(self) -> Session | None:
        """The open session, waiting for one if need be; None when the worker stops meanwhile."""
        while self.open is None:
            if self._stopping:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self.open

    def stop(self) -> None:
        """Nobody waits for a session any more."""
        self._stopping = True
        self._changed.set()

    async def run(
        self, prepare: Callable[[Session], Awaitable[None]], attend: Callable[[Session], Awaitable[None]]
    ) -> None:
        """Keep a session open until cancelled.

        Each session is first ``prepare``-d (topology), then handed out, then ``attend``-ed until it ends.
        Raises BrokerRefused and TopologyMismatch: trying again would not help.
        """
        while True:
            async with await self._connect() as session:
                try:
                    await prepare(session)
                    self._current = session
                    self._changed.set()
                    await attend(session)
                except BrokerUnavailable as error:
                    log.warning("broker.lost", reason=str(error))
                finally:
                    self._current = None
            self._counters.reconnects += 1

    async def _connect(self) -> Session:
        retry = FIRST_RETRY
        while True:
            try:
                session = await self._connector.connect()
            except BrokerUnavailable as error:
                log.warning("broker.unavailable", reason=str(error), retry_seconds=retry)
                await asyncio.sleep(retry)
                retry = min(LONGEST_RETRY, retry * 2)
            else:
                log.info("broker.connected")
                return session
