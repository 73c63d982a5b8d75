"""When a hot model asks for one more replica, and when a replica leaves again.

Pure. Each holder looks at its own queue. *Backlog seconds* are what the ready jobs take with the consumers that there
are: ``ready * seconds a job / consumers``, where seconds a job are measured here while there is more to do than can be
done. More than ``target`` of them for a while ask for a replica; the ask is repeated, since it may be lost, or come to
a worker that has no room, but not before the one that it may have brought has had time to load.

A replica leaves when the others could carry its share and would still be idle half of the time. So what makes one
leave (idle for half of the time) and what makes one come (a queue that grows) are far apart, and they do not follow
each other around. The one in the highest slot leaves first; the one in slot 0 stays: it leaves as every model does,
by its key.
"""

from __future__ import annotations

from enum import StrEnum

PATIENCE = 2.0
"""Seconds of too much backlog before a replica is asked for; and the least between two asks."""
OTHERS_PATIENCE = 3.0
"""As many times longer, those wait that are not in slot 0: it asks for all, while it is held."""
LOAD_MARGIN = 1.5
"""Factor on the load seconds before the next ask."""
RECEDE = 0.5
"""How busy those that stay may be when one leaves."""
_NEW_WEIGHT = 0.5


class Verdict(StrEnum):
    STAY = "stay"
    ASK = "ask"
    """Ask for one more replica."""
    LEAVE = "leave"


class Pressure:
    """What one holder's looks at its queue come to. Times are seconds on the caller's clock."""

    def __init__(self, slot: int, *, slots: int, target: float, linger: float, load_seconds: float) -> None:
        """``target``: backlog in seconds; ``linger``: how long a replica that is not needed stays."""
        self._slot = slot
        self._slots = slots
        self._target = target
        self._linger = linger * (1.0 + 0.25 * (slots - 1 - slot))
        self._pause = max(PATIENCE, LOAD_MARGIN * load_seconds)
        self._at: float | None = None
        self._done = 0
        self._was_full = False
        self._since = 0.0  # from when on the jobs finish that the next measurement counts
        self._job_seconds: float | None = None
        self._consumers = 0
        self._over_since: float | None = None
        self._idle_since: float | None = None
        self._asked: float | None = None
        self.backlog = 0.0
        """Seconds, as of the last look."""

    def look(self, *, ready: int, consumers: int, done: int, now: float) -> Verdict:
        """``ready``: jobs in the queue; ``consumers``: of all workers; ``done``: jobs that this one ever finished."""
        share = self._measure(ready > 0, done, now)
        self.backlog = ready * (self._job_seconds or 0.0) / max(1, consumers)
        if consumers != self._consumers:  # the new one needs a moment to show what it can do
            self._over_since = None
        self._at, self._done, self._was_full, self._consumers = now, done, ready > 0, consumers
        if self._is_short_of_hands(consumers, now):
            self._asked = now
            return Verdict.ASK
        return Verdict.LEAVE if self._is_spare(ready, consumers, share, now) else Verdict.STAY

    def _measure(self, full: bool, done: int, now: float) -> float:
        """Learn how long a job takes, where there was work throughout; the share of the time that was needed."""
        if self._at is None or now <= self._at:
            self._since = now
            return 1.0
        passed = now - self._at
        finished = done - self._done
        if not (full and self._was_full):
            self._since = now
            return min(1.0, finished * (self._job_seconds or 0.0) / passed)
        seconds, known = (now - self._since) / max(1, finished), self._job_seconds
        if not finished:  # a job takes longer than the time between two looks
            self._job_seconds = max(seconds, known or 0.0)
            return 1.0
        self._since = now
        self._job_seconds = seconds if known is None else known + _NEW_WEIGHT * (seconds - known)
        return 1.0

    def _is_short_of_hands(self, consumers: int, now: float) -> bool:
        if self.backlog <= self._target or consumers >= self._slots:
            self._over_since = None
            return False
        if self._over_since is None:
            self._over_since = now
        patience = PATIENCE * (OTHERS_PATIENCE if self._slot else 1.0)
        return now >= self._over_since + patience and (self._asked is None or now >= self._asked + self._pause)

    def _is_spare(self, ready: int, consumers: int, share: float, now: float) -> bool:
        spare = self._slot > 0 and consumers > 1 and not ready and share * consumers <= RECEDE * (consumers - 1)
        if not spare:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        return now >= self._idle_since + self._linger
