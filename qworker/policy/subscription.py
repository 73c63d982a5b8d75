"""Whether a model's consumers still do their work, and how much they may have in hand. Pure.

The broker may forget a consumer without telling us, or go on counting one that it sends nothing any more. One look
proves nothing: a count lags for a moment, and a job that was just enqueued is *ready* until it is sent.
"""

from __future__ import annotations

import math

DOUBTS = 2
"""Looks in a row that must find the same fault before anything is done about it."""
SHARE_OF_ACK_TIMEOUT = 0.5
"""Of the broker's consumer timeout: what comes before its turn waits in our hands, and runs vary."""


class Doubt:
    """What several looks at one lane's queue say of our consumer there."""

    def __init__(self) -> None:
        self._uncounted = 0
        self._idle = 0
        self._done = 0

    def look(self, *, ready: int, consumers: int, in_hand: int, done: int) -> str | None:
        """Why the consumer is to be made anew, or None.

        ``in_hand``: jobs of the model that are not settled; ``done``: those that were, ever.
        """
        self._uncounted = self._uncounted + 1 if consumers == 0 else 0
        self._idle = self._idle + 1 if ready and not in_hand and done == self._done else 0
        self._done = done
        if self._uncounted >= DOUBTS:
            return "the broker counts no consumer"
        if self._idle >= DOUBTS:
            return "jobs are ready, and the broker sends none"
        return None


def fitting_prefetch(wanted: int, job_seconds: float | None, lanes: int, ack_timeout: float) -> int:
    """Deliveries in hand of which even the last is settled well within the broker's ``ack_timeout`` seconds.

    ``job_seconds``: what one job's run takes, where that is known; ``lanes`` of them run at once.
    """
    if not job_seconds:
        return wanted
    return max(1, min(wanted, math.floor(ack_timeout * SHARE_OF_ACK_TIMEOUT / job_seconds * lanes)))


def outlasts(job_seconds: float | None, ack_timeout: float) -> bool:
    """True when even a job by itself is likely to be held for longer than the broker allows."""
    return job_seconds is not None and job_seconds > ack_timeout * SHARE_OF_ACK_TIMEOUT
