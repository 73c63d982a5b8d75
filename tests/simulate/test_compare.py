"""Policies side by side: the figures that the default is chosen for, the suggestion, and the page."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from qworker.policy.choice import DEFAULT_POLICY, POLICIES
from qworker.simulate.compare import as_json, compare, size, suggestion
from qworker.simulate.fleet import Fleet
from qworker.simulate.replay import replay
from qworker.simulate.report import html
from qworker.simulate.trace import Cost, make_trace
from tests.simulate.workloads import WORKLOADS, geometric_mean, synthetic, zipf

SHARES = (0.10, 0.25, 0.50)


def test_the_default_beats_lru_on_the_synthetic_set() -> None:
    """Load seconds over five kinds of traffic and three budgets: 12 % fewer at least, nowhere 3 % more."""
    ratios: list[float] = []
    for name in WORKLOADS:
        trace = synthetic(name, seed=11)
        for share in SHARES:
            fleet = Fleet(int(trace.total_bytes * share))
            seconds = [replay(trace, fleet, POLICIES[policy]).load_seconds for policy in (DEFAULT_POLICY, "lru")]
            ratios.append(seconds[0] / seconds[1])
    assert geometric_mean(ratios) <= 0.88
    assert max(ratios) <= 1.03


def test_a_comparison_is_one_object_by_policy() -> None:
    """The asked policies first, LRU and the offline ones always; figures that hang together."""
    trace = make_trace(zipf(1, requests=3_000), seed=1)
    comparison = compare(trace, Fleet(trace.total_bytes // 4), ["rate", "gdsf"])
    told = as_json(comparison)
    assert list(told) == ["rate", "gdsf", "lru", "clairvoyant", "belady"]
    assert told["lru"]["relative_to_lru"] == 1.0
    assert min(told["clairvoyant"]["regret"], told["belady"]["regret"]) == 0.0
    for row in told.values():
        assert row["requests"] == 3_000
        assert row["load_seconds"] > 0.0
        assert row["wait_p50"] <= row["wait_p99"] <= row["wait_max"]
        assert row["peak_bytes"] <= row["budget_bytes"]
    assert told["rate"]["suggestion"] == suggestion(comparison)
    assert "suggestion" not in told["gdsf"]


def test_more_memory_is_suggested_where_it_pays() -> None:
    """Five models in turn where four fit: one more place ends all reloads, and the sentence says so."""
    trace = make_trace([(i * 60.0, f"m{i % 5}") for i in range(500)], {f"m{i}": Cost(2**30, 10.0) for i in range(5)})
    comparison = compare(trace, Fleet(4 * 2**30), offline=False)
    assert suggestion(comparison) == "+1 GiB a worker (to 5 GiB) would save 99% of the load seconds"
    roomy = compare(trace, Fleet(20 * 2**30), offline=False)
    assert suggestion(roomy).startswith("5 GiB a worker would do")


def test_other_budgets_are_tried_on_the_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """On long traces the curve comes from the last requests, and its base too, so that it is fair."""
    trace = make_trace(zipf(1, requests=3_000), seed=1)
    fleet = Fleet(trace.total_bytes // 4)
    monkeypatch.setattr("qworker.simulate.compare.CURVE_REQUESTS", 1_000)
    comparison = compare(trace, fleet, offline=False)
    late = make_trace(zipf(1, requests=3_000)[-1_000:], trace.costs)
    base = replay(late, fleet, POLICIES["gdsf"]).load_seconds
    for point in comparison.curve:
        seconds = replay(late, replace(fleet, budget=point.budget), POLICIES["gdsf"]).load_seconds
        assert point.load_seconds == pytest.approx(seconds)
        assert point.saved_share == pytest.approx(1.0 - seconds / base)


def test_processes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread over processes or not, the figures are the same."""
    monkeypatch.setattr("qworker.simulate.compare._SMALL", 0)
    trace = make_trace(zipf(1, requests=2_000), seed=1)
    fleet = Fleet(trace.total_bytes // 4)
    assert as_json(compare(trace, fleet, processes=2)) == as_json(compare(trace, fleet))


def test_a_million_requests_take_seconds() -> None:
    """At the rate measured here, a million requests under three policies stay under a minute of one core."""
    trace = make_trace(zipf(1, requests=50_000, models=200, slope=1.2), seed=1)
    fleet = Fleet(trace.total_bytes // 4)
    began = time.process_time()
    for name in ("gdsf", "rate", "lru"):
        replay(trace, fleet, POLICIES[name])
    assert time.process_time() - began < 60.0 * 50_000 / 1_000_000


def test_an_unknown_policy_is_refused() -> None:
    """The message names those that exist."""
    trace = make_trace([(0.0, "a")])
    with pytest.raises(ValueError, match="gdsf, rate, lru, s3fifo"):
        compare(trace, Fleet(10), ["mru"])


def test_the_page_needs_nothing_else() -> None:
    """One file: no script, nothing fetched, names escaped, plots that are well-formed."""
    evil = "<script>alert(1)</script>&"
    requests = [(at, evil if model == "m000" else model) for at, model in zipf(1, requests=2_000)]
    trace = make_trace(requests, seed=1)
    page = html(compare(trace, Fleet(trace.total_bytes // 4)), "a <b> title")
    assert "<script" not in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) == 4
    for plot in plots:
        assert len(list(ET.fromstring(plot).iter())) > 5
        assert "nan" not in plot
        assert "inf" not in plot


def test_the_page_of_a_trace_without_a_miss() -> None:
    """All bytes fit, one model, one load: nothing divides by zero."""
    trace = make_trace([(5.0, "a")], {"a": Cost(10, 0.0)})
    assert "</html>" in html(compare(trace, Fleet(100)), "one")


def test_sizes_for_people() -> None:
    """Three digits and a unit."""
    assert [size(n) for n in (12, 2_048, 5 * 2**30, 3 * 2**40)] == ["12 B", "2 KiB", "5 GiB", "3 TiB"]
