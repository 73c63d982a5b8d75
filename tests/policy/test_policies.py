"""The policies beside the default one, and what all of them promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.choice import POLICIES, make_eviction
from qworker.policy.eviction import Eviction, Gdsf
from qworker.policy.rate import Rate
from qworker.policy.s3fifo import S3Fifo

MIB = 1 << 20
HOUR = 3_600.0

events = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from(("used", "cost", "evicted")), st.floats(0.0, 10_000.0)),
    max_size=60,
)


def play(eviction: Eviction, happened: list[tuple[str, str, float]]) -> float:
    now = 0.0
    for model, what, passed in happened:
        now += passed
        if what == "used":
            eviction.used(model, now)
        elif what == "cost":
            eviction.cost(model, 2.0, 100 * MIB)
        else:
            eviction.evicted(model, now)
    return now


@pytest.mark.parametrize("name", POLICIES)
@given(happened=events)
def test_ranking_many_says_what_ranking_one_says(name: str, happened: list[tuple[str, str, float]]) -> None:
    """``keys`` is ``key`` for each, whatever happened before."""
    eviction = make_eviction(name)
    now = play(eviction, happened)
    models = list("abcdef")
    assert eviction.keys(models, now) == [eviction.key(model, now) for model in models]


@pytest.mark.parametrize("name", POLICIES)
@given(happened=events)
def test_history_survives_a_change_of_policy(name: str, happened: list[tuple[str, str, float]]) -> None:
    """Each policy takes over what any other kept, and tells it on unchanged."""
    old = make_eviction(name)
    now = play(old, happened)
    kept = old.history(now)
    for other in POLICIES:
        new = make_eviction(other)
        new.restore(kept, 50.0)
        after = new.history(50.0)
        assert after.keys() == kept.keys()
        for model, usage in after.items():
            assert usage.count == kept[model].count
            assert usage.age == pytest.approx(kept[model].age)
            assert usage.load_seconds == kept[model].load_seconds


def test_rate_comes_back_with_its_rates() -> None:
    """A restart changes no key of ``rate``."""
    rate = Rate()
    for i in range(30):
        rate.used("a", i * 100.0)
    rate.cost("a", 5.0, 100 * MIB)
    again = Rate()
    again.restore(rate.history(4_000.0), 9_000.0)
    assert again.key("a", 9_000.0) == pytest.approx(rate.key("a", 4_000.0))


def test_rate_forgets_a_burst_that_gdsf_keeps() -> None:
    """A burst of yesterday counts less than a few uses of the last hour."""
    rate, gdsf = Rate(), Gdsf()
    for eviction in (rate, gdsf):
        for i in range(60):
            eviction.used("burst", i * 10.0)
        for i in range(8):
            eviction.used("lately", 24 * HOUR + i * 400.0)
        for model in ("burst", "lately"):
            eviction.cost(model, 5.0, 100 * MIB)
    now = 25 * HOUR
    assert rate.key("burst", now) < rate.key("lately", now)
    assert gdsf.key("burst", now) > gdsf.key("lately", now)


def test_rate_weighs_cost_by_bytes() -> None:
    """Of two models used alike, the one that is cheap to reload for its bytes goes first."""
    rate = Rate()
    for model, seconds, mib in (("cheap", 2.0, 400), ("dear", 20.0, 100)):
        rate.used(model, 0.0)
        rate.cost(model, seconds, mib * MIB)
    assert rate.key("cheap", 1.0) < rate.key("dear", 1.0)


def resident(policy: S3Fifo, model: str, now: float, uses: int = 1) -> None:
    policy.cost(model, 1.0, 10 * MIB)
    for _ in range(uses):
        policy.used(model, now)


def test_s3fifo_lets_one_offs_go_before_what_proved_itself() -> None:
    """A model used twice stays, newcomers that were asked for once leave in the order in which they came."""
    policy = S3Fifo()
    resident(policy, "proved", 0.0, uses=3)
    for i in range(5):
        resident(policy, f"once{i}", 1.0 + i)
    order = sorted(["proved", *(f"once{i}" for i in range(5))], key=lambda model: policy.key(model, 10.0))
    assert order == ["once0", "once1", "once2", "once3", "once4", "proved"]


def test_s3fifo_remembers_who_left_too_early() -> None:
    """A one-off that comes back skips the newcomers' queue."""
    policy = S3Fifo()
    resident(policy, "back", 0.0)
    policy.evicted("back", 1.0)
    resident(policy, "new", 2.0)
    resident(policy, "back", 3.0)
    assert policy.key("new", 4.0) < policy.key("back", 4.0)


def test_s3fifo_passes_the_used_ones_once_for_each_use() -> None:
    """An established model that nobody uses any more sinks, pass by pass, below one in use."""
    policy = S3Fifo()
    for model in ("faded", "busy"):
        resident(policy, model, 0.0)
        policy.evicted(model, 0.0)
        resident(policy, model, 1.0, uses=4)
    for round_ in range(8):
        policy.used("busy", 2.0 + round_)
        policy.used("busy", 2.0 + round_)
        filler = f"filler{round_}"
        resident(policy, filler, 2.0 + round_)
        policy.evicted(filler, 2.0 + round_)
        resident(policy, filler, 2.5 + round_)
        policy.evicted(filler, 2.5 + round_)
    assert policy.key("faded", 20.0) < policy.key("busy", 20.0)


@pytest.mark.parametrize("name", POLICIES)
def test_reasons_are_for_people(name: str) -> None:
    """``explain`` tells uses, recency and the price of a reload."""
    eviction = make_eviction(name)
    assert eviction.explain("a", 0.0) == "never used"
    eviction.used("a", 0.0)
    eviction.used("a", 0.0)
    eviction.cost("a", 12.0, 300 * MIB)
    told = eviction.explain("a", 7_200.0)
    assert "2.0 h ago" in told
    assert "12 s" in told
    assert "300 MiB" in told


def test_unknown_policy_is_named() -> None:
    """A name that does not exist is answered with those that do."""
    with pytest.raises(ValueError, match=r"gdsf, rate, lru, s3fifo.*'mru'"):
        make_eviction("mru")
