"""All that a probe finds out about running rows together: the batching facts of a card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from qworker.build.run_times import fastest, measure_batches, worth_threads
from qworker.build.verify import MAX_SECONDS, TOLERANCES, Budget, Unbatched, Verified, verify
from qworker.engine.base import Engine
from qworker.store.card import BatchingEntry
from qworker.wire.messages import Tensor
from qworker.wire.rows import stack

NO_SAMPLE: Final = "no input is known that it takes: give it a sample"


@dataclass(frozen=True, slots=True)
class Together:
    """The fields of the card, but for ``best``, the inputs of the best run, and ``peak_bytes`` (RSS) of it."""

    batching: BatchingEntry | None
    unbatched: str | None
    run_times: tuple[tuple[int, float], ...] = ()
    peak_bytes: int = 0
    best: tuple[Tensor, ...] | None = None

    def threads(self, engine: Engine, threaded: Callable[[], Engine], cpus: int) -> int | None:
        """Threads within a run that are clearly faster than the one that ``engine`` has; None: not worth it."""
        if self.best is None or cpus < 2:
            return None
        return cpus if worth_threads(engine, threaded, self.best) else None


def look(
    engine: Engine,
    sample: Sequence[Tensor] | None,
    resident_bytes: int,
    *,
    dynamic_quantization: bool = False,
    tolerance: float | None = None,
    seconds: float = MAX_SECONDS,
) -> Together:
    """Verify and measure. ``seconds`` of CPU for each of the two; ``tolerance`` in place of those by datatype."""
    if sample is None:
        return Together(None, NO_SAMPLE)
    tolerances: Mapping[str, float] = TOLERANCES if tolerance is None else dict.fromkeys(TOLERANCES, tolerance)
    verdict = verify(
        engine,
        sample,
        dynamic_quantization=dynamic_quantization,
        tolerances=tolerances,
        budget=Budget(seconds),
    )
    if isinstance(verdict, Unbatched):
        return Together(None, verdict.reason, ((1, fastest(engine, sample)),), best=tuple(sample))
    return _measured(engine, verdict, resident_bytes, Budget(seconds))


def _measured(engine: Engine, verified: Verified, resident_bytes: int, budget: Budget) -> Together:
    measured = measure_batches(engine, verified, budget, resident_bytes)
    entry = BatchingEntry(
        inputs=dict(verified.axes.inputs),
        outputs=dict(verified.axes.outputs),
        max_rows=measured.max_rows,
        tolerance=verified.tolerance,
        max_error=measured.max_error,
    )
    best = stack(verified.axes, [verified.rows[i % len(verified.rows)] for i in range(measured.max_rows)])
    why = None if measured.max_rows > 1 else _no_gain(measured.times)
    return Together(entry, why, measured.times, measured.peak_bytes, tuple(best))


def _no_gain(times: Sequence[tuple[int, float]]) -> str:
    if len(times) < 2:
        return "its rows are independent, but more than one takes too much memory or time"
    rows, seconds = times[-1]
    times_as_long = seconds / max(times[0][1], 1e-9)
    return f"its rows are independent, but no faster together: {rows} take {times_as_long:.1f} times as long as one"
