"""Forecasts, plans that people edit, and the back-test that says whether to act."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.backtest import backtest
from qworker.policy.forecast import (
    HOUR,
    BadPlan,
    Fates,
    Forecast,
    Plan,
    Preload,
    due,
    dump_plan,
    is_over,
    make_plan,
    parse_plan,
    renewed,
)
from tests.simulate.workloads import WORKLOADS, clockwork

DAY = 86_400.0
MONDAY = 4 * DAY  # 1970-01-05

text = st.text(max_size=20)
plans = st.builds(
    Plan,
    st.integers(0, 2**31).map(float),
    st.booleans(),
    st.sampled_from(("free", "evict")),
    text,
    st.lists(
        st.builds(
            Preload,
            st.integers(0, 2**31).map(float),
            text.filter(bool),
            st.integers(0, 1_000).map(lambda n: n / 1_000),
            text,
        ),
        max_size=4,
    ).map(lambda rows: tuple(sorted(rows, key=lambda p: p.at))),
)


def test_the_same_hour_of_other_days_counts() -> None:
    """What came each day at eight is expected at eight, and not at nine."""
    forecast = Forecast()
    for day in range(5):
        forecast.observe("morning", MONDAY + day * DAY + 8 * HOUR + 100.0, requests=6)
    eight = forecast.expect("morning", MONDAY + 5 * DAY + 8 * HOUR)
    assert eight.probability == 1.0
    assert eight.requests == pytest.approx(6.0)
    assert "5 of the last 5 days" in eight.why
    assert forecast.expect("morning", MONDAY + 5 * DAY + 10 * HOUR).probability == 0.0


def test_the_same_hour_of_other_weeks_counts() -> None:
    """A model of Mondays is more likely on a Monday than on a Tuesday."""
    forecast = Forecast()
    forecast.observe("other", MONDAY)
    for week in range(4):
        forecast.observe("mondays", MONDAY + week * 7 * DAY + 8 * HOUR)
    monday = forecast.expect("mondays", MONDAY + 28 * DAY + 8 * HOUR).probability
    tuesday = forecast.expect("mondays", MONDAY + 29 * DAY + 8 * HOUR).probability
    assert monday > 0.5 > tuesday


def test_what_goes_on_for_hours_goes_on() -> None:
    """The hour just past counts, as far as this model's busy hours were followed by others."""
    forecast = Forecast()
    forecast.observe("other", 0.0)
    for hour in range(100, 106):
        forecast.observe("steady", hour * HOUR)
    expected = forecast.expect("steady", 106 * HOUR)
    assert expected.probability == pytest.approx(5 / 6)
    assert "hour before" in expected.why


def test_without_history_nothing_is_expected() -> None:
    """The first days give no forecast, and nor does a model that nobody knows."""
    forecast = Forecast()
    assert forecast.expect("a", 0.0).probability == 0.0
    forecast.observe("a", 0.0)
    assert forecast.expect("a", DAY).probability == 0.0


def test_old_counts_are_dropped_without_a_trace() -> None:
    """Forgetting what is older than any look back changes no expectation."""
    forecast, forgetful = Forecast(), Forecast()
    for day in range(60):
        for each in (forecast, forgetful):
            each.observe("a", day * DAY + (day % 3) * HOUR)
    forgetful.forget_before(60 * DAY)
    for hour in range(24):
        at = 60 * DAY + hour * HOUR
        assert forgetful.expect("a", at).probability == forecast.expect("a", at).probability


@given(plans)
def test_a_plan_can_be_written_and_read(plan: Plan) -> None:
    """Whatever text is in it, a plan comes back as it was."""
    assert parse_plan(dump_plan(plan)) == plan


def test_a_person_can_refuse_cut_and_add() -> None:
    """act = false stops all of it; rows can be removed and added by hand."""
    plan = Plan(0.0, True, "evict", "pays", (Preload(3_600.0, "a", 0.9, "often"), Preload(7_200.0, "b", 0.8, "often")))
    written = dump_plan(plan)
    assert due(parse_plan(written.replace("act = true", "act = false")), 3_600.0) == ()
    cut = written[: written.rindex("[[preload]]")] + '[[preload]]\nat = 1970-01-01T05:00:00Z\nmodel = "mine"\n'
    assert [p.model for p in due(parse_plan(cut), 3_600.0)] == ["a"]
    assert [p.model for p in due(parse_plan(cut), 18_000.0)] == ["mine"]
    assert due(parse_plan(cut), 7_300.0) == ()
    assert [p.model for p in due(parse_plan(written), 7_300.0)] == ["b"]


def test_a_preload_is_due_from_shortly_before_its_hour_to_its_end_and_once() -> None:
    """A load takes time; and what was ready and had to leave does not come back in the same hour."""
    a, b = Preload(36_000.0, "a", 0.9, "often"), Preload(39_600.0, "b", 0.8, "often")
    plan = Plan(0.0, True, "free", "pays", (a, b))
    assert due(plan, 35_000.0) == ()
    assert due(plan, 35_800.0) == (a,)
    assert due(plan, 39_599.0) == (a, b)
    assert due(plan, 39_599.0, {a}) == (b,)
    assert due(plan, 39_600.0) == (b,)


def test_a_refusal_stays_until_it_is_taken_back() -> None:
    """The next night's plan does not act either; where nothing would have paid, nothing was refused."""
    plan = Plan(DAY, True, "free", "pays", ())
    refused = parse_plan(dump_plan(plan).replace("act = true", "act = false"))
    assert not renewed(plan, refused).act
    assert not renewed(plan, renewed(plan, refused)).act
    assert renewed(plan, None).act
    assert renewed(plan, Plan(0.0, False, "off", "did not pay", ())).act
    assert is_over(plan, 2 * DAY)
    assert not is_over(plan, 2 * DAY - 1.0)


@pytest.mark.parametrize(
    "change",
    [
        ("version = 1", "version = 2"),
        ("act = true", 'act = "yes"'),
        ('tier = "evict"', 'tier = "disk"'),
        ('model = "a"', "model = 3"),
        ("probability = 0.900", "probability = nan"),
        ("[[preload]]", "[[preload]"),
        ('at = "1970-01-01T01:00:00+00:00"', 'at = "soon"'),
    ],
)
def test_a_broken_plan_is_refused(change: tuple[str, str]) -> None:
    """A plan that was edited wrongly says so and preloads nothing."""
    written = dump_plan(Plan(0.0, True, "evict", "pays", (Preload(3_600.0, "a", 0.9, "often"),)))
    assert change[0] in written
    with pytest.raises(BadPlan):
        parse_plan(written.replace(change[0], change[1], 1))


def test_preloads_pay_where_days_repeat() -> None:
    """A clockwork day is seen through: the back-test lets preloads act, and the plan has tomorrow's hours."""
    requests = clockwork(days=8, per_day=6)
    costs = dict.fromkeys({model for _, model in requests}, (100, 10.0))
    verdict = backtest(requests, costs, 600)
    assert verdict.tier == "evict"
    assert min(max(verdict.tried, key=lambda t: min(t.gain)).gain) > 0.3
    forecast = Forecast()
    for at, model in requests:
        forecast.observe(model, at)
    plan = make_plan(forecast, verdict.tier, verdict.why, 8 * DAY, least_probability=0.6)
    assert plan.act
    assert {(p.model, p.at) for p in plan.preloads} >= {("m05", 8 * DAY + 5 * HOUR), ("m20", 8 * DAY + 20 * HOUR)}


@pytest.mark.parametrize("name", ["zipf", "bursty", "drifting"])
def test_preloads_stay_off_where_they_do_not_pay(name: str) -> None:
    """On traffic without daily habits the back-test keeps preloading off, and says what it would have cost."""
    requests = WORKLOADS[name](3)
    costs = {model: (100, 10.0) for _, model in requests}
    verdict = backtest(requests, costs, 100 * len(costs) // 4)
    assert verdict.tier == "off"
    assert "no preload would have paid" in verdict.why
    assert sum(t.preloads for t in verdict.tried) > 0


def test_what_may_not_act_is_told_and_does_not() -> None:
    """Where only the place of others would pay, a worker that fills free bytes alone stays off."""
    requests = clockwork(days=8, per_day=6)
    costs = dict.fromkeys({model for _, model in requests}, (100, 10.0))
    verdict = backtest(requests, costs, 600, allowed=("free",))
    assert verdict.tier == "off"
    assert "evict x1.5: +" in verdict.why


def test_free_bytes_pay_where_large_models_leave_gaps() -> None:
    """A large model pushes out several small ones each day; when it goes, those of the hour are ready before they are
    asked for, at no cost to anybody, and a plan asks for as much likelihood as the back-test found worth it."""
    requests: list[tuple[float, str]] = []
    for day in range(8):
        requests.append((day * DAY + 3 * HOUR, "large"))
        requests += ((day * DAY + 8 * HOUR + 120.0 * i, f"m{i}") for i in range(5))
    costs = {"large": (500, 10.0)} | {f"m{i}": (100, 10.0) for i in range(5)}
    verdict = backtest(requests, costs, 550, allowed=("free",))
    assert verdict.tier == "free"
    assert verdict.least_probability == pytest.approx(verdict.margin / (1.0 + verdict.margin))
    best = next(t for t in verdict.tried if (t.tier, t.margin) == (verdict.tier, verdict.margin))
    assert best.used == best.preloads > 10


def test_a_short_history_proves_nothing() -> None:
    """Before some days are recorded, preloading stays off."""
    requests = [(i * 60.0, "a") for i in range(100)]
    assert backtest(requests, {"a": (1, 1.0)}, 10).tier == "off"
    assert backtest([], {}, 10).tier == "off"


def test_the_fate_of_each_preload_is_counted() -> None:
    """Used by the first request, wasted when it leaves before, open until then."""
    fates = Fates()
    for model in "abc":
        fates.preloaded(model, "each day at eight")
    fates.asked("a")
    fates.asked("a")
    fates.left("b")
    fates.left("a")
    assert (fates.made, fates.used, fates.wasted, list(fates.open)) == (3, 1, 1, ["c"])
