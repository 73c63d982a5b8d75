"""The fleet's history: each worker writes its minutes to a stream on the broker, and a new one reads them at its start.

A stream is a queue that keeps what was read, for some days. Where the broker has none, workers know what they have seen
themselves, and nothing else is different.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

import structlog

from qworker.broker.base import Delivery, Properties, Session
from qworker.errors import BrokerError, BrokerUnavailable
from qworker.policy.fleet_history import FleetUse, merged
from qworker.policy.history import JOURNAL_HEADER, CorruptHistory, Minute, journal_line, parse_journal
from qworker.wire.topology import EVENTS, HISTORY, HISTORY_NEWS, history_stream
from qworker.worker.hot_zone import HotZone

log = structlog.get_logger(__name__)

REPLAY_SECONDS = 20.0
"""What was not read by then is left out: the latest comes last, and a start must not wait for it."""
PREFETCH = 200
TRIES = 2
"""A broker without streams may end the connection that asks for one: it is not asked for ever."""
CSV = "text/csv"


class FleetHistory:
    """Owned here: whether the broker has streams, as far as is known."""

    def __init__(self, zone: HotZone, wall: Callable[[], float] = time.time) -> None:
        self._zone = zone
        self._wall = wall
        self._tries = TRIES
        self._is_there = False

    async def replay(self, session: Session) -> int:
        """Read what the fleet has written, and rank models by it; how many models that were.

        Raises BrokerUnavailable when the session ends meanwhile.
        """
        if not await self._declare(session):
            return 0
        use = FleetUse()
        try:
            await self._read(session, use)
        except BrokerUnavailable:
            raise
        except BrokerError as error:  # a stream whose broker is still starting, say, has nobody who could send it
            log.warning("history.replay_cut_short", rows=use.rows, reason=str(error))
        usages = use.usages(self._wall())
        self._zone.remember(merged(self._zone.history(), usages))
        log.info("history.replayed", models=len(usages), rows=use.rows)
        return len(usages)

    async def publish(self, session: Session | None, rows: Sequence[Minute]) -> None:
        """Tell the fleet of minutes that are over. What cannot leave now is left out."""
        if not self._is_there or not rows or session is None or session.blocked:
            return
        body = "\n".join([JOURNAL_HEADER, *map(journal_line, rows)]).encode()
        try:
            await session.publish(EVENTS, HISTORY_NEWS, body, Properties(content_type=CSV))
        except BrokerError as error:
            log.info("history.not_sent", rows=len(rows), reason=str(error))

    async def _declare(self, session: Session) -> bool:
        if self._tries == 0:
            return False
        self._tries -= 1
        try:
            await session.declare(*history_stream())
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            self._tries = 0
            log.info("history.no_stream", reason=str(error), advice="each worker knows what it has seen itself")
            return False
        self._tries, self._is_there = TRIES, True
        return True

    async def _read(self, session: Session, use: FleetUse) -> None:
        """From the first minute that the stream holds to a mark that we write now: it has no other end."""
        mark, ended = str(uuid4()), False
        found: asyncio.Queue[Delivery] = asyncio.Queue()
        consumer = await session.consume(HISTORY, found.put_nowait, prefetch=PREFETCH, stream_from="first")
        try:
            await session.publish(
                EVENTS, HISTORY_NEWS, JOURNAL_HEADER.encode(), Properties(message_id=mark, content_type=CSV)
            )
            async with asyncio.timeout(REPLAY_SECONDS):
                while not ended:
                    delivery = await found.get()
                    ended = delivery.properties.message_id == mark
                    _take(delivery, use)
                    await delivery.ack()
        except TimeoutError:
            log.warning("history.replay_cut_short", rows=use.rows, reason=f"not read in {REPLAY_SECONDS:g} s")
        finally:
            await consumer.close()


def _take(delivery: Delivery, use: FleetUse) -> None:
    try:
        journal = parse_journal(delivery.body.decode().split("\n"))
    except (CorruptHistory, UnicodeDecodeError):
        return  # of a newer release, or no worker's
    for row in journal.rows:
        use.add(row)
