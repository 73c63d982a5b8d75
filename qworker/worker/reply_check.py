"""Whether the queue that a requester named for its answer is still there, asked before expensive work.

A requester that is gone took its queue along, and what would be computed for it is for nobody. Asking is a passive
declare on a channel of its own, since the broker closes the channel for a queue that is missing, and for one that is
another connection's own: so the answer is kept for a while, and jobs that ask at once ask once.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict

import structlog

from qworker.broker.base import Session
from qworker.errors import BrokerError, Unroutable
from qworker.policy.outcome import ReplyTo
from qworker.store.card import Card
from qworker.telemetry.counters import Counters
from qworker.worker.hot_zone import Clock

log = structlog.get_logger(__name__)

COSTLY_SECONDS = 0.02
"""Runs from this on are worth a question. A shorter one is over before it is answered."""
THERE_SECONDS = 10.0
GONE_SECONDS = 1.0
"""Shorter: a requester that comes back declares its queue again."""
MOST_KNOWN = 10_000
_ASKABLE = re.compile(r"[A-Za-z0-9._:@#,/><-]{1,255}")
"""Names that the AMQP libraries let us ask for. Others are a publisher's fancy, and may exist all the same."""


def is_costly(card: Card) -> bool:
    """Whether a job of this model is worth the question; what was not measured is."""
    return not card.run_times or card.run_times[0].seconds >= COSTLY_SECONDS


class ReplyQueues:
    """One a worker. Owned here, on the event loop: what is known of reply queues, until when, and who asks."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._there: OrderedDict[str, float] = OrderedDict()
        self._gone: OrderedDict[str, float] = OrderedDict()
        self._asking: dict[str, asyncio.Future[bool]] = {}

    def doubtful(self, reply_to: str | None) -> bool:
        """Whether it takes a question to know that an answer to ``reply_to`` has somewhere to go."""
        if reply_to is None or self._there.get(reply_to, 0.0) > self._clock():
            return False
        if ReplyTo.of(reply_to) is not ReplyTo.QUEUE:
            return False
        if _ASKABLE.fullmatch(reply_to) is None:
            self._learn(reply_to, there=True)  # the publish will tell
            return False
        return True

    async def missing(self, session: Session, reply_to: str) -> Unroutable | None:
        """The reason not to run a job, when the queue for its answer is gone; None when it is there, or who knows."""
        if self._gone.get(reply_to, 0.0) <= self._clock() and await self._is_there(session, reply_to):
            return None
        self._counters.jobs_unwanted += 1
        return Unroutable(
            "the job was not run: the queue that it names for its answer is gone. Declare the reply queue before the "
            "job is published, keep it until the answer has come, and put the job back with `qworker dead requeue`"
        )

    async def _is_there(self, session: Session, name: str) -> bool:
        asked = self._asking.get(name)
        if asked is not None:
            return await asyncio.shield(asked)
        asked = self._asking[name] = asyncio.get_running_loop().create_future()
        there = True
        try:
            (depth,) = await session.depths([name])
            there = depth is not None
            self._learn(name, there=there)
        except BrokerError as error:  # no permission to look, say: then the publish will tell
            log.debug("reply_queue.unknown", reason=str(error))
            self._learn(name, there=True)
        finally:
            del self._asking[name]
            asked.set_result(there)
        return there

    def _learn(self, name: str, *, there: bool) -> None:
        known, seconds = (self._there, THERE_SECONDS) if there else (self._gone, GONE_SECONDS)
        known[name] = self._clock() + seconds
        known.move_to_end(name)
        if len(known) > MOST_KNOWN:
            known.popitem(last=False)
