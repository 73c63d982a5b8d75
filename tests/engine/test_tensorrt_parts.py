"""The pure parts of the TensorRT backend: layouts, the account, the trial of a graph."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.engine.tensorrt.graphs import GRAPH_RUNS, PLAIN_RUNS, Trial
from qworker.engine.tensorrt.layout import ALIGNMENT, Bounds, aligned, choose_profile, out_of_range, place
from qworker.engine.tensorrt.ledger import Entry, Ledger

SIZES = st.integers(min_value=0, max_value=64)


@st.composite
def bounds(draw: st.DrawFn, rank: int = 2) -> Bounds:
    low, best, high = zip(*(sorted(draw(st.tuples(SIZES, SIZES, SIZES))) for _ in range(rank)), strict=True)
    return Bounds(low, best, high)


@given(st.lists(bounds(), min_size=1, max_size=4), st.tuples(SIZES, SIZES))
def test_the_chosen_profile_takes_the_shape(all_bounds: list[Bounds], shape: tuple[int, int]) -> None:
    """And there is none only if none takes it; then the refusal names shape and ranges."""
    profiles = [{"x": one} for one in all_bounds]
    chosen = choose_profile(profiles, {"x": shape})
    if chosen is None:
        assert not any(one.takes(shape) for one in all_bounds)
        assert str(all_bounds[0]) in out_of_range(profiles, {"x": shape})
    else:
        assert all_bounds[chosen].takes(shape)
        distance = [abs(math.log2((math.prod(shape) + 1) / (math.prod(one.opt) + 1))) for one in all_bounds]
        assert all(
            distance[chosen] <= other for other, one in zip(distance, all_bounds, strict=True) if one.takes(shape)
        )


@given(st.dictionaries(st.text(min_size=1), st.integers(min_value=0, max_value=10_000), max_size=8))
def test_tensors_do_not_overlap_and_are_aligned(sizes: dict[str, int]) -> None:
    """An empty tensor has a place of its own too: TensorRT takes no null address."""
    offsets, end = place(sizes)
    spans = sorted((offsets[name], offsets[name] + max(size, 1)) for name, size in sizes.items())
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert end >= (spans[-1][1] if spans else 0)


@given(st.integers(min_value=0, max_value=1 << 40))
def test_aligned_is_the_next_multiple(nbytes: int) -> None:
    assert aligned(nbytes) % ALIGNMENT == 0
    assert 0 <= aligned(nbytes) - nbytes < ALIGNMENT


def test_a_load_alone_is_measured() -> None:
    """What the device's use grew by is the engine's own."""
    ledger = Ledger(baseline=100, total=1000)
    mark = ledger.begin()
    ledger.end()
    ledger.enter(1, Entry("m", 40, 5, measured=False))
    ledger.measured(1, mark, 50)
    statement = ledger.statement(used=160, arena=10)
    assert statement.engines == (Entry("m", 50, 5, measured=True),)
    assert statement.drift == 0


@pytest.mark.parametrize("disturbance", ["load", "unload", "load before"])
def test_what_moved_meanwhile_is_nobodys_measurement(disturbance: str) -> None:
    """Then the plan's own figure stands."""
    ledger = Ledger(baseline=0, total=1000)
    if disturbance == "load before":
        ledger.begin()
    mark = ledger.begin()
    if disturbance == "load":
        ledger.begin()
    if disturbance == "unload":
        ledger.gone(7)
    ledger.enter(1, Entry("m", 40, 5, measured=False))
    ledger.measured(1, mark, 500)
    assert ledger.statement(40, 0).engines == (Entry("m", 40, 5, measured=False),)


def test_the_baseline_is_what_is_used_when_nothing_is_there() -> None:
    """Kernels that were loaded stay until the process ends: they are no drift."""
    ledger = Ledger(baseline=100, total=1000)
    ledger.enter(1, Entry("m", 50, 0, measured=True))
    assert ledger.statement(used=180, arena=0).drift == 30
    ledger.gone(1)
    assert ledger.statement(used=130, arena=0).drift == 0
    ledger.enter(2, Entry("m", 50, 0, measured=True))
    assert ledger.statement(used=180, arena=0).drift == 0


@pytest.mark.parametrize(("with_graph", "stays"), [(0.5, True), (0.99, False), (2.0, False)])
def test_a_graph_stays_only_where_it_is_clearly_faster(with_graph: float, stays: bool) -> None:
    """The first runs of either kind count nothing: they load and capture."""
    trial = Trial()
    for number in range(PLAIN_RUNS):
        assert not trial.wants_graph
        trial.timed(1.0 if number > 1 else 99.0, graph=False)
    for number in range(GRAPH_RUNS):
        assert trial.wants_graph
        trial.timed(with_graph if number > 1 else 99.0, graph=True)
    assert trial.wants_graph is stays
