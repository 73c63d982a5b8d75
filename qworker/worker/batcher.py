"""Runs one model's jobs: together where that is verified and pays, and several short runs in one hop to a thread.

``policy.batching`` decides what runs when. The loop only hands arrays over: stacking, running and splitting
happen in the thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from qworker.engine.base import Engine
from qworker.errors import DeadlineExceeded, JobError, OutOfMemory
from qworker.policy.batching import Batching, Piece, Rules, Trip, Wait
from qworker.policy.deadline import Estimate, hopeless
from qworker.store.card import Card
from qworker.telemetry.counters import Counters
from qworker.wire.datatypes import BYTES
from qworker.wire.messages import Job, Tensor
from qworker.wire.rows import RowAxes, count_rows, join, split, stack, take

SHARED_BYTES = 4096
"""Inputs without rows must be equal for jobs to share a run; larger ones than this are not compared."""
MOST_PREFETCH = 256
MOST_BYTES_IN_HAND = 64 << 20
"""Of a model's jobs, where their size is known: what comes before its turn lies in memory."""
EXPIRY_LOOK = 0.25
"""Seconds between looks for jobs whose deadline has passed while they wait, where jobs have deadlines."""

Answer = asyncio.Future[tuple[list[Tensor], float]]
"""The outputs of a job, and the seconds of the runs that it was part of."""

_ONE_RUN_EACH = RowAxes({}, {})


@dataclass(slots=True, eq=False)
class _Entry:
    """A job on its way. The loop writes all of it but ``begun``, which threads set; see ``Batcher._turn``."""

    number: int
    job: Job
    rows: int
    key: Hashable
    deadline: float | None
    answer: Answer
    dropped: bool = False
    begun: bool = False
    parts: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    rows_done: int = 0
    seconds: float = 0.0


Member = tuple[_Entry, Piece]


@dataclass(slots=True)
class _Report:
    """What became of a trip, in the order in which things were done."""

    done: list[tuple[Member, list[Tensor], float]] = field(default_factory=list[tuple[Member, list[Tensor], float]])
    failed: list[tuple[_Entry, JobError]] = field(default_factory=list[tuple[_Entry, JobError]])
    runs: list[tuple[Hashable, int, float]] = field(default_factory=list[tuple[Hashable, int, float]])
    shared: int = 0
    broken: list[tuple[Hashable, bool]] = field(default_factory=list[tuple[Hashable, bool]])
    """Batches that failed as a whole, and whether each of their jobs did well by itself."""
    traced: list[tuple[float, float, int, list[str]]] = field(default_factory=list[tuple[float, float, int, list[str]]])
    """Of runs, where jobs are traced: end (unix), seconds, rows, and the ids of their jobs."""


class Batcher:
    """Runs the jobs of one engine in ``threads``, at most ``lanes`` trips at once.

    Owned here, on the event loop: the table of waiting jobs and the entries of all that are not answered.
    It has no task and needs no stop: each job is awaited by the task that brought it.
    """

    def __init__(
        self,
        engine: Engine,
        card: Card,
        threads: ThreadPoolExecutor,
        counters: Counters,
        *,
        lanes: int,
        max_delay: float,
        may_come: Callable[[], bool],
    ) -> None:
        """``may_come`` tells whether the broker may deliver another job before one is settled."""
        self._engine = engine
        self._threads = threads
        self._counters = counters
        self._traces = counters.measures.traces
        self._card = card
        self._may_come = may_come
        verified = card.batching if card.batching is not None and card.batching.max_rows > 1 else None
        self._axes = _ONE_RUN_EACH if verified is None else verified.axes()
        self._together = verified is not None
        self._job_bytes = card.job_bytes or 0
        self._rules = Rules(
            max_rows=1 if verified is None else verified.max_rows,
            max_delay=max_delay,
            lanes=lanes,
            # of a model that is not batched, one job is one row whatever its size
            measured=tuple((run.rows, run.seconds) for run in card.run_times[: None if self._together else 1]),
        )
        self._table = Batching(self._rules)
        self._entries: dict[int, _Entry] = {}
        self._numbers = 0
        self._turn = threading.Lock()
        """Held to set ``begun`` or ``dropped``: a job that was answered for good is never run after that."""
        self._expiry: asyncio.TimerHandle | None = None
        self._widest = 1
        """Runs that the largest job took."""
        self._longest = max((run.seconds for run in card.run_times), default=0.001)
        """Seconds of the longest run, of late."""
        self._looking = False
        self._timer: asyncio.TimerHandle | None = None
        self._watched: dict[int, Callable[[], object]] = {}
        """By number of the job: whom to tell that its run begins. Nearly always empty."""

    @property
    def prefetch(self) -> int:
        """Deliveries in hand that keep the runs full: for each lane a batch that runs, one that forms, and one
        whose answers are on their way to the broker. Short runs travel many at a time, and count as a batch."""
        rules = self._rules
        most = rules.max_rows
        if rules.measured:
            rows, seconds = rules.measured[-1]
            most = max(most, int(rules.trip_seconds / max(seconds, 1e-6) * rows))
        return min((rules.lanes + 2) * most, MOST_PREFETCH, MOST_BYTES_IN_HAND // max(self._job_bytes, 1))

    async def run(self, job: Job, deadline: float | None = None) -> tuple[list[Tensor], float]:
        """The outputs of a job, and the seconds of the runs that it was part of.

        Raises DeadlineExceeded when ``deadline`` (unix seconds) passes before it runs, or would, and what the
        engine raises for this job alone. Cancelled, it drops out of whatever has not begun.
        """
        entry = self._enter(job, deadline)
        try:
            return await entry.answer
        finally:
            self._forget(entry)

    def submit(self, job: Job, deadline: float | None, told: Callable[[Answer], None]) -> int:
        """``run`` without a coroutine: ``told`` is called with a future that is done. Returns what to ``watch`` it by.

        Raises DeadlineExceeded where it is plain already that the job cannot be done in time.
        """
        entry = self._enter(job, deadline)

        def answered(answer: Answer) -> None:
            self._forget(entry)
            told(answer)

        entry.answer.add_done_callback(answered)
        return entry.number

    def outlook(self, job: Job) -> tuple[int, tuple[float, float]]:
        """Jobs in hand, and the seconds until ``job`` would begin behind them and those of its own run."""
        rows, key, _ = self._place(job)
        return len(self._entries), self._table.expected(key, rows, asyncio.get_running_loop().time())

    def watch(self, number: int, begun: Callable[[], object]) -> None:
        """Call ``begun`` when the first run of that job starts. ``unwatch`` it when it ends."""
        self._watched[number] = begun

    def unwatch(self, number: int) -> None:
        self._watched.pop(number, None)

    def job_ids(self) -> list[str]:
        """Of the jobs that are not answered."""
        return [entry.job.id for entry in self._entries.values()]

    def cancel(self, job_ids: AbstractSet[str], why: JobError) -> tuple[set[str], set[str]]:
        """End those of the jobs that have not begun with ``why``. The ids that ended so, and those that run."""
        ended: set[str] = set()
        running: set[str] = set()
        for entry in list(self._entries.values()):
            if entry.job.id in job_ids:
                (ended if self._end_early(entry, why) else running).add(entry.job.id)
        return ended, running

    # --- on the loop -----------------------------------------------------------------------------

    def _enter(self, job: Job, deadline: float | None) -> _Entry:
        loop = asyncio.get_running_loop()
        rows, key, alone = self._place(job)
        if deadline is not None:
            self._check_time(deadline, key, rows, loop.time())
            if self._expiry is None:
                self._expiry = loop.call_later(EXPIRY_LOOK, self._end_expired)
        self._numbers += 1
        entry = _Entry(self._numbers, job, rows, key, deadline, loop.create_future())
        self._entries[entry.number] = entry
        self._table.add(entry.number, key, rows, loop.time(), alone=alone)
        if not self._looking:
            # Once for all that this turn of the loop brings: they may belong together.
            self._looking = True
            loop.call_soon(self._look)
        return entry

    def _place(self, job: Job) -> tuple[int, Hashable, bool]:
        """Rows, bucket, and whether it must run by itself."""
        if not self._together:
            return 1, tuple(tensor.array.shape for tensor in job.inputs), True
        rows = count_rows(self._axes, job.inputs)
        key = _sharing(self._axes, job) if rows is not None else None
        if rows is None or key is None:
            return 1, ("alone", *(tensor.array.shape for tensor in job.inputs)), True
        return rows, key, False

    def _check_time(self, deadline: float, key: Hashable, rows: int, loop_now: float) -> None:
        """Raises DeadlineExceeded for a job that cannot be done in time."""
        left, most = deadline - time.time(), self._rules.max_rows
        if rows > most * self._widest:
            self._widest = -(-rows // most)
        if left > (len(self._entries) + 1) * self._widest * self._longest:
            return  # nearly always: even one run after the other leaves it time
        queue, run = self._table.expected(key, rows, loop_now)
        if queue + run > left and (why := hopeless(left, Estimate(queue, run))) is not None:
            raise DeadlineExceeded(why)

    def _end_expired(self) -> None:
        """Answer the jobs whose deadline has passed while they wait; come back while there are others with one."""
        now = time.time()
        self._expiry = None
        for entry in list(self._entries.values()):
            if entry.deadline is None:
                continue
            if entry.deadline < now:
                self._end_early(entry, expired(entry.deadline, now))
            elif self._expiry is None:
                self._expiry = asyncio.get_running_loop().call_later(EXPIRY_LOOK, self._end_expired)

    def _end_early(self, entry: _Entry, why: JobError) -> bool:
        """End a job that has not begun, or not all of it: what waits does not run. False: all of it runs."""
        with self._turn:
            if entry.begun and not self._table.waits(entry.number):
                return False
            entry.dropped = True
        self._table.drop(entry.number)
        _settle(entry, why)
        return True

    def _forget(self, entry: _Entry) -> None:
        entry.dropped = True
        self._entries.pop(entry.number, None)
        self._table.drop(entry.number)

    def _look(self) -> None:
        """Start what is due, and come back when more will be."""
        self._looking = False
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            while isinstance(step := self._table.next(loop.time(), may_come=self._may_come()), Trip):
                self._start(loop, step)
        except BaseException as bug:
            self._fail_all(bug)
            raise
        if isinstance(step, Wait):
            self._timer = loop.call_at(step.until, self._look)

    def _start(self, loop: asyncio.AbstractEventLoop, trip: Trip) -> None:
        load = [[(self._entries[piece.job], piece) for piece in batch] for batch in trip.batches]
        if self._watched:
            for number in {piece.job for batch in trip.batches for piece in batch} & self._watched.keys():
                self._watched.pop(number)()

        def travel() -> None:
            report = _Report()
            try:
                for members in load:
                    self._run_batch(members, report)
            except BaseException as bug:
                loop.call_soon_threadsafe(self._fail_all, bug)
                raise
            loop.call_soon_threadsafe(self._arrive, report)

        self._threads.submit(travel)

    def _arrive(self, report: _Report) -> None:
        try:
            self._table.arrived(asyncio.get_running_loop().time())
            for key, rows, seconds in report.runs:
                self._table.ran(key, rows, seconds)
                self._longest = max(seconds, self._longest * 0.99)
                if self._together:
                    measures, share = self._counters.measures, rows / self._rules.max_rows
                    measures.rows.observe(rows)
                    measures.fill.observe(share)
                    measures.of(self._card.model).batch(share)
            if self._traces is not None:
                for run in report.traced:
                    self._traces.batch(self._card.model, *run)
            for key, harmless_apart in report.broken:
                self._counters.batches_split += 1
                if harmless_apart:
                    self._table.part(key)
            self._counters.runs += len(report.runs)
            self._counters.jobs_together += report.shared
            for entry, error in report.failed:
                self._table.drop(entry.number)  # further pieces of it are of no use
                _settle(entry, error)
            self._look()  # before the answers are dealt with: the thread need not wait for that
        except BaseException as bug:
            self._fail_all(bug)
            raise
        for (entry, piece), outputs, seconds in report.done:
            self._add_part(entry, piece, outputs, seconds)

    def _add_part(self, entry: _Entry, piece: Piece, outputs: list[Tensor], seconds: float) -> None:
        entry.parts[piece.first] = outputs
        entry.rows_done += piece.rows
        entry.seconds += seconds
        if entry.rows_done == entry.rows and not entry.answer.done():
            ordered = [entry.parts[first] for first in sorted(entry.parts)]
            entry.answer.set_result((join(self._axes, ordered), entry.seconds))

    def _fail_all(self, bug: BaseException) -> None:
        """Something that must not happen: let every job's task raise it, which ends the worker."""
        for entry in list(self._entries.values()):
            _settle(entry, bug)

    # --- in a thread -----------------------------------------------------------------------------

    def _run_batch(self, members: Sequence[Member], report: _Report) -> None:
        live: list[Member] = []
        now = time.time()
        with self._turn:
            for entry, piece in members:
                if entry.dropped:
                    continue
                if entry.deadline is not None and entry.deadline < now:
                    report.failed.append((entry, expired(entry.deadline, now)))
                else:
                    entry.begun = True
                    live.append((entry, piece))
        if not live:
            return
        failed_before = len(report.failed)
        if not self._run_members(live, report) and len(live) > 1:
            report.broken.append((live[0][0].key, len(report.failed) == failed_before))

    def _run_members(self, members: Sequence[Member], report: _Report) -> bool:
        """Run them together; where that fails halve them, until each bad one has failed by itself."""
        key = members[0][0].key
        started = time.perf_counter()
        try:
            outputs = self._run_once(members)
        except JobError as error:
            if len(members) == 1:
                report.failed.append((members[0][0], error))
                return False
            half = len(members) // 2
            self._run_members(members[:half], report)
            self._run_members(members[half:], report)
            return False
        seconds = time.perf_counter() - started
        report.runs.append((key, sum(piece.rows for _, piece in members), seconds))
        if len(members) > 1:
            report.shared += len(members)
            if self._traces is not None:
                ids = [entry.job.id for entry, _ in members]
                report.traced.append((time.time(), seconds, report.runs[-1][1], ids))
        report.done.extend((member, part, seconds) for member, part in zip(members, outputs, strict=True))
        return True

    def _run_once(self, members: Sequence[Member]) -> list[list[Tensor]]:
        axes, wanted = self._axes, members[0][0].job.outputs
        if len(members) == 1 and members[0][1].rows == members[0][0].rows:
            return [self._engine.run(members[0][0].job.inputs, wanted)]
        inputs = [
            entry.job.inputs
            if piece.rows == entry.rows
            else take(entry.job.inputs, axes.inputs, piece.first, piece.rows)
            for entry, piece in members
        ]
        try:
            outputs = self._engine.run(stack(axes, inputs), wanted)
        except MemoryError as exc:  # of our own stacking; the engine turns its own into OutOfMemory
            raise OutOfMemory("no memory to run these jobs together: send less at once") from exc
        return split(axes, outputs, [piece.rows for _, piece in members])


def expired(deadline: float, now: float) -> DeadlineExceeded:
    """The failure of a job whose deadline has passed."""
    return DeadlineExceeded(
        f"the job's deadline passed {now - deadline:.3f} s before it could run: "
        "allow more time, or see what the model waits for"
    )


def _settle(entry: _Entry, error: BaseException) -> None:
    if not entry.answer.done():
        entry.answer.set_exception(error)


def _sharing(axes: RowAxes, job: Job) -> Hashable | None:
    """What jobs must have in common to share a run; None when it is too much to compare."""
    tensors: list[Hashable] = []
    for tensor in job.inputs:
        array, axis = tensor.array, axes.inputs.get(tensor.name)
        if axis is not None:
            tensors.append((tensor.name, (*array.shape[:axis], *array.shape[axis + 1 :])))
        elif tensor.datatype == BYTES or array.nbytes > SHARED_BYTES:
            return None
        else:
            tensors.append((tensor.name, array.shape, array.tobytes()))
    # by their text, since 1, 1.0 and True are equal
    parameters = tuple((name, repr(value)) for name, value in sorted(job.parameters.items())) if job.parameters else ()
    return (frozenset(tensors), job.outputs, parameters)
