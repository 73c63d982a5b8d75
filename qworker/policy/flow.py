"""How many jobs may be on their way at once: enough that the workers never wait, few enough that nothing piles up.

Pure. After every round (as many answers as the window has jobs) the window looks at how long answers took. What
an answer takes beyond the shortest one of its model, it spent waiting behind others: so many of the jobs on the way
only wait. Some must, or a worker would run dry; when there are fewer the window grows, when there are more it
shrinks (as TCP Vegas does with packets).
"""

from __future__ import annotations

WAITING_LEAST, WAITING_MOST = 4.0, 12.0
"""Jobs that should wait for a worker at any moment."""
LARGE_ENOUGH = 0.9
"""Of a model's largest jobs: smaller ones are quicker, and say nothing of how long those wait."""


class Window:
    """The size of one run's window. Owner: whoever publishes."""

    def __init__(self, *, first: int = 4, most: int = 128, fixed: int | None = None) -> None:
        if first < 1 or most < 1 or (fixed is not None and fixed < 1):
            raise ValueError("a window has room for at least one job")
        self._fixed = fixed
        self._most = fixed or most
        self._size = fixed or min(first, most)
        self._shortest: dict[int, float] = {}
        self._largest: dict[int, int] = {}
        self._answers = 0
        self._waiting = 0.0  # sum over the round's answers: the share of its time that each one waited

    @property
    def size(self) -> int:
        """Jobs that may be on their way."""
        return self._size

    def answered(self, model: int, rows: int, seconds: float) -> None:
        """A job was answered so long after it was published; leave out those that waited for a load."""
        if self._fixed is not None or rows < LARGE_ENOUGH * self._largest.get(model, 0) or seconds <= 0:
            return
        if rows > self._largest.get(model, 0) / LARGE_ENOUGH:
            self._largest[model], self._shortest[model] = rows, seconds
        best = self._shortest[model] = min(self._shortest[model], seconds)
        self._answers += 1
        self._waiting += 1.0 - best / seconds
        if self._answers < self._size:
            return
        waiting = self._waiting / self._answers * self._size
        if waiting < WAITING_LEAST:
            self._size = min(self._most, self._size + max(1, self._size // 2))
        elif waiting > WAITING_MOST:
            self._size = max(1, self._size - max(1, self._size // 8))
        self._answers, self._waiting = 0, 0.0

    def choked(self) -> None:
        """The broker takes no more: an alarm, or the connection was lost."""
        if self._fixed is None:
            self._size = max(1, self._size // 2)
            self._answers, self._waiting = 0, 0.0
