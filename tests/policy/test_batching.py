"""Which jobs run together and when: invariants under any history, and the cases that the rules are for."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from qworker.policy.batching import Batching, Piece, Rules, Trip, Wait
from qworker.policy.run_cost import Arrivals, RunCost

GAINS = ((1.0, 0.010), (8.0, 0.017))
"""Runs of 9 ms and 1 ms a row."""


class Histories(RuleBasedStateMachine):
    """Any order of arrivals, cancellations, runs and time; what comes out is checked from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.jobs: dict[int, tuple[str, int, bool]] = {}
        self.done: dict[int, list[Piece]] = {}
        self.since: dict[int, float] = {}
        self.dropped: set[int] = set()
        self.parted: set[str] = set()
        self.under_way: list[Trip] = []

    @initialize(
        max_rows=st.sampled_from([1, 2, 8]),
        max_delay=st.sampled_from([0.0, 0.002]),
        lanes=st.integers(1, 3),
        measured=st.sampled_from([(), GAINS, ((1.0, 2e-5),)]),
    )
    def start(self, max_rows: int, max_delay: float, lanes: int, measured: tuple[tuple[float, float], ...]) -> None:
        self.rules = Rules(max_rows, max_delay, lanes, measured=measured)
        self.table = Batching(self.rules)

    @rule(key=st.sampled_from("abc"), rows=st.one_of(st.integers(1, 4), st.integers(1, 40)), alone=st.booleans())
    def arrive(self, key: str, rows: int, alone: bool) -> None:
        key = f"{key} alone" if alone else key
        job = len(self.jobs)
        self.jobs[job] = (key, rows, alone)
        self.done[job] = []
        self.since[job] = self.now
        self.table.add(job, key, rows, self.now, alone=alone)

    @rule(which=st.integers(0, 200))
    def cancel(self, which: int) -> None:
        if self.jobs:
            job = which % len(self.jobs)
            self.dropped.add(job)
            self.table.drop(job)

    @rule(seconds=st.sampled_from([0.0001, 0.001, 0.003]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(may_come=st.booleans())
    def look(self, may_come: bool) -> None:
        while isinstance(step := self.table.next(self.now, may_come=may_come), Trip):
            self._check(step)
            self.under_way.append(step)
        if isinstance(step, Wait):
            oldest = min(self.since[job] for job in self._waiting())
            assert may_come
            assert not self.under_way
            assert self.now < step.until <= oldest + self.rules.max_delay
        elif self._waiting():
            assert self.under_way, "something waits for nothing"

    @rule(which=st.integers(0, 5), seconds=st.sampled_from([1e-5, 1e-3, 0.05]), parts=st.booleans())
    def end_a_trip(self, which: int, seconds: float, parts: bool) -> None:
        if not self.under_way:
            return
        trip = self.under_way.pop(which % len(self.under_way))
        self.table.arrived(self.now)
        for batch in trip.batches:
            key = self.jobs[batch[0].job][0]
            self.table.ran(key, sum(piece.rows for piece in batch), seconds)
            if parts and len(batch) > 1:
                self.table.part(key)
                self.parted.add(key)

    @invariant()
    def nothing_is_lost(self) -> None:
        if self.jobs:
            assert self.table.waiting == len(self._waiting())

    def teardown(self) -> None:
        if not self.jobs:
            return
        while self._waiting() or self.under_way:
            self.look(may_come=False)
            while self.under_way:
                self.end_a_trip(0, 1e-3, parts=False)
        for job, (_, rows, _) in self.jobs.items():
            pieces = self.done[job]
            ends = [piece.first + piece.rows for piece in pieces]
            assert [piece.first for piece in pieces] == [0, *ends][: len(pieces)], "rows in order, none twice"
            assert job in self.dropped or ends[-1] == rows, "none lost"

    def _waiting(self) -> list[int]:
        return [
            job
            for job, (_, rows, _) in self.jobs.items()
            if job not in self.dropped and sum(piece.rows for piece in self.done[job]) < rows
        ]

    def _check(self, trip: Trip) -> None:
        assert len(self.under_way) < self.rules.lanes
        assert trip.batches[0][0].job == min(self._waiting()), "the oldest goes first"
        for batch in trip.batches:
            keys = {self.jobs[piece.job][0] for piece in batch}
            assert len(keys) == 1, "one bucket"
            key = keys.pop()
            alone = self.rules.max_rows == 1 or self.jobs[batch[0].job][2] or key in self.parted
            if alone:
                assert len(batch) == 1
                left = self.jobs[batch[0].job][1] - sum(piece.rows for piece in self.done[batch[0].job])
                assert batch[0].rows == left, "whole"
            else:
                assert sum(piece.rows for piece in batch) <= self.rules.max_rows
                assert len({piece.job for piece in batch}) == len(batch)
            for piece in batch:
                assert piece.job not in self.dropped
                assert alone or piece.rows == self.jobs[piece.job][1] or self.jobs[piece.job][1] > self.rules.max_rows
                self.done[piece.job].append(piece)


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


# --- when ---------------------------------------------------------------------------------------


def burst(table: Batching, jobs: range, now: float, gap: float = 0.0002) -> float:
    """Jobs that come one after the other; the time of the last one."""
    for job in jobs:
        table.add(job, "k", 1, now)
        now += gap
    return now - gap


def test_company_that_is_coming_is_waited_for() -> None:
    """A run costs 9 ms whatever its size, and jobs come every 0.2 ms: worth a wait, of 2 ms at most."""
    table = Batching(Rules(max_rows=32, measured=GAINS))
    now = burst(table, range(4), 10.0)
    step = table.next(now, may_come=True)
    assert isinstance(step, Wait)
    assert now < step.until <= 10.002
    trip = table.next(10.002, may_come=True)
    assert isinstance(trip, Trip)
    assert len(trip.batches[0]) == 4


def test_no_wait_for_what_cannot_come() -> None:
    """All that the broker may deliver is in hand."""
    table = Batching(Rules(max_rows=32, measured=GAINS))
    assert isinstance(table.next(burst(table, range(4), 10.0), may_come=False), Trip)


def test_no_wait_without_a_delay() -> None:
    """A delay of 0 is none at all."""
    table = Batching(Rules(max_rows=32, max_delay=0.0, measured=GAINS))
    assert isinstance(table.next(burst(table, range(4), 10.0), may_come=True), Trip)


def test_no_wait_where_company_saves_nothing() -> None:
    """Ten rows take ten times as long as one."""
    table = Batching(Rules(max_rows=32, measured=((1.0, 0.01), (10.0, 0.1))))
    assert isinstance(table.next(burst(table, range(4), 10.0), may_come=True), Trip)


def test_no_wait_where_too_many_would_pay_for_it() -> None:
    """A gap of 1 ms is worth 9 ms of a run to four jobs, and not to twelve."""
    for count, waits in ((4, True), (12, False)):
        table = Batching(Rules(max_rows=32, max_delay=1.0, measured=GAINS))
        step = table.next(burst(table, range(count), 10.0, gap=0.001), may_come=True)
        assert isinstance(step, Wait) == waits


def test_a_lone_caller_never_waits() -> None:
    """One who sends the next job after the answer to the last: nobody joins, however long we would wait."""
    table, now = Batching(Rules(max_rows=32, measured=GAINS)), 10.0
    for job in range(50):
        table.add(job, "k", 1, now)
        assert isinstance(table.next(now, may_come=True), Trip)
        now += 0.01
        table.arrived(now)
        table.ran("k", 1, 0.01)
        now += 0.001


def test_silence_ends_a_wait() -> None:
    """A burst that is over is not waited for until the last moment."""
    table = Batching(Rules(max_rows=32, max_delay=1.0, measured=GAINS))
    now = burst(table, range(10), 10.0)
    step = table.next(now, may_come=True)
    assert isinstance(step, Wait)
    assert step.until < now + 0.002


def test_other_work_is_not_kept_waiting() -> None:
    """Two buckets: one runs at once while the other forms."""
    table = Batching(Rules(max_rows=32, measured=GAINS))
    now = burst(table, range(4), 10.0)
    table.add(9, "other", 1, now)
    trip = table.next(now, may_come=True)
    assert isinstance(trip, Trip)
    assert [piece.job for piece in trip.batches[0]] == [0, 1, 2, 3]
    assert table.next(now, may_come=True) is None


def test_beside_a_run_only_a_full_one_starts() -> None:
    """What comes during a run joins the batch that forms; one that cannot grow need not wait for the run."""
    table = Batching(Rules(max_rows=8, lanes=2, measured=GAINS))
    table.add(0, "k", 1, 10.0)
    assert isinstance(table.next(10.0, may_come=False), Trip)
    burst(table, range(1, 8), 10.0)
    assert table.next(10.01, may_come=False) is None
    table.add(8, "k", 1, 10.01)
    assert isinstance(table.next(10.01, may_come=False), Trip)
    assert table.next(10.01, may_come=False) is None


# --- how much -----------------------------------------------------------------------------------


def test_short_runs_share_a_trip() -> None:
    """Twenty jobs of 40 us go in one hop, and of a hundred only as many as take a millisecond."""
    rules = Rules(measured=((1.0, 4e-5),))
    for count, expected in ((20, 20), (100, 25)):
        table = Batching(rules)
        burst(table, range(count), 10.0, gap=0.0)
        trip = table.next(10.0, may_come=True)
        assert isinstance(trip, Trip)
        assert len(trip.batches) == pytest.approx(expected, abs=1)
        assert all(len(batch) == 1 for batch in trip.batches)


def test_long_runs_take_a_lane_each() -> None:
    """Jobs of 10 ms of a model that is not batched run beside each other, one a trip."""
    table = Batching(Rules(lanes=2, measured=((1.0, 0.01),)))
    burst(table, range(3), 10.0, gap=0.0)
    assert table.next(10.0, may_come=True) == Trip(((Piece(0, 0, 1),),))
    assert table.next(10.0, may_come=True) == Trip(((Piece(1, 0, 1),),))
    assert table.next(10.0, may_come=True) is None


def test_unknown_runs_are_not_put_together() -> None:
    """Before the first run nobody knows how long it takes: no other job is made to wait for it."""
    table = Batching(Rules())
    burst(table, range(3), 10.0, gap=0.0)
    trip = table.next(10.0, may_come=True)
    assert isinstance(trip, Trip)
    assert len(trip.batches) == 1


def test_a_large_job_is_split_and_its_rest_shares() -> None:
    """Twenty rows of at most 8 a run: 8, 8, and 4 together with who comes after."""
    table = Batching(Rules(max_rows=8, lanes=9, measured=((1.0, 1.0), (8.0, 1.0))))
    table.add(0, "k", 20, 10.0)
    table.add(1, "k", 3, 10.0)
    table.add(2, "k", 2, 10.0)
    trips = []
    while isinstance(step := table.next(10.0, may_come=False), Trip):
        trips.append(step.batches[0])
    table.arrived(10.0)
    table.arrived(10.0)
    table.arrived(10.0)
    last = table.next(10.0, may_come=False)
    assert isinstance(last, Trip)
    assert [*trips, *last.batches] == [
        (Piece(0, 0, 8),),
        (Piece(0, 8, 8),),
        (Piece(0, 16, 4), Piece(1, 0, 3)),
        (Piece(2, 0, 2),),
    ]


def test_the_table_does_not_grow_with_new_shapes() -> None:
    """A model that sees another shape with every job."""
    table = Batching(Rules(max_rows=8, max_delay=0.0, measured=GAINS))
    for job in range(1000):
        table.add(job, ("shape", job), 1, float(job))
        assert isinstance(table.next(float(job), may_come=True), Trip)
        table.ran(("shape", job), 1, 0.01)
        table.arrived(float(job))
    assert len(table._buckets) <= 65


# --- what is learned ----------------------------------------------------------------------------


def test_cost_starts_from_the_card_and_follows_the_runs() -> None:
    """A machine three times as slow as the one that measured, seen with one size only; then with several."""
    cost = RunCost(GAINS)
    assert (cost.fixed, cost.per_row) == pytest.approx((0.009, 0.001))
    for _ in range(30):
        cost.observe(4, 3 * 0.013)
    assert (cost.fixed, cost.per_row) == pytest.approx((0.027, 0.003), rel=0.02)
    for k in range(200):
        rows = 1 + k % 8
        cost.observe(rows, 0.002 + 0.005 * rows)
    assert (cost.fixed, cost.per_row) == pytest.approx((0.002, 0.005), rel=0.1)


def test_cost_without_a_card_is_the_first_run() -> None:
    """Nothing is averaged with a guess."""
    cost = RunCost()
    cost.observe(2, 0.5)
    assert cost.seconds(2) == pytest.approx(0.5)


def test_only_jobs_that_join_others_count_as_arrivals() -> None:
    """Ten a second while busy are one in 100 ms; while idle nobody comes."""
    arrivals = Arrivals()
    assert arrivals.gap() == math.inf
    for k in range(50):
        arrivals.passed(k * 0.1, busy=True)
        arrivals.joined()
    assert arrivals.gap() == pytest.approx(0.1, rel=0.1)
