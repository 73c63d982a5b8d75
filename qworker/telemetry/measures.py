"""What the worker measures of its jobs and loads: plain numbers, added up where things happen.

Owner: the event loop. A job costs one call here (``ModelMeasures.job``), of less than a microsecond: a histogram is a
list of counts and a bisect, without the locks of the client library. ``metrics`` reads them when it is asked to.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from qworker.errors import QworkerError
from qworker.policy.thrash import REGRET_FACTOR
from qworker.telemetry.chronicle import Chronicle
from qworker.telemetry.trace import Traces

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends of the buckets of what a job waits for."""
LONG_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper ends for loads and for waits of cold jobs."""
ROWS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
SHARES: Final = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
STAGES: Final = ("card", "fetch", "room", "slot", "deserialize", "warm_up")
"""Of a load, in their order. ``fetch`` reads and verifies; ``room`` waits for bytes; ``slot`` for a load slot."""

ETAS: Final = ("load", "job")


class Histogram:
    """Counts by bucket. ``counts`` has one more than ``bounds``, for what is beyond the last."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts, other.sum = self.counts[:], self.sum
        return other

    def add(self, other: Histogram, *, less: Histogram | None = None) -> None:
        """Add what ``other`` has beyond ``less``."""
        before = [0] * len(other.counts) if less is None else less.counts
        self.counts = [mine + new - old for mine, new, old in zip(self.counts, other.counts, before, strict=True)]
        self.sum += other.sum - (0.0 if less is None else less.sum)


class ModelMeasures:
    """One model's jobs: what they waited in the queue, waited for others, and ran."""

    __slots__ = ("cold", "fill", "jobs", "queue", "run", "runs", "traces", "wait")

    def __init__(self, traces: Traces | None = None) -> None:
        self.traces = traces
        self.queue = Histogram()
        self.wait = Histogram()
        self.run = Histogram()
        self.cold = Histogram(LONG_SECONDS)
        self.jobs = 0
        self.runs = 0
        """Of a model that is batched; ``fill`` adds up their rows, as shares of the most that it takes."""
        self.fill = 0.0

    def batch(self, share: float) -> None:
        """One run of a model that is batched, for so large a part of the rows that it takes."""
        self.runs += 1
        self.fill += share

    def job(self, queue: float, wait: float, run: float, *, cold: bool) -> None:
        """One job has run. ``cold``: it was published before its model was hot here."""
        self.jobs += 1
        bucket = bisect_left(SECONDS, queue)  # three times in line: a call each would double the cost
        queued, waited, ran = self.queue, self.wait, self.run
        queued.counts[bucket] += 1
        queued.sum += queue
        waited.counts[bisect_left(SECONDS, wait)] += 1
        waited.sum += wait
        ran.counts[bisect_left(SECONDS, run)] += 1
        ran.sum += run
        if cold:
            self.cold.observe(queue)


@dataclass(slots=True)
class Measures:
    """Everything of one worker."""

    models: dict[str, ModelMeasures] = field(default_factory=dict[str, ModelMeasures])
    publish: Histogram = field(default_factory=Histogram)
    """From an answer's send to its confirm."""
    unconfirmed: int = 0
    """Answers that were sent and are not confirmed yet."""
    rows: Histogram = field(default_factory=lambda: Histogram(ROWS))
    fill: Histogram = field(default_factory=lambda: Histogram(SHARES))
    stages: dict[str, Histogram] = field(default_factory=lambda: {stage: Histogram(LONG_SECONDS) for stage in STAGES})
    loads: Histogram = field(default_factory=lambda: Histogram(LONG_SECONDS))
    """Whole loads that went well, from the card to the warm engine."""
    loading: int = 0
    load_failures: Counter[str] = field(default_factory=Counter[str])
    """By the kind of error, in snake case."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """Jobs answered with a failure, by its wire code."""
    dead_letters: Counter[str] = field(default_factory=Counter[str])
    """By cause."""
    leases: Counter[str] = field(default_factory=Counter[str])
    """Attempts to take one: ``got`` and ``taken``."""
    reloads: int = 0
    """Loads of models that had left within ten times their own load seconds."""
    reload_seconds: float = 0.0
    sweeping: bool = False
    """This worker is the one that sweeps."""
    sweeps: int = 0
    sweep_seconds: float = 0.0
    depths: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    """By model, as of the last sweep here: ready jobs and consumers of each lane."""
    traces: Traces | None = None
    """Of single jobs, where they are wanted. Set before there are any."""
    eta_errors: dict[str, Histogram] = field(default_factory=lambda: {of: Histogram(LONG_SECONDS) for of in ETAS})
    """Seconds between what was estimated and what came: of loads, and of jobs whose callers asked."""
    progress: Counter[str] = field(default_factory=Counter[str])
    """Messages to callers who ask what their jobs wait for, by state."""
    loop_lag: Histogram = field(default_factory=Histogram)
    chronicle: Chronicle = field(default_factory=Chronicle)
    """What happened to models, told to who asks."""
    _left: dict[str, float] = field(default_factory=dict[str, float])

    def of(self, model: str) -> ModelMeasures:
        measured = self.models.get(model)
        if measured is None:
            measured = self.models[model] = ModelMeasures(self.traces)
        return measured

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Measure a stage of a load that goes well."""
        started = time.perf_counter()
        yield
        self.stages[name].observe(time.perf_counter() - started)

    def made(self, marks: Sequence[float]) -> None:
        """An engine was deserialized between the first two of ``marks``, and warmed up until the third."""
        begun, loaded, warm = marks
        self.stages["deserialize"].observe(loaded - begun)
        self.stages["warm_up"].observe(warm - loaded)

    def load_failed(self, error: QworkerError) -> None:
        # By its class: the wire code of most of them is the same.
        self.load_failures[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()] += 1

    def unloaded(self, model: str) -> None:
        self._left[model] = time.monotonic()
        self.chronicle.note("unloaded", model)

    def loaded(self, model: str, seconds: float) -> None:
        """A load ended that took ``seconds``, the last ones to now."""
        self.loads.observe(seconds)
        self.chronicle.note("loaded", model, seconds=seconds)
        left = self._left.pop(model, None)
        if left is not None and time.monotonic() - seconds - left <= REGRET_FACTOR * seconds:
            self.reloads += 1
            self.reload_seconds += seconds
