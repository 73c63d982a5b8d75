"""Feels whether the broker takes publishes, and says so before somebody's result has to wait.

The broker tells of a memory or disk alarm only those connections that publish. So this one publishes a word to nobody
every few seconds: a worker that is idle, or has just started, knows of the alarm too, and takes nothing in hand whose
answer could not leave.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from qworker.broker.base import Properties, Session
from qworker.errors import PublishFailed
from qworker.telemetry.counters import Counters
from qworker.wire.topology import EVENTS, alive
from qworker.worker.hot_zone import Clock

log = structlog.get_logger(__name__)

PULSE_SECONDS = 5.0
LOOK_SECONDS = 0.25
PATIENCE = 1.0
"""A publish that takes longer is not waited for: either we are blocked, and know, or the session's time-out sees it."""


class Pulse:
    """Owned here: since when the present session is blocked, and when it was last known to be alive."""

    def __init__(self, worker: str, counters: Counters, clock: Clock) -> None:
        self._worker = worker
        self._counters = counters
        self._clock = clock
        self._blocked_since: float | None = None
        self._session: Session | None = None
        self._alive_at = self._former_alive_at = clock()

    def alive_at(self, session: Session | None) -> float:
        """When the broker last showed that it holds this session, the present or the former one, to be alive."""
        return self._alive_at if session is self._session else self._former_alive_at

    async def beat(self, session: Session) -> None:
        """Publish one word, which no queue takes. Raises BrokerUnavailable when the session ends."""
        said = self._clock()
        if session is not self._session:
            self._session, self._former_alive_at, self._alive_at = session, self._alive_at, said
        try:
            async with asyncio.timeout(PATIENCE):
                await session.publish(EVENTS, alive(self._worker), b"", Properties())
            self._alive_at = said
        except TimeoutError:
            return
        except PublishFailed as error:  # somebody deleted the exchange: that harms no job
            log.warning("pulse.failed", reason=str(error))

    async def run(self, session: Session) -> None:
        """Beat until the session ends (BrokerUnavailable) or this is cancelled."""
        due = self._clock()
        try:
            while True:
                self._look(session)
                if not session.blocked and self._clock() >= due:
                    await self.beat(session)
                    due = self._clock() + PULSE_SECONDS
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._blocked_since = None

    def state(self, session: Session | None) -> dict[str, Any]:
        """For ``/state``: numbers of the present session."""
        outbox = session.outbox() if session is not None else None
        since = self._blocked_since
        return {
            "connected": session is not None,
            "blocked": session is not None and session.blocked,
            "blocked_seconds": round(self._clock() - since, 3) if since is not None else 0.0,
            "outbox_messages": outbox.messages if outbox is not None else 0,
            "outbox_bytes": outbox.nbytes if outbox is not None else 0,
        }

    def _look(self, session: Session) -> None:
        if session.blocked and self._blocked_since is None:
            self._blocked_since = self._clock()
            self._counters.blocked += 1
            log.warning("broker.blocked", reason="memory or disk alarm: results wait, and no new jobs are taken")
        elif not session.blocked and self._blocked_since is not None:
            log.info("broker.unblocked", seconds=round(self._clock() - self._blocked_since, 3))
            self._blocked_since = None
