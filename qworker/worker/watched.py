"""Tells what this worker is doing, once a second, while somebody watches: else it costs nothing.

Whoever watches says so by the order ``watch`` every few seconds, and hears the snapshots over the events exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from qworker.broker.base import Properties, Session
from qworker.errors import BrokerError, PublishFailed
from qworker.wire.control import encode_snapshot
from qworker.wire.messages import MSGPACK
from qworker.wire.topology import EVENTS, snapshot_of
from qworker.worker.hot_zone import Clock

log = structlog.get_logger(__name__)

INTERVAL = 1.0
_ENVELOPE = Properties(content_type=MSGPACK)


class Watched:
    """Owned here: until when somebody watches."""

    def __init__(self, worker: str, look: Callable[[], Mapping[str, Any]], clock: Clock) -> None:
        self._key = snapshot_of(worker)
        self._look = look
        self._clock = clock
        self._until = 0.0
        self._wanted = asyncio.Event()

    def watch(self, seconds: float) -> None:
        """Somebody watches for so long."""
        self._until = max(self._until, self._clock() + seconds)
        self._wanted.set()

    async def run(self, session: Session) -> None:
        """Until cancelled, or the session ends (BrokerUnavailable)."""
        while True:
            await self._wanted.wait()
            if self._clock() >= self._until:
                self._wanted.clear()
                continue
            if not session.blocked:
                await self._tell(session)
            await asyncio.sleep(INTERVAL)

    async def _tell(self, session: Session) -> None:
        body = encode_snapshot(self._look())
        if session.send(EVENTS, self._key, body, _ENVELOPE, _told):
            return
        try:
            await session.publish(EVENTS, self._key, body, _ENVELOPE)
        except PublishFailed as error:
            _told(error)


def _told(error: BrokerError | None) -> None:
    """The next one comes in a second."""
    if error is not None:
        log.debug("snapshot.lost", reason=str(error))
