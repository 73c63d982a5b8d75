"""The minutes of a fleet, added up to what one policy would know that had seen all of them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qworker.policy.eviction import Gdsf, Usage
from qworker.policy.fleet_history import FleetUse, merged
from qworker.policy.history import MINUTE, Minute

NOW = 28_000_000


def minute(model: str, ago: int, requests: int, loads: int = 0, nbytes: int = 0) -> Minute:
    return Minute(NOW - ago, model, requests, loads, 0.5 * loads, 0.0, nbytes)


def use_of(rows: list[Minute]) -> dict[str, Usage]:
    use = FleetUse()
    for row in rows:
        use.add(row)
    return use.usages(NOW * MINUTE)


@example([(0, 0), (1, 1)])  # a minute without a call is the latest one
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 50)), min_size=1, max_size=30))
def test_counts_are_those_of_a_policy_that_saw_all(minutes: list[tuple[int, int]]) -> None:
    """Whatever the order in which minutes come: each use counts half after a half-life."""
    found = use_of([minute("a", ago, requests) for ago, requests in minutes])
    policy = Gdsf()
    for ago, requests in sorted(minutes, reverse=True):
        for _ in range(requests):
            policy.used("a", (NOW - ago + 0.5) * MINUTE)
    wanted = policy.history(NOW * MINUTE)
    assert found.keys() == wanted.keys()
    for model, usage in wanted.items():
        assert found[model].count == pytest.approx(usage.count, rel=1e-6)
        assert found[model].age == pytest.approx(usage.age)


def test_costs_are_the_last_measured() -> None:
    """A load in a minute tells bytes and seconds; minutes without one leave them."""
    found = use_of([minute("a", 9, 1, 2, 1_000), minute("a", 5, 1, 1, 2_000), minute("a", 1, 1)])
    assert (found["a"].load_seconds, found["a"].nbytes) == (0.5, 2_000)


def test_own_costs_win_over_the_fleets() -> None:
    """Another machine's disk is not this one's; its callers are."""
    own = {"a": Usage(2.0, 50.0, 3.0, 10.0, (1.0, 2.0)), "b": Usage(9.0, 50.0, 0.0, 0.0, (1.0, 2.0))}
    fleet = {"a": Usage(5.0, 70.0, 1.0, 20.0), "b": Usage(4.0, 7.0, 1.0, 20.0), "c": Usage(1.0, 1.0, 1.0, 1.0)}
    assert merged(own, fleet) == {
        "a": Usage(5.0, 50.0, 3.0, 10.0),
        "b": Usage(9.0, 7.0, 1.0, 20.0, (1.0, 2.0)),
        "c": Usage(1.0, 1.0, 1.0, 1.0),
    }
