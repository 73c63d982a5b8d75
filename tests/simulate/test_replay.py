"""The replay does what a worker does, second by second."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qworker.policy.choice import POLICIES
from qworker.policy.eviction import Usage
from qworker.simulate.bounds import BOUNDS, make_bound
from qworker.simulate.fleet import Fleet, Outcome
from qworker.simulate.replay import replay
from qworker.simulate.trace import Cost, Trace, make_trace
from tests.simulate.adversarial import longest_cold_wait
from tests.simulate.workloads import Requests, drifting, zipf

UNIT = 100
PLAIN = Fleet(UNIT, brake=False)


def run(requests: Requests, fleet: Fleet = PLAIN, *, load: float = 4.0, run_seconds: float = 0.0) -> Outcome:
    costs = {model: Cost(UNIT, load) for _, model in requests}
    return replay(make_trace(requests, costs, run_seconds=run_seconds), fleet, POLICIES["lru"], "lru")


def test_a_load_delays_its_requests_and_no_others() -> None:
    """Who comes during a load waits for its rest; who comes after does not wait."""
    outcome = run([(0.0, "a"), (1.0, "a"), (3.5, "a"), (4.0, "a"), (10.0, "a")])
    assert sorted(outcome.cold_waits) == [0.5, 3.0, 4.0]
    assert (outcome.loads, outcome.load_seconds, outcome.misses) == (1, 4.0, 3)


def test_a_newcomer_keeps_its_place_for_a_while() -> None:
    """B waits for A's load, then for A's minimum residency, then for its own load."""
    outcome = run([(0.0, "a"), (1.0, "b")])
    assert sorted(outcome.cold_waits) == [4.0, 4.0 + 5.0 + 4.0 - 1.0]
    assert outcome.evictions == 1


def test_loads_are_limited_by_the_slots() -> None:
    """Four models at once with two slots: two load, two wait for them."""
    requests = [(0.0, model) for model in "abcd"]
    assert sorted(run(requests, Fleet(4 * UNIT, load_slots=2)).cold_waits) == [4.0, 4.0, 8.0, 8.0]
    assert sorted(run(requests, Fleet(4 * UNIT, load_slots=4)).cold_waits) == [4.0] * 4


def test_workers_share_the_models() -> None:
    """Two workers hold what one cannot, and no model is loaded on both."""
    requests = [(float(i), "ab"[i % 2]) for i in range(100)]
    one, two = run(requests), run(requests, Fleet(UNIT, workers=2))
    assert two.loads == 2
    assert one.loads > 10


def test_a_busy_model_stays_until_its_jobs_are_done() -> None:
    """Jobs in hand keep a model; past max_cold_wait it must go, but not under its jobs."""
    requests = [(0.0, "a"), (20.0, "a"), (21.0, "b")]
    outcome = run(requests, run_seconds=15.0)
    assert max(outcome.cold_waits) == pytest.approx(20.0 + 15.0 - 21.0 + 4.0)


def test_an_overdue_model_ends_endless_business() -> None:
    """A model that always has jobs in hand gives way after max_cold_wait, and its own jobs go on after."""
    requests = [(i * 0.5, "a") for i in range(600)] + [(100.0, "b")]
    outcome = run(requests, run_seconds=2.0)
    longest = longest_cold_wait(make_trace(requests, {"a": Cost(UNIT, 4.0), "b": Cost(UNIT, 4.0)}), PLAIN, 2)
    assert outcome.models["b"].loads == 1
    assert 30.0 <= outcome.longest_wait <= longest
    assert outcome.models["a"].loads == 2


def test_jobs_beyond_the_prefetch_wait_for_the_ones_before() -> None:
    """With one job in hand at a time, they run one after another."""
    outcome = run([(0.0, "a")] * 3, Fleet(UNIT, prefetch=1), run_seconds=2.0)
    assert sorted(outcome.cold_waits) == [4.0, 6.0, 8.0]
    outcome = run([(0.0, "a"), (10.0, "a"), (10.0, "a")], Fleet(UNIT, prefetch=1), run_seconds=2.0)
    assert sorted(outcome.queue_waits) == [2.0]


def test_what_is_too_large_is_refused_and_harms_nobody() -> None:
    """Requests for a model above the budget are counted; the others are served as if it were not there."""
    costs = {"a": Cost(UNIT, 4.0), "huge": Cost(2 * UNIT, 9.0)}
    trace = make_trace([(0.0, "huge"), (0.0, "a"), (5.0, "huge")], costs)
    outcome = replay(trace, PLAIN, POLICIES["gdsf"])
    assert outcome.refused == 2
    assert list(outcome.cold_waits) == [4.0]


def test_a_window_gathers_jobs_into_one_load() -> None:
    """With a group window two models that alternate load less often, and wait longer, by no more than it."""
    requests = [(i * 3.0, "ab"[i % 2]) for i in range(400)]
    without, grouped = run(requests), run(requests, Fleet(UNIT, group_window=40.0, brake=False))
    assert grouped.loads < without.loads / 2
    assert grouped.longest_wait <= 40.0 + without.longest_wait


def test_a_window_holds_nobody_while_bytes_are_free() -> None:
    """First loads into an empty worker start at once."""
    outcome = run([(0.0, "a"), (0.0, "b")], Fleet(2 * UNIT, group_window=60.0))
    assert list(outcome.cold_waits) == [4.0, 4.0]


def test_a_claim_without_room_is_made_again() -> None:
    """A claim that waited too long gives its slot back, and its jobs are served after the sweep."""
    requests = [(0.0, "a"), (10.0, "a"), (11.0, "b")]
    outcome = run(requests, Fleet(UNIT, claim_timeout=5.0, brake=False), run_seconds=30.0)
    assert outcome.timeouts > 0
    assert outcome.models["b"].loads == 1


def plain_lru(requests: Requests, places: int) -> int:
    """Loads of an LRU cache of equal models, written down on its own."""
    cache: OrderedDict[str, None] = OrderedDict()
    loads = 0
    for _, model in requests:
        if model not in cache:
            loads += 1
            if len(cache) == places:
                cache.popitem(last=False)
        cache[model] = None
        cache.move_to_end(model)
    return loads


@pytest.mark.parametrize("make", [zipf, drifting])
def test_instant_loads_count_like_a_textbook_cache(make) -> None:
    """Without load times and residency rules, LRU here is LRU: the same number of loads, exactly."""
    requests = make(7, requests=4_000)
    fleet = Fleet(20 * UNIT, min_residency=0.0, brake=False)
    assert run(requests, fleet, load=0.0).loads == plain_lru(requests, 20)


def test_belady_beats_all_where_it_must() -> None:
    """With equal models and instant loads, nothing loads less than Belady."""
    requests = drifting(7, requests=4_000)
    trace = make_trace(requests, {model: Cost(UNIT, 1e-6) for _, model in requests})
    fleet = Fleet(20 * UNIT, min_residency=0.0, brake=False)
    best = replay(trace, fleet, make_bound("belady", trace)).loads
    assert all(replay(trace, fleet, make).loads >= best for make in POLICIES.values())
    assert len(BOUNDS) == 2


def test_the_same_trace_gives_the_same_outcome() -> None:
    """No chance, no clock: two replays agree in everything."""
    trace = make_trace(zipf(2, requests=3_000), seed=5)
    fleet = Fleet(trace.total_bytes // 10, workers=2)
    first, second = (replay(trace, fleet, POLICIES["gdsf"]) for _ in range(2))
    assert first == second


small = st.lists(st.tuples(st.floats(0, 300), st.sampled_from("abcdef")), min_size=1, max_size=60)
fleets = st.builds(
    Fleet,
    st.integers(60, 400),
    workers=st.integers(1, 3),
    load_slots=st.integers(1, 3),
    min_residency=st.floats(1, 10),
    max_cold_wait=st.floats(5, 40),
    unload_seconds=st.sampled_from((0.0, 0.5)),
    claim_seconds=st.sampled_from((0.0, 0.01)),
    group_window=st.sampled_from((0.0, 15.0)),
    brake=st.booleans(),
)
COSTS = {model: Cost(40 + 17 * i, 1.0 + 2.0 * i) for i, model in enumerate("abcdef")}


@settings(max_examples=150, deadline=None)
@given(small, fleets, st.sampled_from(list(POLICIES)), st.sampled_from((0.0, 1.5)))
def test_whatever_comes_everybody_is_answered_in_time(
    requests: Requests, fleet: Fleet, policy: str, run: float
) -> None:
    """No budget is passed, no request is lost, and waits for loads keep their bound."""
    trace = make_trace(requests, COSTS, run_seconds=run)
    outcome = replay(trace, fleet, POLICIES[policy])
    assert outcome.peak <= fleet.budget
    cold = len(outcome.cold_waits)
    assert cold + outcome.refused == outcome.misses
    assert min(outcome.cold_waits, default=0.0) >= 0.0
    too_big = sum(1 for _, model in requests if COSTS[model].nbytes > fleet.budget)
    assert outcome.refused == too_big
    if run == 0.0 and outcome.timeouts == 0 and not too_big:
        assert outcome.longest_wait <= longest_cold_wait(trace, fleet, outcome.most_cold) + 0.1
    assert outcome.loads == sum(totals.loads for totals in outcome.models.values())


def test_an_empty_trace_is_no_trouble() -> None:
    """Nothing asked, nothing loaded."""
    outcome = replay(Trace([], [], (), {}), PLAIN, POLICIES["gdsf"])
    assert (outcome.requests, outcome.loads, outcome.wait_p99, outcome.churn) == (0, 0, 0.0, 0.0)


def test_a_history_makes_a_start_warm() -> None:
    """The dearest are loaded before anybody asks, up to their share of the budget, and by one of the workers each."""
    costs = {name: Cost(100, 4.0) for name in "abcd"}
    trace = make_trace([(100.0, "d"), (160.0, "a"), (161.0, "b"), (162.0, "c")], costs)
    history = {name: Usage(count, 60.0, 4.0, 100.0) for name, count in (("a", 9.0), ("b", 5.0), ("c", 1.0))}
    cold = replay(trace, Fleet(400), POLICIES["gdsf"])
    warm = replay(trace, Fleet(400, warm_share=0.8), POLICIES["gdsf"], history=history)
    assert (cold.misses, cold.preloads) == (4, 0)
    assert (warm.misses, warm.preloads, warm.loads) == (2, 2, 4)
    assert warm.preload_seconds == 8.0
    two = replay(trace, Fleet(400, workers=2), POLICIES["gdsf"], history=history)
    assert (two.preloads, two.loads) == (3, 4)
