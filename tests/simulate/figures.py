"""``python -m tests.simulate.figures [TRACE.csv] [--seeds N]``: the figures of the policy's report, as Markdown.

Load seconds of the default policy relative to LRU, on the synthetic set and on a trace of yours; adversarial traces
against their bounds; throughput under the brake; the first minutes of cold-started workers with the fleet's history.
"""

from __future__ import annotations

import argparse
import random
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import exp
from pathlib import Path

from qworker.policy.choice import DEFAULT_POLICY, POLICIES
from qworker.policy.fleet_history import FleetUse
from qworker.policy.history import Minute
from qworker.simulate.fleet import Fleet, Outcome
from qworker.simulate.replay import replay
from qworker.simulate.trace import Cost, Trace, draw_cost, make_trace, read_trace
from tests.simulate.adversarial import longest_cold_wait, twelve_models, unit_costs
from tests.simulate.test_adversarial import CASES
from tests.simulate.workloads import WORKLOADS, geometric_mean, synthetic

SHARES = (0.10, 0.25, 0.50)
GIB = 1 << 30


def _noisy(model: str, seed: int) -> Cost:
    by_size = 1.0 + draw_cost(model, seed).nbytes / (0.6 * GIB)
    return Cost(draw_cost(model, seed).nbytes, by_size * exp(random.Random(f"{seed} {model}").gauss(0.0, 0.4)))


COSTS: dict[str, Callable[[str, int], Cost]] = {
    "drawn apart": draw_cost,
    "1 s + size / 0.6 GiB/s": lambda model, seed: Cost(
        draw_cost(model, seed).nbytes, 1.0 + draw_cost(model, seed).nbytes / (0.6 * GIB)
    ),
    "the same, spread by 1.5": _noisy,
    "all alike": lambda model, seed: Cost(4 * GIB, 10.0),
}


def against_lru(traces: Mapping[str, Iterable[tuple[Trace, int]]]) -> Iterator[str]:
    """Rows by trace and by how sizes and load times are drawn."""
    yield "| trace | sizes and load times | 10 % | 25 % | 50 % | all | worst |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for name, seeded in traces.items():
        together = list(seeded)
        for how, cost in COSTS.items():
            ratios: dict[float, list[float]] = {share: [] for share in SHARES}
            for trace, seed in together:
                costed = replace(trace, costs={model: cost(model, seed) for model in trace.models})
                for share in SHARES:
                    ratios[share].append(_ratio(costed, Fleet(int(costed.total_bytes * share))))
            every = [ratio for each in ratios.values() for ratio in each]
            cells = [f"{geometric_mean(ratios[share]):.2f}" for share in SHARES]
            yield f"| {name} | {how} | {' | '.join(cells)} | {geometric_mean(every):.2f} | {max(every):.2f} |"


def _ratio(trace: Trace, fleet: Fleet) -> float:
    ours, theirs = (replay(trace, fleet, POLICIES[name]).load_seconds for name in (DEFAULT_POLICY, "lru"))
    return ours / theirs


def adversarial() -> Iterator[str]:
    yield "| trace | longest wait | bound | loads | longest wait without the brake | loads |"
    yield "|---|--:|--:|--:|--:|--:|"
    for case, (trace, budget) in CASES.items():
        cells: list[str] = []
        for brake in (True, False):
            fleet = Fleet(budget, brake=brake)
            outcome = replay(trace, fleet, POLICIES[DEFAULT_POLICY])
            bound = longest_cold_wait(trace, fleet, outcome.most_cold)
            cells.append(f"{outcome.longest_wait:.0f} s")
            cells += [f"{bound:.0f} s"] if brake else []
            cells.append(f"{outcome.loads}")
        yield f"| {case} | {' | '.join(cells)} |"


def brake() -> Iterator[str]:
    """Twelve models where eight fit, against serving only the best eight."""
    yield "| load | calls a second and model | answered in time, of the best static choice |"
    yield "|--:|--:|--:|"
    for load in (2.0, 10.0):
        for rate in (1.0, 4.0, 8.0):
            requests, fixed = twelve_models(load, rate)
            costs, fleet = unit_costs(12, load_seconds=load), Fleet(800 << 20, prefetch=1)
            best, all_of_them = (
                replay(make_trace(these, costs, run_seconds=0.1), fleet, POLICIES[DEFAULT_POLICY])
                for these in (fixed, requests)
            )
            share = (all_of_them.requests - all_of_them.late) / (best.requests - best.late)
            yield f"| {load:g} s | {rate:g} | {share:.0%} |"


def cold_starts(name: str, trace: Trace, *, starts: int = 60, minutes: float = 10.0) -> Iterator[str]:
    """Two workers that start at random moments of the second half, with and without what the fleet knows."""
    yield f"| {name}, {starts} starts | load seconds for calls | calls that waited | of calls | preloaded, s |"
    yield "|---|--:|--:|--:|--:|"
    chance, total = random.Random(f"cold {name}"), trace.seconds
    fleet = Fleet(int(trace.total_bytes * 0.125), workers=2)
    sums: dict[str, list[float]] = {"without": [0.0] * 4, "with the fleet's history": [0.0] * 4}
    for _ in range(starts):
        at = trace.times[0] + total * chance.uniform(0.5, 0.99)
        begin, end = bisect_left(trace.times, at), bisect_left(trace.times, at + 60.0 * minutes)
        # The next call comes at once, so that the replay begins at the start; all models can be preloaded.
        calls, which = [at, *trace.times[begin:end]], [trace.which[begin], *trace.which[begin:end]]
        first = Trace(calls, which, trace.models, trace.costs)
        histories = {"without": None, "with the fleet's history": _known(trace, at)}
        for row, history in histories.items():
            outcome: Outcome = replay(first, fleet, POLICIES[DEFAULT_POLICY], history=history)
            waited = outcome.load_seconds - outcome.preload_seconds
            for i, value in enumerate((waited, outcome.misses, outcome.requests, outcome.preload_seconds)):
                sums[row][i] += value
    for row, (waited, misses, requests, preloaded) in sums.items():
        yield f"| {row} | {waited:,.0f} | {misses:,.0f} | {requests:,.0f} | {preloaded:,.0f} |"


def _known(trace: Trace, at: float) -> dict[str, object]:
    use = FleetUse()
    for t, which in zip(trace.times, trace.which, strict=True):
        if t < at:
            model = trace.models[which]
            cost = trace.costs[model]
            use.add(Minute(int(t // 60), model, 1, 1, cost.load_seconds, 0.0, cost.nbytes))
    return use.usages(at)  # pyright: ignore[reportReturnType]


def main() -> None:
    parser = argparse.ArgumentParser(description="The figures of the policy's report.")
    parser.add_argument("trace", nargs="?", type=Path, help="timestamp_s,model_id")
    parser.add_argument("--seeds", type=int, default=2)
    chosen = parser.parse_args()
    traces: dict[str, list[tuple[Trace, int]]] = {}
    if chosen.trace is not None:
        given = read_trace(chosen.trace)
        traces["the trace"] = [(given, seed) for seed in range(chosen.seeds)]
    for name in WORKLOADS:
        traces[name] = [(synthetic(name, 11 + seed), 11 + seed) for seed in range(chosen.seeds)]
    sections = {
        "Load seconds of the default policy over LRU": against_lru(traces),
        "Adversarial traces": adversarial(),
        "Throughput under the brake": brake(),
    }
    for title, lines in sections.items():
        sys.stdout.write(f"\n## {title}\n\n" + "".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    sys.stdout.write("\n## Two workers, cold-started\n")
    for name in [name for name in ("the trace", "zipf", "drifting") if name in traces]:
        sys.stdout.write("\n" + "".join(f"{line}\n" for line in cold_starts(name, traces[name][0][0])))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
