"""How a file's rows become jobs: how many rows a job has, and which model's turn it is.

Pure. A job's way through the broker costs some milliseconds of CPU whatever is in it, so that many rows share
one; but a worker lets go of offline work between jobs, and memory holds whole jobs, so that they stay small.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from qworker.errors import (
    ModelTooLarge,
    ModelUnavailable,
    PoisonJob,
    UnknownModel,
)

JOB_SECONDS = 0.05
"""Of one thread's work: more than ten times what a job costs on its way."""
JOB_BYTES = 1 << 20
MOST_ROWS = 1 << 16


def rows_per_job(
    max_rows: int,
    measured: Sequence[tuple[int, float]],
    row_bytes: int | None,
    *,
    job_seconds: float = JOB_SECONDS,
    job_bytes: int = JOB_BYTES,
) -> int:
    """Rows of one job of a model whose best run has ``max_rows`` rows; whole runs, as long as bytes allow.

    ``measured`` are rows and seconds of runs. A model that was never measured gets one run a job.
    """
    if max_rows < 1:
        raise ValueError(f"expected max_rows >= 1, found {max_rows}")
    runs = max(1, round(job_seconds / max(seconds_of(max_rows, measured), 1e-7))) if measured else 1
    rows = max_rows * max(1, min(runs, MOST_ROWS // max_rows))
    fitting = max(1, job_bytes // max(1, row_bytes or 1))
    if fitting >= rows:
        return rows
    return fitting - fitting % max_rows or fitting


def seconds_of(rows: int, measured: Sequence[tuple[int, float]]) -> float:
    """What a run of ``rows`` rows is expected to take, by the run of the nearest size that was measured."""
    near_rows, near_seconds = min(measured, key=lambda run: (abs(run[0] - rows), run[0]))
    return near_seconds * rows / near_rows


@dataclass(frozen=True, slots=True)
class Group:
    """All rows of one model."""

    model: str
    rows: int
    hot: bool
    """Somebody serves it now."""


def turns(groups: Sequence[Group]) -> list[str]:
    """The models in the order in which their rows are sent: each is loaded about once.

    Hot ones first, before the cold ones take their bytes; then the others as they first appear, each with all
    of its rows. Models without rows have no turn.
    """
    wanted = [group for group in groups if group.rows]
    return [group.model for group in wanted if group.hot] + [group.model for group in wanted if not group.hot]


# --- what becomes of a job that failed ------------------------------------------------------------

SPLIT_WAYS = 4
"""Pieces of a failed job: two would find a bad row in the fewest jobs, but after twice as many round trips."""
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a job is tried again, for what may pass."""
POISON_TRIES = 2
"""A row that was in hand when workers died need not be why: it is tried again as a fresh job."""


class After(StrEnum):
    SPLIT = "split"
    """One of its rows may be bad: send them in smaller jobs."""
    AGAIN = "again"
    REFUSE = "refuse"
    """The row is bad: note it and go on."""
    STOP = "stop"
    """No row of this model will do better."""


def after_failure(code: str, *, retryable: bool, rows: int, tries: int) -> After:
    """What to do about a job of ``rows`` rows that failed with ``code``, after ``tries`` tries of it."""
    if code in (UnknownModel.code, ModelTooLarge.code):
        return After.STOP
    if code == PoisonJob.code and rows == 1 and tries <= POISON_TRIES:
        return After.AGAIN
    if retryable and tries <= len(PAUSES):
        return After.AGAIN
    if code == ModelUnavailable.code:
        return After.STOP
    return After.SPLIT if rows > 1 else After.REFUSE


def pieces(lo: int, hi: int) -> list[tuple[int, int]]:
    """The stretch from ``lo`` to ``hi`` in up to ``SPLIT_WAYS`` even pieces."""
    ways = min(SPLIT_WAYS, hi - lo)
    cuts = [lo + (hi - lo) * way // ways for way in range(ways + 1)]
    return list(itertools.pairwise(cuts))
