"""When offline work may run on a worker: in the gaps of online work, and for a small share of the time without gaps.

Pure. A *run* is one batch in one thread. While no online job is in hand every thread may have one; as soon as one is,
what runs is finished and nothing new begins, but for one run at a time within the share.
"""

from __future__ import annotations


class Share:
    """The table of one worker's offline runs. Owner: the worker's event loop."""

    def __init__(self, share: float, threads: int) -> None:
        """``share``: the part of one thread's time that offline runs have while online jobs never cease."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share is between 0 and 1, found {share}")
        self._share = share
        self._threads = threads
        self._running = 0
        self._again_at = 0.0

    @property
    def running(self) -> int:
        """Runs in progress."""
        return self._running

    def began(self) -> None:
        """A run began."""
        self._running += 1

    def ended(self, seconds: float, online: int, now: float) -> None:
        """A run ended that took so long; ``online`` jobs are in hand."""
        self._running -= 1
        if online and self._share:
            self._again_at = now + seconds * (1.0 / self._share - 1.0)

    def next_at(self, online: int, now: float) -> float | None:
        """When the next run may begin, with ``online`` jobs in hand; ``now``: at once. None: not before something
        ends."""
        if self._running >= self._threads:
            return None
        if not online:
            return now
        if self._running or not self._share:
            return None
        return max(now, self._again_at)
