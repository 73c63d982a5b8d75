"""Counts that only grow, kept by the worker and shown by ``/state``."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Owner: the event loop. Everything here is since the start of the process."""

    loads: int = 0
    load_failures: int = 0
    evictions: int = 0
    revivals: int = 0
    hints: int = 0
    hints_stale: int = 0
    wakes: int = 0
    jobs_answered: int = 0
    jobs_failed: int = 0
    jobs_dead_lettered: int = 0
    jobs_given_back: int = 0
    runs: int = 0
    """Of engines; less than the jobs where several shared one."""
    jobs_together: int = 0
    """Jobs, or pieces of large ones, that shared a run."""
    batches_split: int = 0
    """Runs that failed as a whole and were done again in halves."""
    reconnects: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
