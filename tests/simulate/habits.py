"""``python -m tests.simulate.habits TRACE.csv``: what a trace tells of the future beyond hours of the day.

Sequences (after A comes B), sessions (the next request of the same model), and the first request after silence. See
docs/forecast.md.
"""

from __future__ import annotations

import itertools
import random
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

from qworker.simulate.replay import arrivals
from qworker.simulate.trace import Trace, read_trace

MOST_MODELS, FEWEST_CASES = 60, 8
LEAST_SHARE, LEAST_LIFT = 0.5, 2.0
IN_USE = 3_600.0
"""A model that was asked for within this is hot anyway: to foresee it is no news."""

Times = Sequence[float]


def sequences(trace: Trace, lag: float) -> tuple[int, int, int, int, int]:
    """Rules learnt on the first half of the time; on the second: fired, right, first requests, and those foreseen."""
    times = dict(zip(trace.models, arrivals(trace), strict=True))
    half = trace.times[len(trace.times) // 2]
    busiest = sorted(times, key=lambda model: -len(times[model]))[:MOST_MODELS]
    chance = random.Random("sequences")
    probes = [chance.uniform(trace.times[0], half) for _ in range(2_000)]
    usual = {model: sum(_comes(times[model], at, lag) for at in probes) / len(probes) for model in busiest}
    rules: list[tuple[str, str]] = []
    for first in busiest:
        starts = [at for at in _after_silence(times[first], lag) if at < half]
        for then in busiest:
            cases = [at for at in starts if not _came(times[then], at, IN_USE)]
            if then == first or len(cases) < FEWEST_CASES:
                continue
            share = sum(_comes(times[then], at, lag) for at in cases) / len(cases)
            if share >= LEAST_SHARE and share >= LEAST_LIFT * usual[then]:
                rules.append((first, then))
    fired = right = 0
    for first, then in rules:
        starts = [at for at in _after_silence(times[first], lag) if at >= half]
        cases = [at for at in starts if not _came(times[then], at, IN_USE)]
        fired += len(cases)
        right += sum(_comes(times[then], at, lag) for at in cases)
    opened = [(model, at) for model in times for at in _after_silence(times[model], IN_USE) if at >= half]
    seen = sum(any(_came(times[first], at, lag) for first, then in rules if then == model) for model, at in opened)
    return len(rules), fired, right, len(opened), seen


def sessions(trace: Trace, within: float) -> float:
    """The share of requests after which the same model is asked for again ``within`` seconds."""
    gaps = [after - at for times in arrivals(trace) for at, after in itertools.pairwise(times)]
    return sum(gap <= within for gap in gaps) / max(1, len(gaps))


def silences(trace: Trace, longer: float) -> tuple[int, float, float, float]:
    """How many there were; shares that were as long as the one before, and after which more came in 5 min and 1 h."""
    count = alike = pairs = soon = later = 0
    for times in arrivals(trace):
        lengths = [after - at for at, after in itertools.pairwise(times) if after - at > longer]
        count += len(lengths)
        pairs += max(0, len(lengths) - 1)
        alike += sum(abs(a - b) <= 0.1 * b for a, b in itertools.pairwise(lengths))
        for at, first, then in zip(times, times[1:], times[2:], strict=False):
            if first - at > longer:
                soon += then - first <= 300.0
                later += then - first <= 3_600.0
    return count, alike / max(1, pairs), soon / max(1, count), later / max(1, count)


def _came(times: Times, at: float, within: float) -> bool:
    return bisect_left(times, at) > bisect_left(times, at - within)


def _comes(times: Times, at: float, within: float) -> bool:
    following = bisect_right(times, at)
    return following < len(times) and times[following] - at <= within


def _after_silence(times: Times, silence: float) -> list[float]:
    return [at for i, at in enumerate(times) if i == 0 or at - times[i - 1] > silence]


def main(path: Path) -> None:
    trace = read_trace(path)
    say = sys.stdout.write
    for lag in (60.0, 300.0, 900.0):
        rules, fired, right, opened, seen = sequences(trace, lag)
        say(
            f"sequences within {lag:.0f} s: {rules} rules; on the second half they fired {fired} times, {right} right; "
        )
        say(f"{seen} of {opened} first requests after an hour of silence were foreseen\n")
    for within in (60.0, 300.0, 3_600.0, 86_400.0):
        say(f"sessions: {sessions(trace, within):.1%} of requests are followed by another within {within:.0f} s\n")
    for longer in (3_600.0, 14_400.0, 86_400.0):
        count, alike, soon, later = silences(trace, longer)
        say(f"silences over {longer:.0f} s: {count}; {alike:.1%} as long as the one before; ")
        say(f"then another within 5 min {soon:.1%}, within 1 h {later:.1%}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
