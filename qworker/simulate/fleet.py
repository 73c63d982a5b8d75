"""What is simulated: the workers, and what came of a replay."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from qworker.policy.thrash import Thrash


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal workers, with the settings that a worker has. Times are seconds, sizes bytes."""

    budget: int
    """Of each worker."""
    workers: int = 1
    placement: Literal["ready", "random"] = "ready"
    """Who takes up a cold model, of those with a free slot: the one that is readiest, or the next one in turn."""
    load_slots: int = 2
    """Loads at once on each worker: the semaphore."""
    min_residency: float = 5.0
    max_cold_wait: float = 30.0
    claim_timeout: float = 120.0
    retry_seconds: float = 3.0
    """Until the sweep wakes a model whose claim found no room."""
    claim_seconds: float = 0.0
    """From a hint to the wish for bytes."""
    unload_seconds: float = 0.0
    prefetch: int = 8
    """Jobs in hand per model, where requests take time to run."""
    group_window: float = 0.0
    warm_share: float = 0.8
    """Part of the budget that a start with a history fills."""
    brake: bool = True
    """Whether a thrash detector may hold claims that evict."""


@dataclass(slots=True)
class ModelTotals:
    """What one model took part in."""

    requests: int = 0
    misses: int = 0
    loads: int = 0
    load_seconds: float = 0.0
    evictions: int = 0


@dataclass(slots=True)
class Outcome:
    """What came of a replay. Waits are seconds from a request to its start."""

    policy: str
    fleet: Fleet
    seconds: float = 0.0
    """From the first request of the trace to the last."""
    requests: int = 0
    misses: int = 0
    """Requests that found their model not ready."""
    refused: int = 0
    """Requests for models larger than a worker's budget: answered with an error."""
    late: int = 0
    """Requests done only after the trace's last one came."""
    loads: int = 0
    load_seconds: float = 0.0
    preloads: int = 0
    """Of the loads, those of a warm start."""
    preload_seconds: float = 0.0
    single_use: int = 0
    """Loads that served one request."""
    evictions: int = 0
    evicted_bytes: int = 0
    revivals: int = 0
    timeouts: int = 0
    """Claims that found no room within their time."""
    most_cold: int = 0
    """The most models that waited for a load at one instant."""
    peak: int = 0
    """The most bytes that one worker held."""
    cold_waits: Sequence[float] = field(default_factory=lambda: array("d"))
    """Of the requests that found their model not ready, in no order."""
    queue_waits: Sequence[float] = field(default_factory=lambda: array("d"))
    """Of those that found it ready and busy."""
    load_times: Sequence[float] = field(default_factory=lambda: array("d"))
    """When each load ended."""
    load_costs: Sequence[float] = field(default_factory=lambda: array("d"))
    models: dict[str, ModelTotals] = field(default_factory=dict[str, ModelTotals])
    thrash: list[tuple[float, Thrash]] = field(default_factory=list[tuple[float, Thrash]])
    reasons: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    """When, who and why, of the last evictions."""

    @property
    def wait_p50(self) -> float:
        return self.wait(0.5)

    @property
    def wait_p99(self) -> float:
        return self.wait(0.99)

    def wait(self, share: float) -> float:
        """The wait that ``share`` of all answered requests do not exceed; those that were hot count as 0."""
        waits = sorted([*self.cold_waits, *self.queue_waits])
        rank = share * (self.requests - self.refused - 1)
        at = round(rank) - (self.requests - self.refused - len(waits))
        return waits[at] if waits and at >= 0 else 0.0

    def cold_wait(self, share: float) -> float:
        """The wait that ``share`` of the requests for models that were not ready do not exceed."""
        waits = sorted(self.cold_waits)
        return waits[round(share * (len(waits) - 1))] if waits else 0.0

    @property
    def longest_wait(self) -> float:
        return max(max(self.cold_waits, default=0.0), max(self.queue_waits, default=0.0))

    @property
    def churn(self) -> float:
        """How often an hour the whole budget was turned over."""
        hours = self.seconds / 3_600.0
        return self.evicted_bytes / (self.fleet.budget * self.fleet.workers) / hours if hours > 0.0 else 0.0
