"""What a run of so many rows takes, learned from runs; and how often jobs come while others are in hand.

Pure. Both are what ``policy.batching`` decides by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN_SECONDS = 1e-3
"""Of a row before anything is known: so long that no other job is made to wait for it."""
LEAST_WEIGHT = 0.1
"""Of a new run against all before it: about the last ten count."""
SPREAD = 0.05
"""Variance of the row counts, over their mean's square, from which on a slope can be told."""
FADING = 1.0
"""Seconds in which what was seen of arrivals loses two thirds of its weight."""
LEAST_WATCHED = 1e-3


class RunCost:
    """Seconds of a run as ``fixed + per_row * rows``."""

    def __init__(self, measured: Sequence[tuple[float, float]] = ()) -> None:
        """``measured``: rows and seconds of runs, from the card; where it has none, the first run tells."""
        self.fixed, self.per_row = _line(measured) if measured else (0.0, UNKNOWN_SECONDS)
        self._weight = 0.5 if measured else 1.0  # of the next run
        self._rows = self._seconds = self._variance = self._covariance = 0.0
        self._seen = False

    def seconds(self, rows: float) -> float:
        """What a run of ``rows`` rows is expected to take."""
        return self.fixed + self.per_row * rows

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a run, by moving means, variance and covariance.

        The slope is told by runs of different sizes. While they are all alike, both terms scale together:
        the ratio that was known is the better guess.
        """
        if not self._seen:
            self._seen, self._rows, self._seconds = True, float(rows), self.seconds(rows)
        off_rows, off_seconds = rows - self._rows, seconds - self._seconds
        weight = self._weight
        self._weight = max(LEAST_WEIGHT, weight / (1.0 + weight))
        self._rows += weight * off_rows
        self._seconds += weight * off_seconds
        self._variance = (1.0 - weight) * (self._variance + weight * off_rows * off_rows)
        self._covariance = (1.0 - weight) * (self._covariance + weight * off_rows * off_seconds)
        if self._variance > SPREAD * self._rows * self._rows:
            self.per_row = min(max(self._covariance / self._variance, 0.0), self._seconds / self._rows)
            self.fixed = max(self._seconds - self.per_row * self._rows, 0.0)
        else:
            scale = self._seconds / self.seconds(self._rows)
            self.fixed *= scale
            self.per_row *= scale


class Arrivals:
    """How many jobs a second come while others are in hand.

    Only those: a caller that waits for its answer before it sends the next job will not send one however
    long we wait, and its jobs always find nothing in hand.
    """

    def __init__(self) -> None:
        self._joined = 0.0
        self._watched = 0.0
        self._at = 0.0

    def passed(self, now: float, *, busy: bool) -> None:
        """Time has gone by; ``busy``: with jobs in hand."""
        gone, self._at = max(0.0, now - self._at), max(now, self._at)
        faded = math.exp(-gone / FADING)
        self._watched = (self._watched + (gone if busy else 0.0)) * faded
        self._joined *= faded

    def joined(self) -> None:
        """A job came while others were in hand."""
        self._joined += 1.0

    def gap(self) -> float:
        """The expected seconds until the next one; infinite when none are known to come."""
        return max(self._watched, LEAST_WATCHED) / self._joined if self._joined > 0.0 else math.inf


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The least-squares line through the points, with neither term below zero."""
    mean_rows = sum(rows for rows, _ in points) / len(points)
    mean_seconds = sum(seconds for _, seconds in points) / len(points)
    spread = sum((rows - mean_rows) ** 2 for rows, _ in points)
    together = sum((rows - mean_rows) * (seconds - mean_seconds) for rows, seconds in points)
    slope = min(max(together / spread, 0.0), mean_seconds / mean_rows) if spread > 0.0 else mean_seconds / mean_rows
    return max(mean_seconds - slope * mean_rows, 0.0), slope
