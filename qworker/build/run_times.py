"""How long runs of growing rows take, how many rows are worth running together, and whether more threads help."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from qworker.build.verify import Budget, Unfit, Verified, largest_error
from qworker.engine import memory
from qworker.engine.base import Engine
from qworker.errors import JobError
from qworker.wire.messages import Tensor
from qworker.wire.rows import split, stack

MOST_ROWS: Final = 64
GOOD_ENOUGH: Final = 1.05
"""Fewer rows are chosen when they take at most this many times the best seconds a row."""
GAIN: Final = 1.15
"""Rows together must be this many times as fast as one by one, or else every job runs by itself."""
THREADS_GAIN: Final = 1.3
LONGEST_RUN: Final = 0.25
"""Seconds. Every job of a batch waits for all of it."""
EXTRA_BYTES: Final = 32 << 20
"""A batch may take this much more memory than one row, or half of the model's own: it is booked as long as the
model is hot."""
_SHORTEST_SHARED: Final = 5e-4
"""Seconds of a run below which waking other threads cannot pay."""
_REPEATS: Final = 3
_MOST_REPEATS: Final = 30
_SHORT: Final = 0.04
"""Seconds that the repeats of a short run may take."""
_GIVE_UP: Final = 2
"""Sizes without a gain after which larger ones are not tried."""


@dataclass(frozen=True, slots=True)
class Measured:
    """``times``: rows and seconds. ``peak_bytes``: RSS at the most of a run of ``max_rows``."""

    times: tuple[tuple[int, float], ...]
    max_rows: int
    max_error: float
    peak_bytes: int


def measure_batches(engine: Engine, verified: Verified, budget: Budget, resident_bytes: int) -> Measured:
    """Run 1, 2, 4, ... rows; compare each row's answer with the one alone; choose how many share a run."""
    times: list[tuple[int, float]] = []
    peaks: list[int] = []
    error, useless, rows = verified.max_error, 0, 1
    while rows <= MOST_ROWS and useless < _GIVE_UP and budget.left > 0.0:
        places = [i % len(verified.rows) for i in range(rows)]
        inputs = stack(verified.axes, [verified.rows[place] for place in places])
        memory.trim()
        memory.reset_peak()
        try:
            outputs = engine.run(inputs)
            peak = memory.peak_bytes()
            error = max(error, _compare(verified, places, outputs))
        except (JobError, Unfit):
            break  # as many as before are right
        if peaks and peak - peaks[0] > max(EXTRA_BYTES, resident_bytes // 2):
            break
        seconds = fastest(engine, inputs)
        if times and seconds > LONGEST_RUN:
            break
        best = min((s / n for n, s in times), default=float("inf"))
        useless = useless + 1 if seconds / rows * GOOD_ENOUGH > best else 0
        times.append((rows, seconds))
        peaks.append(peak)
        rows *= 2
    chosen = choose_rows(times)
    sizes = [n for n, _ in times]
    peak = peaks[sizes.index(chosen)] if chosen in sizes else 0
    return Measured(tuple(times), chosen, error, peak)


def choose_rows(times: Sequence[tuple[int, float]]) -> int:
    """The fewest rows with nearly the best rate; 1 when even that is hardly faster than one by one."""
    if not times:
        return 1
    best = min(seconds / rows for rows, seconds in times)
    rows, seconds = next((n, s) for n, s in times if s / n <= best * GOOD_ENOUGH)
    alone = times[0][1] / times[0][0]
    return rows if alone >= GAIN * seconds / rows else 1


def fastest(engine: Engine, inputs: Sequence[Tensor], clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of the fastest of several runs: the noise of a machine only adds.

    The default clock counts this thread's own CPU, so that waiting for a busy machine does not count either;
    with more threads in a run, it takes ``time.perf_counter``.
    """
    seconds: list[float] = []
    until = time.perf_counter() + _SHORT
    while len(seconds) < _REPEATS or (len(seconds) < _MOST_REPEATS and time.perf_counter() < until):
        before = clock()
        engine.run(inputs)
        seconds.append(clock() - before)
        if sum(seconds) > _REPEATS * _SHORT:
            break  # a long run: the noise is small beside it
    return min(seconds)


def worth_threads(engine: Engine, threaded: Callable[[], Engine], inputs: Sequence[Tensor]) -> bool:
    """Whether an engine with more threads is clearly faster on these inputs, in turns with the one of one thread."""
    alone = fastest(engine, inputs)
    if alone < _SHORTEST_SHARED:
        return False
    other = threaded()
    try:
        clock = time.perf_counter
        pairs = [(fastest(other, inputs, clock), fastest(engine, inputs, clock)) for _ in range(3)]
    finally:
        other.close()
    return min(one for _, one in pairs) >= THREADS_GAIN * min(many for many, _ in pairs)


def _compare(verified: Verified, places: Sequence[int], outputs: Sequence[Tensor]) -> float:
    parts = split(verified.axes, outputs, [1] * len(places))
    return max(
        largest_error(alone, among, verified.tolerances)
        for place, part in zip(places, parts, strict=True)
        for alone, among in zip(verified.answers[place], part, strict=True)
    )
