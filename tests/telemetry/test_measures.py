"""What is added up where jobs and loads happen, and what that costs."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import CorruptModel, LoadFailed, StoreError
from qworker.telemetry.counters import Counters
from qworker.telemetry.measures import SECONDS, Histogram, Measures, ModelMeasures


@given(st.lists(st.floats(0.0, 100.0)))
def test_a_histogram_counts_each_value_once_in_the_bucket_that_holds_it(values: list[float]) -> None:
    """A bucket's end belongs to it, as Prometheus has it."""
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))
    for place, bound in enumerate(SECONDS):
        assert sum(histogram.counts[: place + 1]) == sum(value <= bound for value in values)


def test_a_job_is_in_all_its_histograms() -> None:
    """The three that are written in line are written as ``observe`` would."""
    measured, expected = ModelMeasures(), [Histogram() for _ in range(3)]
    for times in ((0.0, 0.001, 0.3), (0.2, 0.0, 40.0), (3.0, 0.0025, 0.0)):
        measured.job(*times, cold=times[0] > 1)
        for histogram, seconds in zip(expected, times, strict=True):
            histogram.observe(seconds)
    assert measured.jobs == 3
    assert measured.cold.count == 1
    for mine, other in zip((measured.queue, measured.wait, measured.run), expected, strict=True):
        assert (mine.counts, mine.sum) == (other.counts, other.sum)


def test_only_a_load_soon_after_its_unload_is_a_reload() -> None:
    """Within ten times its own load seconds: what it gave back was not worth its load."""
    measures = Measures()
    measures.loaded("first", 5.0)
    measures.unloaded("soon")
    measures.loaded("soon", 5.0)
    measures.unloaded("late")
    measures._left["late"] -= 60.0
    measures.loaded("late", 5.0)
    assert (measures.reloads, measures.reload_seconds, measures.loads.count) == (1, 5.0, 3)


def test_failed_loads_are_counted_by_the_kind_of_error() -> None:
    """Not by the wire code, which is the same for most of them."""
    measures = Measures()
    for error in (LoadFailed("a"), CorruptModel("b"), StoreError("c"), LoadFailed("d")):
        measures.load_failed(error)
    assert measures.load_failures == {"load_failed": 2, "corrupt_model": 1, "store_error": 1}


def test_counters_show_counts_alone() -> None:
    """``/state`` stays a page of numbers."""
    assert all(type(count) is int for count in Counters().as_dict().values())
    assert "loads" in Counters().as_dict()


def test_what_a_job_costs_is_a_small_share_of_a_job() -> None:
    """Less than two hundred appends to a list: about a microsecond, where a job takes a hundred."""
    measured, rounds = ModelMeasures(), 2000

    def measure() -> float:
        started = time.perf_counter()
        for _ in range(rounds):
            measured.job(0.003, 0.0001, 0.012, cold=False)
        return time.perf_counter() - started

    def compare() -> float:
        started = time.perf_counter()
        for _ in range(rounds):
            kept: list[int] = []
            for number in range(200):
                kept.append(number)  # noqa: PERF402 - the yardstick
        return time.perf_counter() - started

    assert min(measure() for _ in range(7)) < min(compare() for _ in range(7))
