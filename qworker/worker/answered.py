"""Which jobs were answered lately, so that one that is delivered again is not run again.

A job comes again after its answer when the ack did not reach the broker: the connection was lost in between. So
each answer is put into a ring, which is all that it costs. When a session is lost, the worker remembers what is in
the ring and, as soon as it is connected again, tells the other workers: one of them may have the job by then. Who
gets a redelivery therefore waits a moment for such news.

What remains: a worker that dies between the broker's confirm of an answer and its ack can tell nobody, and then
the job runs again and is answered twice, under the same id; and so does one whose confirm was lost.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from hashlib import blake2b

from qworker.broker.base import Properties
from qworker.wire.topology import PUBLISHED_HEADER
from qworker.worker.hot_zone import Clock, wait_at_most

RING = 16_384
TOLD = 2_048
"""Of the ring: what the broker has not seen an ack of is among the last ones."""
KEPT_SECONDS = 600.0
MOST_KEPT = 100_000
HEARSAY_SECONDS = 0.5
"""How long a redelivery waits for news of it. Who lost its connection and lives is back sooner."""
DIGEST_BYTES = 16

_Key = tuple[str, str, str | None, str | None, object]


class Answered:
    """One a worker. Owned here, on the event loop: the ring, and the digests of what may come again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ring: deque[_Key] = deque(maxlen=RING)
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._news = asyncio.Event()

    def add(self, model: str, asked: Properties) -> None:
        """A job with the envelope ``asked`` was answered: the broker has confirmed it."""
        if asked.message_id:
            self._ring.append(_key(model, asked.message_id, asked))

    def session_lost(self) -> bytes:
        """What was answered on it may come again. The news for the other workers; empty when there are none."""
        digests = [_digest(key) for key in self._ring]
        self._ring.clear()
        self._keep(digests)
        return b"".join(digests[-TOLD:])

    def hear(self, news: bytes) -> None:
        """Another worker has lost its session, and had answered these."""
        self._keep([news[at : at + DIGEST_BYTES] for at in range(0, len(news), DIGEST_BYTES)])
        heard, self._news = self._news, asyncio.Event()
        heard.set()

    def knows(self, model: str, asked: Properties) -> bool:
        """Whether the job is known to be answered; False for one without an id."""
        if not asked.message_id:
            return False
        until = self._known.get(_digest(_key(model, asked.message_id, asked)))
        return until is not None and until >= self._clock()

    async def hears_of(self, model: str, asked: Properties, *, since: float) -> bool:
        """``knows``, after the time in which the news may still come to a job that came ``since``."""
        until = since + HEARSAY_SECONDS
        while not self.knows(model, asked):
            left = until - self._clock()
            if left <= 0.0 or not asked.message_id:
                return False
            await wait_at_most(self._news, left)
        return True

    def _keep(self, digests: list[bytes]) -> None:
        now = self._clock()
        for digest in digests:
            self._known[digest] = now + KEPT_SECONDS
            self._known.move_to_end(digest)
        while self._known and (len(self._known) > MOST_KEPT or next(iter(self._known.values())) < now):
            self._known.popitem(last=False)


def _key(model: str, job_id: str, asked: Properties) -> _Key:
    """More than the id: who numbers jobs from one again is not to lose any."""
    published = asked.headers.get(PUBLISHED_HEADER)
    return model, job_id, asked.correlation_id, asked.reply_to, published or asked.timestamp_ms


def _digest(key: _Key) -> bytes:
    return blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
