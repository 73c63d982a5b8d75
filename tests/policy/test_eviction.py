"""Eviction keys: what they remember, and that the default saves load seconds over LRU."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.eviction import HALF_LIFE, Eviction, Gdsf, Lru
from qworker.policy.residency import Residency, State

MIB = 1 << 20
HOUR = 3600.0


def replay(eviction: Eviction, requests: list[tuple[float, str]], sizes: dict[str, int], budget: int) -> float:
    """Load seconds that a trace costs on one worker, through the residency table itself."""
    residency = Residency(budget, eviction, min_residency=0.0)
    seconds = 0.0
    for now, model in requests:
        if not any(row.model == model and row.state is State.HOT for row in residency.snapshot(now)):
            for victim in residency.want(model, sizes[model], now).evict:
                residency.gone(victim.model, now)
            cost = load_seconds(sizes[model])
            residency.loaded(model, cost, now)
            seconds += cost
        residency.used(model, now)
    return seconds


def load_seconds(nbytes: int) -> float:
    """A fixed cost and a rate: small models are dear for their size."""
    return 2.0 + nbytes / (200 * MIB)


def skewed_trace(seed: int, models: int = 40, requests: int = 3_000) -> tuple[list[tuple[float, str]], dict[str, int]]:
    """Zipf popularity over three days, sizes from 50 MiB to 3 GiB, independent of popularity."""
    rng = random.Random(seed)
    names = [f"m{i}" for i in range(models)]
    sizes = {name: int(MIB * 50 * 60 ** rng.random()) for name in names}
    weights = [1.0 / (rank + 1) ** 0.9 for rank in range(models)]
    times = sorted(rng.uniform(0, 72 * HOUR) for _ in range(requests))
    return list(zip(times, rng.choices(names, weights, k=requests), strict=True)), sizes


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_default_costs_fewer_load_seconds_than_lru(seed: int) -> None:
    """On a skewed trace with a budget of a quarter of all bytes, by a tenth at least."""
    requests, sizes = skewed_trace(seed)
    budget = sum(sizes.values()) // 4
    lru, gdsf = replay(Lru(), requests, sizes, budget), replay(Gdsf(), requests, sizes, budget)
    assert 0 < gdsf < 0.9 * lru


def test_a_use_counts_half_after_a_week() -> None:
    """One use, a week, one more: 1.5, at the same load cost."""
    eviction = Gdsf()
    eviction.cost("m", 3.0, 2 * MIB)
    eviction.used("m", 100.0)
    assert eviction.key("m", 100.0) == pytest.approx(1.5)
    eviction.used("m", 100.0 + HALF_LIFE)
    assert eviction.key("m", 100.0 + HALF_LIFE) == pytest.approx(1.5 * 1.5)


def test_dear_small_and_popular_models_stay() -> None:
    """The key grows with load seconds and uses, and falls with bytes."""
    eviction = Gdsf()
    for model, seconds, mib, uses in (("base", 2.0, 100, 2), ("dear", 4.0, 100, 2), ("big", 2.0, 400, 2)):
        eviction.cost(model, seconds, mib * MIB)
        for _ in range(uses):
            eviction.used(model, 5.0)
    assert eviction.key("big", 6.0) < eviction.key("base", 6.0) < eviction.key("dear", 6.0)
    before = eviction.key("base", 6.0)
    eviction.used("base", 6.0)
    assert eviction.key("base", 6.0) > before


def test_the_count_outlives_the_eviction() -> None:
    """A model that comes back is as dear as its past, above the level of what left meanwhile."""
    eviction = Gdsf()
    eviction.cost("m", 1.0, MIB)
    for _ in range(10):
        eviction.used("m", 1.0)
    eviction.evicted("m", 1.0)
    assert eviction.level == pytest.approx(10.0)
    eviction.used("m", 1.0)
    assert eviction.key("m", 1.0) == pytest.approx(10.0 + 11.0)


EVENT = st.tuples(
    st.sampled_from(["used", "cost", "evicted"]), st.sampled_from("abcd"), st.floats(0.0, 1e6), st.floats(0.01, 1e3)
)


@given(events=st.lists(EVENT, max_size=40))
def test_the_level_never_falls_and_keys_change_on_events_only(events: list[tuple[str, str, float, float]]) -> None:
    """L is monotone over any history; time alone moves no key."""
    eviction, now, level = Gdsf(), 0.0, 0.0
    for kind, model, wait, seconds in events:
        now += wait
        if kind == "used":
            eviction.used(model, now)
        elif kind == "cost":
            eviction.cost(model, seconds, int(seconds * MIB) + 1)
        else:
            key = eviction.key(model, now)
            eviction.evicted(model, now)
            assert eviction.level >= key
        assert eviction.level >= level
        level = eviction.level
        assert eviction.key(model, now) == eviction.key(model, now + 1e9) >= 0.0


def test_a_measurement_moves_the_cost_and_does_not_replace_it() -> None:
    """One slow disk must not decide alone."""
    eviction = Gdsf()
    eviction.used("m", 0.0)
    eviction.cost("m", 10.0, MIB)
    eviction.cost("m", 110.0, MIB)
    assert eviction.key("m", 0.0) == pytest.approx(40.0)


@pytest.mark.parametrize("make", [Gdsf, Lru])
def test_a_history_comes_back_after_a_restart_on_another_clock(make: type[Gdsf | Lru]) -> None:
    """The order of the keys survives; ages are kept, not clock readings."""
    eviction = make()
    for when, model in itertools.product((10.0, 20.0, 30.0), "abc"):
        eviction.cost(model, 1.0 + ord(model) % 5, MIB)
        eviction.used(model, when + ord(model) % 3)
    again = make()
    again.restore(eviction.history(100.0), 5.0)

    def order(of: Eviction) -> list[str]:
        return sorted("abc", key=lambda model: of.key(model, 200.0))

    assert order(again) == order(eviction)
    assert again.history(5.0) == eviction.history(100.0)


def test_lru_ranks_by_last_use_and_the_never_used_lowest() -> None:
    """Loading is no use: a preloaded model that nobody asked for goes first."""
    eviction = Lru()
    eviction.cost("preloaded", 1.0, MIB)
    eviction.used("old", 1.0)
    eviction.used("new", 2.0)
    assert eviction.key("preloaded", 3.0) < eviction.key("old", 3.0) < eviction.key("new", 3.0)


@pytest.mark.parametrize("make", [Gdsf, Lru])
def test_a_clock_that_runs_back_makes_nobody_dearer(make: type[Gdsf | Lru]) -> None:
    """A count may not grow by more than one a use, whatever the clock does."""
    eviction = make()
    eviction.used("m", 100.0 + HALF_LIFE)
    eviction.used("m", 100.0)
    assert eviction.history(100.0)["m"].count == pytest.approx(2.0)
