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
    reconnects: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
