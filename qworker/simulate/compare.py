"""Replays one trace under several policies and budgets, and says what each would have cost."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from qworker.policy.choice import DEFAULT_POLICY, POLICIES
from qworker.simulate.bounds import BOUNDS, make_bound
from qworker.simulate.fleet import Fleet, Outcome
from qworker.simulate.replay import replay
from qworker.simulate.trace import Trace

FACTORS = (0.5, 0.75, 1.25, 1.5, 2.0, 3.0)
"""Budgets that are tried beside the given one."""
CURVE_REQUESTS = 250_000
"""Requests, the last ones of the trace, that other budgets are tried on."""
WORTH_ADDING, WORTH_GIVING_UP = 0.10, 0.03
_SMALL = 200_000
"""Requests times replays below which a second process costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Point:
    """One other budget, with the first policy."""

    budget: int
    load_seconds: float
    saved_share: float
    """Of the load seconds at the given budget; below 0 it costs."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """``outcomes``: by policy, the asked ones first, then ``lru`` and the offline ones."""

    trace: Trace
    fleet: Fleet
    outcomes: dict[str, Outcome]
    curve: tuple[Point, ...]

    @property
    def first(self) -> Outcome:
        """The policy that was asked for first: what suggestions are about."""
        return next(iter(self.outcomes.values()))

    @property
    def lru(self) -> Outcome:
        return self.outcomes["lru"]

    def relative(self, outcome: Outcome) -> float:
        """Load seconds as a share of LRU's."""
        return outcome.load_seconds / self.lru.load_seconds if self.lru.load_seconds > 0.0 else 1.0

    def regret(self, outcome: Outcome) -> float:
        """How much more it loads than the better offline policy: 0.25 is a quarter more."""
        best = min((self.outcomes[name].load_seconds for name in BOUNDS if name in self.outcomes), default=0.0)
        return max(0.0, outcome.load_seconds / best - 1.0) if best > 0.0 else 0.0


def compare(
    trace: Trace,
    fleet: Fleet,
    policies: Sequence[str] = (DEFAULT_POLICY,),
    *,
    offline: bool = True,
    curve: bool = True,
    processes: int = 1,
) -> Comparison:
    """What each policy makes of the trace; LRU is always among them.

    Raises ValueError for a policy that does not exist.
    """
    if unknown := [name for name in policies if name not in POLICIES and name not in BOUNDS]:
        raise ValueError(f"expected policies of {', '.join(POLICIES)}, found {', '.join(unknown)}")
    names = list(dict.fromkeys([*policies, "lru", *(BOUNDS if offline else ())]))
    late = _last(trace, CURVE_REQUESTS)
    budgets = _budgets(trace, fleet) if curve else []
    runs = [_Run(name, fleet, late=False) for name in names]
    runs += [_Run(names[0], replace(fleet, budget=budget), late=True) for budget in budgets]
    if budgets and late is not trace:
        runs.append(_Run(names[0], fleet, late=True))
    done = _all(trace, late, runs, processes)
    outcomes = dict(zip(names, done, strict=False))
    tried = done[len(names) : len(names) + len(budgets)]
    base = done[-1] if budgets and late is not trace else done[0]
    return Comparison(trace, fleet, outcomes, tuple(_point(outcome, base) for outcome in tried))


def suggestion(comparison: Comparison) -> str:
    """What another budget would do, in one sentence."""
    budget = comparison.fleet.budget
    more = [p for p in comparison.curve if p.budget > budget and p.saved_share >= WORTH_ADDING]
    if more:
        best = max(more, key=lambda point: point.saved_share / (point.budget - budget))
        return (
            f"+{size(best.budget - budget)} a worker (to {size(best.budget)}) would save "
            f"{best.saved_share:.0%} of the load seconds"
        )
    fewer = [p for p in comparison.curve if p.budget < budget and p.saved_share >= -WORTH_GIVING_UP]
    if fewer:
        least = min(fewer, key=lambda point: point.budget)
        return f"{size(least.budget)} a worker would do: it costs {max(0.0, -least.saved_share):.0%} more load seconds"
    return "the budget fits: more memory would save little, less would cost" if comparison.curve else ""


def as_json(comparison: Comparison) -> dict[str, Any]:
    """One object keyed by policy. Times are seconds, sizes bytes, shares are of 1."""
    told: dict[str, Any] = {}
    for name, outcome in comparison.outcomes.items():
        told[name] = {
            "requests": outcome.requests,
            "misses": outcome.misses,
            "refused": outcome.refused,
            "loads": outcome.loads,
            "load_seconds": round(outcome.load_seconds, 6),
            "relative_to_lru": round(comparison.relative(outcome), 6),
            "regret": round(comparison.regret(outcome), 6),
            "wait_p50": round(outcome.wait_p50, 6),
            "wait_p99": round(outcome.wait_p99, 6),
            "wait_max": round(outcome.longest_wait, 6),
            "cold_wait_p50": round(outcome.cold_wait(0.5), 6),
            "cold_wait_p99": round(outcome.cold_wait(0.99), 6),
            "churn": round(outcome.churn, 6),
            "evictions": outcome.evictions,
            "single_use_loads": outcome.single_use,
            "claims_without_room": outcome.timeouts,
            "brake_events": len(outcome.thrash),
            "budget_bytes": outcome.fleet.budget,
            "peak_bytes": outcome.peak,
            "workers": outcome.fleet.workers,
        }
    if comparison.curve:
        told[comparison.first.policy]["suggestion"] = suggestion(comparison)
        told[comparison.first.policy]["budgets"] = [
            {"budget_bytes": p.budget, "load_seconds": round(p.load_seconds, 6), "saved_share": round(p.saved_share, 6)}
            for p in comparison.curve
        ]
    return told


def size(nbytes: float) -> str:
    """Bytes for a person: three digits and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1_000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1_024
    return f"{nbytes:.3g} TiB"


# --- running ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    policy: str
    fleet: Fleet
    late: bool
    """On the last part of the trace only."""


def _all(trace: Trace, late: Trace, runs: list[_Run], processes: int) -> list[Outcome]:
    if processes < 2 or len(trace.times) * len(runs) < _SMALL:
        return [_run(trace, late, run) for run in runs]
    # Forked children have the trace already; only names go there, only outcomes come back.
    with ProcessPoolExecutor(
        processes, mp_context=get_context("fork"), initializer=_TRACES.extend, initargs=((trace, late),)
    ) as pool:
        return list(pool.map(_run_in_child, runs))


_TRACES: list[Trace] = []


def _run_in_child(run: _Run) -> Outcome:
    return _run(_TRACES[0], _TRACES[1], run)


def _run(trace: Trace, late: Trace, run: _Run) -> Outcome:
    on = late if run.late else trace
    make = make_bound(run.policy, on) if run.policy in BOUNDS else POLICIES[run.policy]
    collects = gc.isenabled()
    gc.disable()  # a replay makes millions of small objects and no cycles: a sixth of its time
    try:
        return replay(on, run.fleet, make, run.policy)
    finally:
        if collects:
            gc.enable()


def _budgets(trace: Trace, fleet: Fleet) -> list[int]:
    """Other budgets that are worth a try: none far beyond what holds everything."""
    whole = trace.total_bytes
    tried = {int(fleet.budget * factor) for factor in FACTORS}
    worth = {budget for budget in tried if budget < whole}
    if whole <= max(tried):
        worth.add(whole)
    return sorted(worth - {fleet.budget})


def _point(outcome: Outcome, base: Outcome) -> Point:
    saved = 1.0 - outcome.load_seconds / base.load_seconds if base.load_seconds > 0.0 else 0.0
    return Point(outcome.fleet.budget, outcome.load_seconds, saved)


def _last(trace: Trace, count: int) -> Trace:
    if len(trace.times) <= count:
        return trace
    runs = trace.run_seconds
    return replace(
        trace, times=trace.times[-count:], which=trace.which[-count:], run_seconds=runs[-count:] if runs else None
    )
