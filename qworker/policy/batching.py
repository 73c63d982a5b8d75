"""Which jobs run together, and when.

Pure: the table takes events with ``now`` and returns frozen decisions; ``worker/batcher`` carries them out.

Words. A *bucket* holds waiting jobs that may share a run: same shapes, outputs and parameters. A *piece* is
a stretch of one job's rows: all of them, unless the job is larger than a batch may be. A *batch* is the
pieces of one run. A *trip* is what one thread does before it reports: one batch, or several short ones, for
a hop to a thread and back costs as much as running a tiny model.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from qworker.policy.run_cost import Arrivals, RunCost

PATIENCE = 3.0
"""Expected gaps of silence after which a wait is given up: whoever was coming has come."""
MAX_BUCKETS = 64
"""Buckets whose cost is remembered; models that see a new shape with each job must not grow the table."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits of one model."""

    max_rows: int = 1
    """Rows of one run; at 1 every job runs by itself, whole."""
    max_delay: float = 0.002
    """Seconds that a job may wait for company."""
    lanes: int = 1
    """Trips at once."""
    trip_seconds: float = 0.001
    """Batches travel together as long as they are expected to take no longer than this."""
    measured: tuple[tuple[float, float], ...] = ()
    """Rows and seconds of runs, from the card."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``rows`` rows of a job, from row ``first`` on."""

    job: int
    first: int
    rows: int


Batch = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Trip:
    """Start this now, and report with ``arrived``."""

    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again at ``until``, or whenever something happens before."""

    until: float


@dataclass(slots=True)
class _Waiting:
    """A job, or what is left of it. ``number`` counts arrivals."""

    number: int
    since: float
    first: int
    rows: int


@dataclass(slots=True)
class _Bucket:
    cost: RunCost
    apart: bool
    """Each of its jobs runs by itself, whole."""
    jobs: OrderedDict[int, _Waiting] = field(default_factory=OrderedDict[int, _Waiting])
    rows: int = 0

    def head(self) -> _Waiting:
        return next(iter(self.jobs.values()))

    def seconds(self, max_rows: int) -> float:
        """What all of its jobs are expected to take."""
        runs = len(self.jobs) if self.apart else -(-self.rows // max_rows)
        return runs * self.cost.fixed + self.rows * self.cost.per_row


class Batching:
    """The jobs of one model that wait for a run. Owner: the model's batcher, on the event loop."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()  # last used last
        self._filled: dict[Hashable, _Bucket] = {}  # those with jobs in them
        self._key_of: dict[int, Hashable] = {}  # of waiting jobs
        self._running = 0
        self._ends: deque[float] = deque()  # when the trips under way are expected to be over
        self._numbers = 0
        self._arrivals = Arrivals()
        self._last = 0.0  # when the last job came
        self._unknown = _Bucket(RunCost(rules.measured), rules.max_rows == 1)  # what is known of a new bucket

    @property
    def waiting(self) -> int:
        """Jobs of which something waits."""
        return len(self._key_of)

    def waits(self, job: int) -> bool:
        """Whether something of ``job`` waits."""
        return job in self._key_of

    def expected(self, key: Hashable, rows: int, now: float) -> tuple[float, float]:
        """Seconds until a job that came now would begin, and those of its own run, by what runs have taken."""
        most = self._rules.max_rows
        ahead = sum(end - now for end in self._ends if end > now)
        for bucket in self._filled.values():
            ahead += bucket.seconds(most)
        cost = (self._buckets.get(key) or self._unknown).cost
        return ahead / self._rules.lanes, -(-rows // most) * cost.fixed + rows * cost.per_row

    # --- events ----------------------------------------------------------------------------------

    def add(self, job: int, key: Hashable, rows: int, now: float, *, alone: bool = False) -> None:
        """A job came, with at least one row. ``alone``: nothing may share a run with those of this key."""
        busy = self._running > 0 or bool(self._filled)
        self._arrivals.passed(now, busy=busy)
        if busy:
            self._arrivals.joined()
        bucket = self._filled[key] = self._bucket(key)
        bucket.apart = bucket.apart or alone
        self._numbers += 1
        bucket.jobs[job] = _Waiting(self._numbers, now, 0, rows)
        bucket.rows += rows
        self._key_of[job] = key
        self._last = now

    def drop(self, job: int) -> None:
        """What still waits of a job is not to run: cancelled, or another piece of it failed."""
        key = self._key_of.pop(job, None)
        if key is None:
            return
        bucket = self._filled[key]
        bucket.rows -= bucket.jobs.pop(job).rows
        if not bucket.jobs:
            del self._filled[key]

    def ran(self, key: Hashable, rows: int, seconds: float) -> None:
        """A run of one batch of this bucket took so long."""
        self._bucket(key).cost.observe(rows, seconds)

    def part(self, key: Hashable) -> None:
        """Jobs of this bucket failed together and none of them alone: from now on each runs by itself."""
        self._bucket(key).apart = True

    def arrived(self, now: float) -> None:
        """A trip is over."""
        self._arrivals.passed(now, busy=True)
        self._running -= 1
        self._ends.popleft()  # of some trip, which is near enough

    # --- decisions -------------------------------------------------------------------------------

    def next(self, now: float, *, may_come: bool) -> Trip | Wait | None:
        """What to do now; None: nothing before the next event. Ask until it is no trip.

        1. Nothing waits, or all lanes are taken: nothing.
        2. A trip is under way: start another beside it only when it cannot grow any more; what comes
           meanwhile joins the one that is forming.
        3. Nobody is under way: wait for company while that is worth it (see ``_worth_waiting``), else go.

        ``may_come``: false while the broker will not deliver another job before we settle one.
        """
        if not self._filled or self._running >= self._rules.lanes:
            return None
        if self._running:
            return self._take(now) if self._is_full() else None
        until = self._worth_waiting(now) if may_come else now
        return Wait(until) if until > now else self._take(now)

    def _is_full(self) -> bool:
        oldest = self._oldest()
        if not oldest.apart and oldest.rows < self._rules.max_rows:
            return False
        seconds = 0.0
        for bucket in self._filled.values():
            seconds += bucket.seconds(self._rules.max_rows)
            if seconds >= self._rules.trip_seconds:
                return True
        return False

    def _worth_waiting(self, now: float) -> float:
        """Until when to wait for one more job; a time that is not after ``now`` means not at all.

        Company saves the machine the fixed part of a run, and costs each job that waits the gap until it
        comes. Never longer than ``max_delay`` after the oldest came, nor than the silence says.
        """
        if len(self._filled) > 1:
            return now  # there is other work: the others can form meanwhile
        bucket = self._oldest()
        if bucket.apart or bucket.rows >= self._rules.max_rows:
            return now
        self._arrivals.passed(now, busy=True)
        gap = self._arrivals.gap()
        if bucket.cost.fixed <= len(bucket.jobs) * gap:
            return now
        return min(bucket.head().since + self._rules.max_delay, self._last + PATIENCE * gap)

    def _take(self, now: float) -> Trip:
        """The batches of the oldest jobs, as many as are expected to take no longer than a trip may."""
        batches: list[Batch] = []
        seconds = taken = 0.0
        while self._filled:
            bucket = self._oldest()
            rows = sum(row for _, row in self._fitting(bucket))
            seconds += bucket.cost.seconds(rows)
            if batches and seconds > self._rules.trip_seconds:
                break
            taken = seconds
            batches.append(self._take_batch(bucket))
        self._running += 1
        self._ends.append(now + taken)
        return Trip(tuple(batches))

    def _take_batch(self, bucket: _Bucket) -> Batch:
        pieces: list[Piece] = []
        for job, rows in list(self._fitting(bucket)):
            waiting = bucket.jobs[job]
            pieces.append(Piece(job, waiting.first, rows))
            if rows == waiting.rows:
                self.drop(job)
            else:
                waiting.first += rows
                waiting.rows -= rows
                bucket.rows -= rows
        return tuple(pieces)

    def _fitting(self, bucket: _Bucket) -> Iterator[tuple[int, int]]:
        """The jobs of the next batch and how many rows of each, oldest first.

        A job larger than a batch is split, and its last piece shares its batch. Others stay whole.
        """
        free, most = self._rules.max_rows, self._rules.max_rows
        for job, waiting in bucket.jobs.items():
            if bucket.apart:
                yield job, waiting.rows
                return
            if waiting.rows > free and (free < most or waiting.rows <= most):
                return
            rows = min(waiting.rows, free)
            yield job, rows
            free -= rows
            if free == 0:
                return

    def _oldest(self) -> _Bucket:
        buckets = self._filled.values()
        if len(buckets) == 1:
            return next(iter(buckets))
        return min(buckets, key=lambda bucket: bucket.head().number)

    def _bucket(self, key: Hashable) -> _Bucket:
        known = self._buckets.get(key)
        if known is not None:
            self._buckets.move_to_end(key)
            return known
        bucket = self._buckets[key] = _Bucket(RunCost(self._rules.measured), self._rules.max_rows == 1)
        for old in list(self._buckets):
            if len(self._buckets) <= MAX_BUCKETS:
                break
            if old not in self._filled and old != key:
                del self._buckets[old]
        return bucket
