"""Jobs that run together: each gets its own answer, whatever the others are, and counters are exact."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qworker.errors import DeadlineExceeded, InferenceFailed, InvalidInput, JobCancelled
from qworker.store.card import BatchingEntry, Card, FileEntry, RunTime, TensorEntry
from qworker.telemetry.counters import Counters
from qworker.wire.datatypes import tensor
from qworker.wire.messages import Job, Tensor
from qworker.wire.signature import Signature
from qworker.worker.batcher import Batcher
from tests.support.waiting import wait_until

BAD = -1
TIME_MAJOR = 1


@dataclass
class Recorder:
    """An engine that triples ``ids`` ([n, length]), and writes down what came in each run.

    ``columns`` holds the same with the rows on axis 1. A run that holds a ``BAD`` id fails as a whole.
    """

    runs: list[list[int]] = field(default_factory=list[list[int]])
    before_run: Callable[[list[int]], object] = len
    fails_beside_others: bool = False
    fault: BaseException | None = None

    @property
    def signature(self) -> Signature:
        return Signature((), ())

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[str] = ()) -> list[Tensor]:
        arrays = {t.name: t.array for t in inputs}
        ids, factor = arrays["ids"], float(arrays["factor"])
        run = [int(i) for i in ids[:, 0]]
        self.runs.append(run)
        self.before_run(run)
        if self.fault is not None:
            raise self.fault
        if (ids == BAD).any():
            raise InvalidInput("a bad id")
        if self.fails_beside_others and len(set(run)) > 1:
            raise InferenceFailed("too many")
        made = {"tripled": ids * 3, "columns": np.ascontiguousarray(ids.T * factor)}
        return [tensor(name, made[name]) for name in made if not outputs or name in outputs]

    def close(self) -> None:
        """Nothing to free."""


def card(max_rows: int = 8, seconds: float = 0.001) -> Card:
    """Of the recorder: rows are on axis 0 and 1, and ``factor`` is shared."""
    shape = ("n", "length")
    return Card(
        model="m",
        version="1",
        backend="onnx",
        files=(FileEntry(name="model.onnx", sha256="0" * 64, nbytes=1),),
        inputs=(
            TensorEntry(name="ids", datatype="INT64", shape=shape),
            TensorEntry(name="factor", datatype="FP64", shape=()),
        ),
        outputs=(
            TensorEntry(name="tripled", datatype="INT64", shape=shape),
            TensorEntry(name="columns", datatype="FP64", shape=shape),
        ),
        resident_bytes=1,
        load_seconds=0.0,
        warmed=True,
        runtime="a test",
        created=datetime.now(UTC),
        batching=BatchingEntry(
            inputs={"ids": 0},
            outputs={"tripled": 0, "columns": TIME_MAJOR},
            max_rows=max_rows,
            tolerance=0.0,
            max_error=0.0,
        ),
        run_times=(RunTime(rows=1, seconds=seconds), RunTime(rows=8, seconds=seconds * 1.5)),
    )


class CountingThreads(ThreadPoolExecutor):
    """Counts what is handed over."""

    hops = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.hops += 1
        return super().submit(*args, **kwargs)


@pytest.fixture
def threads() -> Iterator[CountingThreads]:
    with CountingThreads(2) as pool:
        yield pool


class Gate:
    """Holds runs until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, run: list[int]) -> None:
        self.entered.set()
        assert self._open.wait(10), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


def batcher(
    engine: Recorder,
    threads: ThreadPoolExecutor,
    made: Card | None = None,
    *,
    lanes: int = 1,
    max_delay: float = 0.002,
    may_come: bool = False,
    counters: Counters | None = None,
) -> Batcher:
    return Batcher(
        engine,
        made or card(),
        threads,
        counters or Counters(),
        lanes=lanes,
        max_delay=max_delay,
        may_come=lambda: may_come,
    )


def job(ids: Sequence[int], length: int = 2, factor: float = 2.0, **fields: Any) -> Job:
    """Rows of one id each."""
    rows = np.repeat(np.array(ids, np.int64)[:, None], length, axis=1)
    return Job("j", "m", (tensor("ids", rows), tensor("factor", np.float64(factor))), **fields)


def check(sent: Job, outputs: Sequence[Tensor]) -> None:
    """The outputs are this job's, whole, in order, and fit to be sent."""
    ids = sent.inputs[0].array
    expected: dict[str, NDArray[Any]] = {"tripled": ids * 3, "columns": ids.T * float(sent.inputs[1].array)}
    assert [t.name for t in outputs] == [name for name in expected if not sent.outputs or name in sent.outputs]
    for found in outputs:
        assert np.array_equal(found.array, expected[found.name])
        assert found.array.flags.c_contiguous


async def in_gate(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 10)


async def has_waiting(batched: Batcher, count: int) -> None:
    """So many jobs are in the table."""
    await wait_until(lambda: batched._table.waiting == count, what=f"{count} jobs wait")


# --- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
async def test_every_job_gets_its_own_answer(threads: CountingThreads, seed: int, lanes: int) -> None:
    """Shapes, sizes, parameters, outputs, bad rows, deadlines and cancellations, all mixed."""
    rng, engine, counters = random.Random(seed), Recorder(), Counters()
    batched = batcher(engine, threads, lanes=lanes, may_come=True, counters=counters)
    ids = iter(range(10**6))
    outcomes: list[tuple[str, type[BaseException]]] = []

    async def one() -> None:
        kind = rng.choices(["good", "bad", "late", "gone"], [90, 4, 3, 3])[0]
        rows = [next(ids) for _ in range(rng.choice([1, 1, 1, 2, 5, 8, 30]))]
        if kind == "bad":
            rows[rng.randrange(len(rows))] = BAD
        sent = job(
            rows,
            rng.choice([2, 2, 3]),
            rng.choice([2.0, 2.0, 2.0, 0.5]),
            outputs=rng.choice([(), (), ("columns",)]),
            parameters=rng.choice([{}, {}, {"beam": 4}]),
        )
        await asyncio.sleep(rng.random() * 0.05)
        running = asyncio.ensure_future(batched.run(sent, time.time() - 1 if kind == "late" else None))  # noqa: TID251
        if kind == "gone":
            asyncio.get_running_loop().call_later(rng.random() * 0.002, running.cancel)
        try:
            outputs, seconds = await running
        except (InvalidInput, DeadlineExceeded, asyncio.CancelledError) as error:
            outcomes.append((kind, type(error)))
        else:
            assert kind in ("good", "gone")
            assert seconds > 0
            check(sent, outputs)

    await asyncio.gather(*(one() for _ in range(400)))
    bad, late, gone = ("bad", InvalidInput), ("late", DeadlineExceeded), ("gone", asyncio.CancelledError)
    assert set(outcomes) == {bad, late, gone}
    assert counters.jobs_together > 50
    assert counters.runs < 700
    assert max(map(len, engine.runs)) == 8
    assert not batched._entries
    assert not batched._table.waiting


async def test_unlike_jobs_do_not_share(threads: CountingThreads) -> None:
    """Another shape, factor, output or parameter is another run; the order of inputs is not."""
    gate, engine = Gate(), Recorder()
    engine.before_run = gate
    batched = batcher(engine, threads)
    unlike = [
        job([1], 3),
        job([2], factor=0.5),
        job([3], outputs=("tripled",)),
        job([4], parameters={"k": 1}),
        job([5], parameters={"k": True}),
    ]
    alike = [job([6]), job([7])]
    swapped = job([8])
    alike.append(Job("j", "m", (swapped.inputs[1], swapped.inputs[0])))
    async with asyncio.TaskGroup() as group:
        group.create_task(batched.run(job([0], 9)))
        await in_gate(gate)
        for each in (*unlike, *alike):
            group.create_task(batched.run(each))
        await has_waiting(batched, 8)
        gate.open()
    assert sorted(engine.runs) == [[0], [1], [2], [3], [4], [5], [6, 7, 8]]


async def test_a_large_job_comes_back_in_order(threads: CountingThreads) -> None:
    """Thirty rows run as 8, 8, 8 and 6 and come back as thirty; the rest shares its run."""
    engine = Recorder()
    batched = batcher(engine, threads, lanes=2)
    large, small = job(range(30)), job([100, 101])
    (outputs, seconds), (others, _) = await asyncio.gather(batched.run(large), batched.run(small))
    check(large, outputs)
    check(small, others)
    assert seconds > 0
    assert sorted(len(run) for run in engine.runs) == [8, 8, 8, 8]


async def test_pieces_that_arrive_out_of_order(threads: CountingThreads) -> None:
    """The first half of a job is held while the second one is done."""
    gate, engine = Gate(), Recorder()
    engine.before_run = lambda run: gate(run) if 0 in run else None
    batched = batcher(engine, threads, lanes=2)
    sent = job(range(16))
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(batched.run(sent))
        await in_gate(gate)
        await wait_until(lambda: any(entry.rows_done == 8 for entry in batched._entries.values()))
        gate.open()
    check(sent, answer.result()[0])


# --- what goes wrong ----------------------------------------------------------------------------


async def test_only_the_bad_row_fails(threads: CountingThreads) -> None:
    """Eight jobs in a run with one bad row: seven answers, one failure, and exact counters."""
    gate, engine, counters = Gate(), Recorder(), Counters()
    engine.before_run = gate
    batched = batcher(engine, threads, counters=counters)
    first = asyncio.gather(batched.run(job([0], 9)))
    await in_gate(gate)
    jobs = [job([k]) for k in range(1, 9)]
    jobs[2] = job([BAD])
    running = asyncio.gather(*(batched.run(each) for each in jobs), return_exceptions=True)
    await has_waiting(batched, 8)
    gate.open()
    await first
    for k, (sent, outcome) in enumerate(zip(jobs, await running, strict=True)):
        if k == 2:
            assert isinstance(outcome, InvalidInput)
        else:
            assert not isinstance(outcome, BaseException)
            check(sent, outcome[0])
    assert engine.runs[1:] == [[1, 2, BAD, 4, 5, 6, 7, 8], [1, 2, BAD, 4], [1, 2], [BAD, 4], [BAD], [4], [5, 6, 7, 8]]
    assert (counters.runs, counters.jobs_together, counters.batches_split) == (4, 6, 1)


async def test_jobs_that_fail_only_together_run_apart_from_then_on(threads: CountingThreads) -> None:
    """Whatever the card says: the next ones are not tried together again."""
    gate, engine = Gate(), Recorder(fails_beside_others=True)
    engine.before_run = gate
    batched = batcher(engine, threads)
    first = asyncio.gather(batched.run(job([0], 9)))
    await in_gate(gate)
    running = asyncio.gather(*(batched.run(job([k])) for k in (1, 2)))
    await has_waiting(batched, 2)
    gate.open()
    await first
    await running
    await asyncio.gather(*(batched.run(job([k])) for k in (3, 4)))
    assert engine.runs[1:] == [[1, 2], [1], [2], [3], [4]]


async def test_one_failed_piece_fails_the_whole_job(threads: CountingThreads) -> None:
    """And what still waits of it does not run."""
    engine = Recorder()
    batched = batcher(engine, threads)
    with pytest.raises(InvalidInput):
        await batched.run(job([BAD, *range(99)]))
    assert engine.runs == [[BAD, *range(7)]]
    assert not batched._table.waiting


async def test_cancelled_and_expired_jobs_drop_out_before_the_run(threads: CountingThreads) -> None:
    """Neither reaches the engine; those beside them do."""
    gate, engine = Gate(), Recorder()
    engine.before_run = gate
    batched = batcher(engine, threads)
    deadline = time.time() + 0.05
    async with asyncio.TaskGroup() as group:
        group.create_task(batched.run(job([0], 9)))
        await in_gate(gate)
        gone = group.create_task(batched.run(job([1])))
        late = group.create_task(_outcome(batched.run(job([2]), deadline)))
        good = group.create_task(batched.run(job([3])))
        await has_waiting(batched, 3)
        gone.cancel()
        await wait_until(lambda: time.time() > deadline)
        gate.open()
    assert isinstance(late.result(), DeadlineExceeded)
    check(job([3]), good.result()[0])
    assert engine.runs == [[0], [3]]


async def test_a_member_cancelled_on_the_way_drops_out_too(threads: CountingThreads) -> None:
    """Its trip is under way, but its own run has not begun."""
    gate, engine = Gate(), Recorder()
    engine.before_run = gate
    batched = batcher(engine, threads, card(max_rows=1, seconds=1e-5))
    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(batched.run(job([k]))) for k in range(4)]
        await in_gate(gate)
        jobs[2].cancel()
        await asyncio.wait({jobs[2]})
        gate.open()
    assert threads.hops == 1
    assert engine.runs == [[0], [1], [3]]


async def test_a_bug_reaches_every_job(threads: CountingThreads) -> None:
    """What must not happen is not swallowed: each job's task raises it, and the worker ends."""
    batched = batcher(Recorder(fault=ZeroDivisionError("a bug")), threads)
    outcomes = await asyncio.gather(*(batched.run(job([k])) for k in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 3


# --- when ---------------------------------------------------------------------------------------


async def test_short_runs_share_a_hop(threads: CountingThreads) -> None:
    """Jobs of a model that is not batched run one by one, many in one visit to a thread."""
    engine = Recorder()
    batched = batcher(engine, threads, card(max_rows=1, seconds=1e-5))
    jobs = [job([k]) for k in range(40)]
    for sent, (outputs, _) in zip(jobs, await asyncio.gather(*map(batched.run, jobs)), strict=True):
        check(sent, outputs)
    assert engine.runs == [[k] for k in range(40)]
    assert threads.hops < 10


async def test_a_slow_model_gathers_while_it_runs(threads: CountingThreads) -> None:
    """With no delay at all and a run that is longer than any, what came meanwhile goes together."""
    gate, engine = Gate(), Recorder()
    engine.before_run = gate
    batched = batcher(engine, threads, max_delay=0.0, may_come=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(batched.run(job([0])))
        await in_gate(gate)
        for k in range(1, 6):
            group.create_task(batched.run(job([k])))
        await has_waiting(batched, 5)
        gate.open()
    assert engine.runs == [[0], [1, 2, 3, 4, 5]]


async def test_a_wait_ends(threads: CountingThreads) -> None:
    """A job that waits for company which does not come runs after the delay."""
    engine = Recorder()
    batched = batcher(engine, threads, card(seconds=10.0), max_delay=0.05, may_come=True)
    await asyncio.gather(*(batched.run(job([k])) for k in range(4)))  # they join each other, so more may
    started = time.monotonic()
    await asyncio.gather(*(batched.run(job([k])) for k in range(10, 13)))
    assert time.monotonic() - started < 5.0
    assert engine.runs[-1] == [10, 11, 12]


async def _outcome(work: Any) -> BaseException | None:
    (result,) = await asyncio.gather(work, return_exceptions=True)
    return result if isinstance(result, BaseException) else None


# --- what ends before it runs --------------------------------------------------------------------


async def test_the_time_of_a_waiting_job_ends_while_another_runs(threads: CountingThreads) -> None:
    """It is told then, not when its turn comes; it never runs, and nobody else is harmed."""
    gate, engine = Gate(), Recorder()
    engine.before_run = gate
    batched = batcher(engine, threads)
    async with asyncio.TaskGroup() as group:
        group.create_task(batched.run(job([0], 9)))
        await in_gate(gate)
        late = group.create_task(_outcome(batched.run(job([1]), time.time() + 0.05)))
        good = group.create_task(batched.run(job([2]), time.time() + 60))
        error = await late
        assert isinstance(error, DeadlineExceeded)
        assert engine.runs == [[0]]
        assert not good.done()
        gate.open()
    check(job([2]), good.result()[0])
    assert engine.runs == [[0], [2]]
    assert not batched._entries


async def test_jobs_are_cancelled_in_a_forming_batch(threads: CountingThreads) -> None:
    """Those named drop out and get the error; what runs goes on; the rest runs together."""
    gate, engine = Gate(), Recorder()
    engine.before_run = gate
    batched = batcher(engine, threads)
    named = [Job(f"job {k}", "m", job([k]).inputs) for k in range(5)]
    async with asyncio.TaskGroup() as group:
        first = group.create_task(batched.run(named[0]))
        await in_gate(gate)
        waiting = [group.create_task(_outcome(batched.run(each))) for each in named[1:]]
        await has_waiting(batched, 4)
        found = batched.cancel({"job 0", "job 2", "job 3", "job 9"}, JobCancelled("gone"))
        assert found == ({"job 2", "job 3"}, {"job 0"})
        outcomes = [await waiting[1], await waiting[2]]
        assert [type(outcome) for outcome in outcomes] == [JobCancelled, JobCancelled]
        gate.open()
    check(named[0], first.result()[0])
    assert engine.runs == [[0], [1, 4]]


async def test_a_job_is_cancelled_on_its_way_to_the_engine(threads: CountingThreads) -> None:
    """Handed to the thread, but not begun: it does not run. Begun: it does, and says so."""
    gate, engine = Gate(), Recorder()
    engine.before_run = gate
    batched = batcher(engine, threads, card(max_rows=1, seconds=1e-5))
    named = [Job(f"job {k}", "m", job([k]).inputs) for k in range(3)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_outcome(batched.run(each))) for each in named]
        await in_gate(gate)
        assert threads.hops == 1
        assert not batched._table.waiting
        assert batched.cancel({"job 0", "job 1"}, JobCancelled("gone")) == ({"job 1"}, {"job 0"})
        gate.open()
    assert [type(task.result()) for task in tasks] == [type(None), JobCancelled, type(None)]
    assert engine.runs == [[0], [2]]


async def test_the_rest_of_a_large_job_is_cancelled(threads: CountingThreads) -> None:
    """Its first rows run, the others do not."""
    gate, engine = Gate(), Recorder()
    engine.before_run = gate
    batched = batcher(engine, threads)
    async with asyncio.TaskGroup() as group:
        large = group.create_task(_outcome(batched.run(job(range(100)))))
        await in_gate(gate)
        assert batched.cancel({"j"}, JobCancelled("gone")) == ({"j"}, set())
        assert isinstance(await large, JobCancelled)
        gate.open()
        await wait_until(lambda: not batched._table._running)
    assert engine.runs == [list(range(8))]
    assert not batched._entries


async def test_a_job_that_cannot_be_done_in_time_is_refused_at_once(threads: CountingThreads) -> None:
    """By what a run takes and what waits before it; with the estimate in the text. One with time enough waits."""
    gate, engine = Gate(), Recorder()
    engine.before_run = gate
    batched = batcher(engine, threads, card(max_rows=1, seconds=10.0))
    async with asyncio.TaskGroup() as group:
        group.create_task(batched.run(job([0])))
        await in_gate(gate)
        group.create_task(batched.run(job([1]), time.time() + 25))
        await has_waiting(batched, 1)
        with pytest.raises(DeadlineExceeded, match=r"expected to take \d+(\.\d+)? s \(queue .* \+ run 10\)"):
            await batched.run(job([2]), time.time() + 15)
        refused: list[object] = []
        with pytest.raises(DeadlineExceeded):
            batched.submit(job([3]), time.time() + 15, refused.append)
        assert batched._table.waiting == 1
        gate.open()
    assert engine.runs == [[0], [1]]
    assert not refused


@pytest.mark.parametrize("seed", range(3))
async def test_who_is_told_that_it_is_over_has_not_run(threads: CountingThreads, seed: int) -> None:
    """Deadlines and cancellations race with the threads: a job is told one thing, and runs only with a result."""
    rng, engine = random.Random(seed), Recorder()
    engine.before_run = lambda _run: time.sleep(rng.random() * 0.002)
    batched = batcher(engine, threads, card(max_rows=4, seconds=1e-4), lanes=2, may_come=True)
    over: set[int] = set()

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        deadline = time.time() + rng.random() * 0.05 if rng.random() < 0.3 else None
        error = await _outcome(batched.run(Job(str(number), "m", job([number]).inputs), deadline))
        if error is not None:
            assert isinstance(error, DeadlineExceeded | JobCancelled)
            over.add(number)

    async def cancel_some() -> None:
        for _ in range(60):
            batched.cancel({str(rng.randrange(300)) for _ in range(40)}, JobCancelled("gone"))
            await asyncio.sleep(0.003)

    async with asyncio.TaskGroup() as group:
        for number in range(300):
            group.create_task(one(number))
        group.create_task(cancel_some())
    ran = {number for run in engine.runs for number in run}
    assert over
    assert ran
    assert not ran & over
    assert ran | over == set(range(300))
