"""Which jobs are refused since they cannot be done in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.batching import Batching, Rules, Trip
from qworker.policy.deadline import CAUTION, Estimate, hopeless

SECONDS = st.floats(0, 1e6, allow_nan=False)


@given(SECONDS, SECONDS, SECONDS)
def test_refused_is_what_is_well_beyond_its_time(left: float, queue: float, run: float) -> None:
    """Never a job that the estimate itself lets through; always one with less time than the cautious estimate."""
    why = hopeless(left, Estimate(queue, run))
    assert (why is not None) == ((queue + run) * CAUTION > left)


def test_the_refusal_tells_the_estimate() -> None:
    """What it is made of, and what there is."""
    why = hopeless(1.5, Estimate(queue=12.0, run=0.25))
    assert why is not None
    assert "has 1.5 s" in why
    assert "12.2 s (queue 12 + run 0.25)" in why


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_estimate_of_a_model_with_work(lanes: int) -> None:
    """What runs counts with what is left of it, what waits with all of it; lanes share it."""
    table = Batching(Rules(lanes=lanes, measured=((1, 2.0),)))
    assert table.expected("k", 1, 0.0) == (0.0, 2.0)
    table.add(1, "k", 1, 0.0, alone=True)
    assert isinstance(table.next(0.0, may_come=False), Trip)
    assert table.expected("k", 1, 0.5) == (1.5 / lanes, 2.0)
    for job in (2, 3):
        table.add(job, "k", 1, 0.5, alone=True)
    assert table.expected("k", 1, 0.5) == (5.5 / lanes, 2.0)
    assert table.expected("k", 1, 60.0) == (4.0 / lanes, 2.0), "what runs for longer than expected is about to end"
    table.drop(2)
    table.drop(3)
    table.arrived(1.0)
    assert table.expected("k", 1, 1.0) == (0.0, 2.0)


def test_the_estimate_of_a_batched_model() -> None:
    """Jobs that run together are not counted as if each ran alone; one too large for a run takes several."""
    table = Batching(Rules(max_rows=8, measured=((1, 1.0), (8, 1.0))))
    for job in range(8):
        table.add(job, "k", 1, 0.0)
    assert table.expected("k", 1, 0.0) == (1.0, 1.0)
    assert table.expected("k", 30, 0.0) == (1.0, 4.0)
    assert table.expected("a new shape", 1, 0.0) == (1.0, 1.0)
