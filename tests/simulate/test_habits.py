"""The search for habits finds those that are there, and none where chance rules."""

from __future__ import annotations

import random

from qworker.simulate.trace import make_trace
from tests.simulate.habits import sequences, sessions, silences
from tests.simulate.workloads import zipf

HOUR = 3_600.0


def test_a_sequence_is_found() -> None:
    """B comes a minute after A, each time; chance has no such rules."""
    chance = random.Random(1)
    starts = [i * 3 * HOUR + chance.uniform(0.0, HOUR) for i in range(60)]
    requests = [(at, "A") for at in starts] + [(at + 60.0, "B") for at in starts]
    rules, fired, right, opened, seen = sequences(make_trace(requests), 300.0)
    assert (rules, seen) == (1, opened // 2)
    assert right == fired > 20
    assert sequences(make_trace(zipf(1, requests=2_000, models=20)), 300.0)[2] == 0


def test_sessions_and_silences_are_measured() -> None:
    """Three requests a minute apart, every two hours."""
    trace = make_trace([(i * 2 * HOUR + 60.0 * k, "A") for i in range(20) for k in range(3)])
    assert round(sessions(trace, 60.0), 2) == round(40 / 59, 2)
    assert silences(trace, HOUR) == (19, 1.0, 1.0, 1.0)
