"""Counts that only grow, kept by the worker and shown by ``/state``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from qworker.telemetry.measures import Measures


@dataclass(slots=True)
class Counters:
    """Owner: the event loop. Everything here is since the start of the process."""

    loads: int = 0
    load_failures: int = 0
    unloads: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    revivals: int = 0
    replicas_asked: int = 0
    """Hints that asked others to serve a model too."""
    brakes: int = 0
    """Times that models pushed each other out, and claims that evict were held for it."""
    claims_held: int = 0
    preloads: int = 0
    """Loads that no job had asked for."""
    preloads_used: int = 0
    """Of these, the ones that a job came for."""
    preloads_unused: int = 0
    """And those that left before any came."""
    hints: int = 0
    hints_stale: int = 0
    wakes: int = 0
    jobs_answered: int = 0
    jobs_failed: int = 0
    jobs_dead_lettered: int = 0
    jobs_given_back: int = 0
    redeliveries: int = 0
    """Jobs that came here after another delivery of them had no outcome."""
    jobs_tried_alone: int = 0
    """Redelivered ones, which may have ended a worker."""
    jobs_convicted: int = 0
    """Of these, the ones that have done so too often."""
    jobs_unwanted: int = 0
    """Not run, since the queue for their answer was gone."""
    loads_quarantined: int = 0
    """Not begun, since loads of those bytes have ended workers."""
    jobs_repeated: int = 0
    """Redelivered, and known to be answered: not run again."""
    runs: int = 0
    """Of engines; less than the jobs where several shared one."""
    jobs_together: int = 0
    """Jobs, or pieces of large ones, that shared a run."""
    batches_split: int = 0
    """Runs that failed as a whole and were done again in halves."""
    reconnects: int = 0
    blocked: int = 0
    """Times that the broker took no publishes (memory or disk alarm)."""
    consumers_lost: int = 0
    """Consumers that the broker had dropped, and that were made anew."""
    measures: Measures = field(default_factory=Measures)
    """What is more than a count. Here, since whoever measures has the counters at hand."""

    def as_dict(self) -> dict[str, int]:
        """The counts, without the measures."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "measures"}
