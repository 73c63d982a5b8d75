"""The accuracy gate: the converted model against the FP32 original, on rows that were not calibrated on.

Both run in onnxruntime on the CPU, the converted one without rewrites: then QuantizeLinear and
DequantizeLinear round as TensorRT's 8-bit kernels do, and FP16 tensors are rounded where they are made. Sums
inside a node are in FP32: what a GPU's kernels add up in FP16, and in which order, is not seen here.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qworker.build.calibrate_rows import Feed, Rows
from qworker.build.convert import SESSION_ERRORS, open_session, session_options, write_model
from qworker.build.convert_fp16 import rounded
from qworker.errors import ModelRefused
from qworker.store.card import GateEntry

INT8_TOP1_DROP: Final = 0.01
"""What an INT8 model may lose when nothing else is said."""
_WORST: Final = 5


@dataclass(frozen=True, slots=True)
class RowResult:
    """One held-out row. ``agreeing`` of ``answers`` top-1 answers are the same; errors are the largest."""

    row: int
    answers: int
    agreeing: int
    max_error: float
    relative_error: float
    not_finite: str | None = None

    def __str__(self) -> str:
        if self.not_finite is not None:
            return f"row {self.row}: output {self.not_finite!r} has values that are not finite"
        same = f"{self.agreeing} of {self.answers} answers the same, " if self.answers else ""
        return f"row {self.row}: {same}off by up to {self.max_error:.3g} ({self.relative_error:.2%} of the output)"


@dataclass(frozen=True, slots=True)
class GateResult:
    """What the gate measured. ``top1`` is None where no output has classes along its last axis."""

    rows: tuple[RowResult, ...]
    held_out: bool
    """False when the rows are made up, or were calibrated on because there was only one."""

    @property
    def top1(self) -> float | None:
        answers = sum(row.answers for row in self.rows)
        return sum(row.agreeing for row in self.rows) / answers if answers else None

    @property
    def max_error(self) -> float:
        return max((row.max_error for row in self.rows), default=0.0)

    @property
    def relative_error(self) -> float:
        return max((row.relative_error for row in self.rows), default=0.0)

    @property
    def worst(self) -> tuple[RowResult, ...]:
        """The rows that lost most, the worst first."""
        return tuple(sorted(self.rows, key=_badness, reverse=True)[:_WORST])

    def entry(self, max_top1_drop: float | None = None) -> GateEntry:
        """The part of it that a card keeps."""
        return GateEntry(
            rows=len(self.rows),
            held_out=self.held_out,
            top1=self.top1,
            max_error=self.max_error,
            relative_error=self.relative_error,
            max_top1_drop=max_top1_drop,
        )


def compare(original: Any, converted: Any, rows: Rows, told: Callable[[int, int], object] | None = None) -> GateResult:
    """Run both models on the held-out rows. Raises ModelRefused when one of them does not run."""
    numbers = rows.held_out()
    differences: list[Difference] = []
    with tempfile.TemporaryDirectory(prefix="qworker-") as folder:
        before = open_session(write_model(original, Path(folder) / "original.onnx")[0], session_options())
        options = session_options("ORT_DISABLE_ALL")
        after = open_session(write_model(rounded(converted), Path(folder) / "converted.onnx")[0], options)
        for done, number in enumerate(numbers, 1):
            feed = rows.read(number)
            expected = _run(before, feed, "original", number)
            differences.append(compare_row(number, expected, _run(after, feed, "converted", number)))
            if told is not None:
                told(done, len(numbers))
    return GateResult(judge(differences), held_out=not rows.made_up and rows.count > 1)


def check(gate: GateEntry, worst: Sequence[str], max_top1_drop: float | None) -> None:
    """Raise ModelRefused with the worst rows when the converted model lost more than is allowed.

    Values that are not finite where the original's are always fail.
    """
    if math.isinf(gate.max_error):
        raise ModelRefused(
            f"the converted model fails the accuracy gate, its answers are not finite. {'; '.join(worst)}: give "
            "calibration rows that cover what the model sees, or build it with --precision fp32"
        )
    if max_top1_drop is not None and gate.top1 is not None and 1 - gate.top1 > max_top1_drop:
        raise ModelRefused(
            f"the converted model fails the accuracy gate: it may lose {max_top1_drop:.2%} of the top-1 answers, and "
            f"loses {1 - gate.top1:.2%} on {gate.rows} rows. Worst: {'; '.join(worst)}. Give more calibration rows, "
            "another --calibration-method, or another --precision; or allow it with --max-top1-drop"
        )


def gate_words(gate: GateEntry) -> str:
    """What the gate measured, in a line."""
    top1 = "no classes to compare" if gate.top1 is None else f"top-1 agreement {gate.top1:.2%}"
    kind = "held-out rows" if gate.held_out else "rows, none of them held out"
    return f"{top1}, largest error {gate.max_error:.3g} ({gate.relative_error:.2%} of the output) on {gate.rows} {kind}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One row's outputs against each other. ``errors`` and ``scales``: largest magnitudes, by output."""

    row: int
    answers: int
    agreeing: int
    errors: Mapping[str, float]
    scales: Mapping[str, float]
    not_finite: str | None = None


def compare_row(row: int, expected: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]]) -> Difference:
    """What differs in one row. Raises ModelRefused when even the shapes do."""
    answers = agreeing = 0
    errors: dict[str, float] = {}
    scales: dict[str, float] = {}
    for name, right in expected.items():
        left = found[name]
        if right.shape != left.shape:
            raise ModelRefused(
                f"output {name!r} of row {row} has the shape {list(left.shape)} after conversion and "
                f"{list(right.shape)} before: the model's shapes depend on its values, build it with --precision fp32"
            )
        if right.dtype.kind != "f" or right.size == 0:
            continue
        if not bool(np.isfinite(left[np.isfinite(right)]).all()):
            return Difference(row, 0, 0, {}, {}, not_finite=name)
        errors[name], scales[name] = _error(right, left)
        if right.ndim and right.shape[-1] > 1:
            same = np.asarray(right.argmax(-1) == left.argmax(-1))
            answers, agreeing = answers + same.size, agreeing + int(same.sum())
    return Difference(row, answers, agreeing, errors, scales)


def judge(differences: Sequence[Difference]) -> tuple[RowResult, ...]:
    """Errors against the largest magnitude that an output has in any row.

    A row's own would make much of rows in which nothing is found: an error of 1e-6 over answers of 1e-8.
    """
    largest: dict[str, float] = {}
    for each in differences:
        for name, scale in each.scales.items():
            largest[name] = max(largest.get(name, 0.0), scale)
    return tuple(_result(each, largest) for each in differences)


def _result(each: Difference, largest: Mapping[str, float]) -> RowResult:
    if each.not_finite is not None:
        return RowResult(each.row, 0, 0, math.inf, math.inf, each.not_finite)
    relative = [error / largest[name] if largest[name] > 0 else error for name, error in each.errors.items()]
    return RowResult(
        each.row, each.answers, each.agreeing, max(each.errors.values(), default=0.0), max(relative, default=0.0)
    )


def _error(right: NDArray[Any], left: NDArray[Any]) -> tuple[float, float]:
    there = np.isfinite(right) & np.isfinite(left)
    if not bool(there.any()):
        return 0.0, 0.0
    expected, found = right[there].astype(np.float64), left[there].astype(np.float64)
    return float(np.abs(expected - found).max()), float(np.abs(expected).max())


def _badness(row: RowResult) -> tuple[bool, float, float]:
    return row.not_finite is not None, 1 - row.agreeing / row.answers if row.answers else 0.0, row.relative_error


def _run(session: Any, feed: Feed, which: str, number: int) -> dict[str, NDArray[Any]]:
    names: Sequence[str] = [value.name for value in session.get_outputs()]
    try:
        outputs = session.run(names, dict(feed))
    except SESSION_ERRORS as exc:
        raise ModelRefused(f"the {which} model does not run on row {number}: {exc}") from exc
    return {name: output for name, output in zip(names, outputs, strict=True) if isinstance(output, np.ndarray)}
