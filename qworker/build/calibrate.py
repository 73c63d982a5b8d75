"""What values the tensors of a model take: run it on calibration rows and look at them.

Two passes over the rows, one row in memory at a time: the largest magnitude of each tensor, then (for
entropy and percentile) a histogram of magnitudes up to it. All symmetric: TensorRT takes no zero points.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from qworker.build.calibrate_rows import Rows
from qworker.build.convert import SESSION_ERRORS, onnx, open_session, session_options, write_model
from qworker.errors import ModelRefused

helper: Final = import_module("onnx.helper")

Method = Literal["entropy", "percentile", "minmax"]
METHODS: Final[tuple[Method, ...]] = ("entropy", "percentile", "minmax")

BINS: Final = 2048
LEVELS: Final = 128
"""Magnitudes that an 8-bit integer can hold, zero among them."""
PERCENTILE: Final = 99.99
_SHARE: Final = 64
"""Tensors that are fetched in one run: all at once would hold every intermediate result of a large model."""

Told = Callable[[int, int], object]
"""(rows done, rows in all)"""


def _tell_nobody(done: int, total: int) -> None:
    """Where nobody wants to hear of progress."""


def largest_magnitudes(
    model: Any, names: Sequence[str], rows: Rows, numbers: Sequence[int], told: Told = _tell_nobody
) -> dict[str, float]:
    """Tensor → its largest finite magnitude on these rows; infinite where it was not finite."""
    largest = dict.fromkeys(names, 0.0)
    for done, seen in enumerate(_observe(model, names, rows, numbers), 1):
        for name, values in seen:
            if values.size:
                largest[name] = max(largest[name], _magnitude(values))
        told(done, len(numbers))
    return largest


def scales(
    model: Any,
    names: Sequence[str],
    rows: Rows,
    numbers: Sequence[int],
    method: Method,
    told: Told = _tell_nobody,
) -> dict[str, float]:
    """Tensor → the size of one step of its 8-bit form. Raises ModelRefused for tensors that are not finite."""
    passes = 1 if method == "minmax" else 2
    total = passes * len(numbers)
    largest = largest_magnitudes(model, names, rows, numbers, lambda done, _: told(done, total))
    wild = [name for name in names if not np.isfinite(largest[name])]
    if wild:
        raise ModelRefused(
            f"tensor {wild[0]!r} is infinite or not a number on the calibration rows: "
            "check the rows, or the model's answers to them"
        )
    if method == "minmax":
        return {name: _step(limit) for name, limit in largest.items()}
    histograms = {name: np.zeros(BINS, np.float64) for name in names}
    for done, seen in enumerate(_observe(model, names, rows, numbers), 1):
        for name, values in seen:
            if largest[name] > 0:
                histograms[name] += np.histogram(np.abs(values), bins=BINS, range=(0.0, largest[name]))[0]
        told(len(numbers) + done, total)
    limit_of = entropy_limit if method == "entropy" else percentile_limit
    return {name: _step(largest[name] * limit_of(histograms[name])) for name in names}


def percentile_limit(histogram: NDArray[np.float64], percentile: float = PERCENTILE) -> float:
    """The part of the range that holds ``percentile`` of all values."""
    total = float(histogram.sum())
    if total == 0:
        return 1.0
    cumulated: NDArray[np.float64] = np.cumsum(histogram)
    first = int(np.searchsorted(cumulated, total * percentile / 100))
    return min(first + 1, histogram.size) / histogram.size


def entropy_limit(histogram: NDArray[np.float64]) -> float:
    """The part of the range whose 8-bit form tells least apart from the whole (Kullback-Leibler divergence).

    Source of the method: S. Migacz, "8-bit Inference with TensorRT", GTC 2017. The bin of zero is left
    out of the comparison: after a ReLU it holds most values, and any scale represents them exactly.
    """
    counts = histogram.copy()
    counts[0] = counts[1] if counts.size > 1 else 0
    if counts.sum() == 0:
        return 1.0
    best, best_end = np.inf, counts.size
    for end in range(LEVELS, counts.size + 1, 16):
        kept = counts[:end].copy()
        kept[-1] += counts[end:].sum()
        if kept.sum() == 0:
            continue
        divergence = _divergence(kept, _as_levels(counts[:end]))
        if divergence < best:
            best, best_end = divergence, end
    return best_end / counts.size


def _as_levels(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The counts after rounding to ``LEVELS`` values: each level's count spread over its bins in use."""
    level = np.arange(counts.size) * LEVELS // counts.size
    used = (counts > 0).astype(np.float64)
    sums = np.bincount(level, weights=counts, minlength=LEVELS)
    spread = np.bincount(level, weights=used, minlength=LEVELS)
    return np.where(used > 0, sums[level] / np.maximum(spread[level], 1), 0.0)


def _divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    p, q = p / p.sum(), q / max(q.sum(), 1e-12)
    there = p > 0
    return float(np.sum(p[there] * np.log(p[there] / np.maximum(q[there], 1e-9))))


def _magnitude(values: NDArray[Any]) -> float:
    largest = float(np.abs(values).max())
    return float("inf") if math.isnan(largest) else largest


def _step(limit: float) -> float:
    return max(limit / 127.0, 1e-8)  # a tensor that is always zero still needs a positive scale


def _observe(
    model: Any, names: Sequence[str], rows: Rows, numbers: Sequence[int]
) -> Iterator[Iterator[tuple[str, NDArray[Any]]]]:
    """For each row, (tensor, its values) for all ``names``; consume them before the next row."""
    with tempfile.TemporaryDirectory(prefix="qworker-") as folder:
        session = _opened_up(model, names, Path(folder))
        inputs = {value.name for value in session.get_inputs()}
        for number in numbers:
            feed = rows.read(number)
            yield _one_row(session, names, feed, inputs, number)


def _one_row(
    session: Any, names: Sequence[str], feed: Mapping[str, NDArray[Any]], inputs: set[str], number: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    inner = [name for name in names if name not in inputs]
    yield from ((name, feed[name]) for name in names if name in inputs)
    for start in range(0, len(inner), _SHARE):
        share = inner[start : start + _SHARE]
        try:
            yield from zip(share, session.run(share, dict(feed)), strict=True)
        except SESSION_ERRORS as exc:
            raise ModelRefused(f"the model does not run on calibration row {number}: {exc}") from exc


def _opened_up(model: Any, names: Sequence[str], folder: Path) -> Any:
    """A session of the model in which each of ``names`` is an output too."""
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    there = {value.name for value in opened.graph.output} | {value.name for value in opened.graph.input}
    opened.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in there)
    # rewrites would drop the very tensors that we look at
    return open_session(write_model(opened, folder / "opened.onnx")[0], session_options("ORT_DISABLE_ALL"))
