"""Whether rows of several jobs may share a run: found out by running rows alone and together.

A model is batched only where this says so. Axes are found by looking at what comes out, never taken from
declared shapes: a first axis may count characters, and a dynamic one may couple its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from qworker.build.row_trials import RandomRows, Row, candidates, rows_of
from qworker.engine.base import Engine
from qworker.errors import JobError
from qworker.wire.datatypes import BYTES
from qworker.wire.messages import Tensor
from qworker.wire.rows import RowAxes, count_rows, split, stack

TOLERANCES: Final[Mapping[str, float]] = {"FP16": 5e-3, "FP32": 1e-4, "FP64": 1e-9}
"""Allowed between a row alone and among others, over the largest magnitude in its output.

A batch is added up in another order: in 32 bits that moves real models by at most 5e-6. One that looks at its
neighbours moves by a hundredth and more. What is no float must be equal."""
MAX_SECONDS: Final = 10.0
"""Of CPU, which a busy machine does not stretch."""
SETS: Final = 4
"""Sets of rows: the sample's, and random ones."""
_SET_ROWS: Final = 3


@dataclass(frozen=True, slots=True)
class Verified:
    """Rows are independent. ``rows`` with their ``answers`` alone are at hand for more trials."""

    axes: RowAxes
    tolerances: Mapping[str, float]
    max_error: float
    rows: tuple[Row, ...]
    answers: tuple[list[Tensor], ...]

    @property
    def tolerance(self) -> float:
        """The widest that was allowed for any of its outputs."""
        return max(self.tolerances.get(output.datatype, 0.0) for output in self.answers[0])


@dataclass(frozen=True, slots=True)
class Unbatched:
    """Every job of this model runs by itself, and why."""

    reason: str


class Unfit(Exception):
    """Not along these axes; the message says why."""


class Budget:
    """CPU seconds for trials, checked before each run."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._until = clock() + seconds
        self._seconds = seconds

    @property
    def left(self) -> float:
        return self._until - self._clock()

    def check(self) -> None:
        """Raises OutOfTime."""
        if self.left <= 0.0:
            raise OutOfTime(f"{self._seconds:g} s were not enough to verify that its rows are independent")


class OutOfTime(Exception):
    """The budget is used up."""


def verify(
    engine: Engine,
    sample: Sequence[Tensor],
    *,
    dynamic_quantization: bool = False,
    tolerances: Mapping[str, float] = TOLERANCES,
    budget: Budget | None = None,
    seed: int = 0,
) -> Verified | Unbatched:
    """Find the axes that count rows, and see that a row's answer does not depend on the rows beside it.

    ``sample`` has been run before. Along each axis that may count rows: rows alone, together, and in another
    order beside extreme ones, on rows of the sample and on random ones.
    """
    if dynamic_quantization:
        return Unbatched("it is quantized dynamically: the scale of a run is taken over all of its rows")
    if not sample:
        return Unbatched("it takes no inputs")
    if all(tensor.datatype == BYTES for tensor in sample):
        return Unbatched("it takes nothing but text: there are no rows to vary")
    budget = budget or Budget(MAX_SECONDS)
    found: Unfit | None = None
    try:
        for axes in candidates(engine.signature, sample):
            try:
                return _Trial(engine, sample, axes, tolerances, budget, seed).verdict()
            except Unfit as unfit:
                found = found or unfit
    except OutOfTime as late:
        return Unbatched(str(late))
    return Unbatched(str(found) if found else "its batch is fixed: no axis of its inputs is open")


def largest_error(alone: Tensor, among: Tensor, tolerances: Mapping[str, float]) -> float:
    """How far a row's output moves among others, over its largest magnitude. Raises Unfit when too far."""
    a, b = alone.array, among.array
    if a.shape != b.shape:
        raise Unfit(
            f"output {alone.name!r} of a row has the shape {list(a.shape)} alone and {list(b.shape)} among others"
        )
    allowed = tolerances.get(alone.datatype, 0.0)
    if alone.datatype not in TOLERANCES:
        error = 0.0 if np.array_equal(a, b) else np.inf
    elif not np.array_equal(np.isfinite(a), np.isfinite(b)):
        error = np.inf
    else:
        finite = np.isfinite(a)
        left, right = a[finite].astype(np.float64), b[finite].astype(np.float64)
        scale = float(np.max(np.abs(left), initial=0.0)) or 1.0
        error = float(np.max(np.abs(left - right), initial=0.0)) / scale
    if error > allowed:
        how_far = "changes" if np.isinf(error) else f"moves by {error:.2g} of its size"
        raise Unfit(f"its rows are coupled: output {alone.name!r} of a row {how_far} among others")
    return error


class _Trial:
    """One choice of axes."""

    def __init__(
        self,
        engine: Engine,
        sample: Sequence[Tensor],
        axes: Mapping[str, int],
        tolerances: Mapping[str, float],
        budget: Budget,
        seed: int,
    ) -> None:
        self._engine = engine
        self._sample = sample
        self._axes = RowAxes(axes, {})
        self._tolerances = tolerances
        self._budget = budget
        self._rng = np.random.default_rng(seed)
        self._error = 0.0

    def verdict(self) -> Verified:
        """Raises Unfit, OutOfTime."""
        if count_rows(self._axes, self._sample) is None:
            raise Unfit("the inputs of its sample have no common axis of one size")
        first, *others = rows_of(self._sample, self._axes.inputs, _SET_ROWS)
        try:
            alone = self._run(first)
            again = self._run(first)
        except JobError as exc:
            raise Unfit(f"it does not run on one row: {exc}") from exc
        self._deterministic(alone, again)
        made = RandomRows(first, self._axes.inputs, self._run, self._rng)
        extremes = made.extremes()
        rows, answers = [first], [alone]
        for row in others:
            rows.append(row)
            answers.append(self._alone(row))
        while len(rows) < SETS * _SET_ROWS:
            row, answer = made.one()
            rows.append(row)
            answers.append(answer)
        for i in range(0, len(rows), _SET_ROWS):
            self._together(rows[i : i + _SET_ROWS], answers[i : i + _SET_ROWS], extremes)
        if all(_equal(answers[0], answer) for answer in answers[1:]):
            raise Unfit("its rows cannot be told apart: all that were tried have one answer; give it a sample")
        return Verified(self._axes, self._tolerances, self._error, tuple(rows), tuple(answers))

    def _together(self, rows: Sequence[Row], answers: Sequence[list[Tensor]], extremes: Sequence[Row]) -> None:
        outputs = self._run_together(rows)
        if not self._axes.outputs:
            axes = {output.name: _row_axis(a, output, len(rows)) for a, output in zip(answers[0], outputs, strict=True)}
            self._axes = RowAxes(self._axes.inputs, axes)
        self._compare(answers, outputs, [1] * len(rows), range(len(rows)))
        mixed: list[Row] = []
        places: list[int] = []  # of the rows, last first, between the extremes
        for i, row in enumerate(reversed(rows)):
            mixed += extremes[i : i + 1]
            places.append(len(mixed))
            mixed.append(row)
        self._compare(list(reversed(answers)), self._run_together(mixed), [1] * len(mixed), places)

    def _compare(
        self, answers: Sequence[list[Tensor]], outputs: list[Tensor], counts: Sequence[int], places: Sequence[int]
    ) -> None:
        try:
            parts = split(self._axes, outputs, counts)
        except JobError as exc:
            raise Unfit(str(exc)) from exc
        for answer, place in zip(answers, places, strict=True):
            for alone, among in zip(answer, parts[place], strict=True):
                self._error = max(self._error, largest_error(alone, among, self._tolerances))

    def _deterministic(self, alone: Sequence[Tensor], again: Sequence[Tensor]) -> None:
        try:
            for first, second in zip(alone, again, strict=True):
                largest_error(first, second, self._tolerances)
        except Unfit as exc:
            raise Unfit("its answers are random: the same row has another one each time") from exc

    def _run_together(self, rows: Sequence[Row]) -> list[Tensor]:
        try:
            return self._run(stack(self._axes, rows))
        except JobError as exc:
            raise Unfit(f"it does not take {len(rows)} rows at once: {exc}") from exc

    def _alone(self, row: Row) -> list[Tensor]:
        try:
            return self._run(row)
        except JobError as exc:
            raise Unfit(f"it does not run on one row: {exc}") from exc

    def _run(self, row: Sequence[Tensor]) -> list[Tensor]:
        self._budget.check()
        return self._engine.run([Tensor(t.name, t.datatype, np.asarray(t.array, order="C")) for t in row])


def _row_axis(alone: Tensor, together: Tensor, rows: int) -> int:
    """The axis along which one row became so many. Raises Unfit."""
    one, many = alone.array.shape, together.array.shape
    grown = [axis for axis, (a, b) in enumerate(zip(one, many, strict=False)) if a != b]
    if len(one) == len(many) and len(grown) == 1 and (one[grown[0]], many[grown[0]]) == (1, rows):
        return grown[0]
    if one == many:
        raise Unfit(f"output {alone.name!r} has no axis that counts rows: it is {list(one)} for one row and for {rows}")
    raise Unfit(f"output {alone.name!r} does not grow by rows: it is {list(one)} for one and {list(many)} for {rows}")


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(
        a.array.shape == b.array.shape and np.array_equal(a.array, b.array, equal_nan=a.datatype in TOLERANCES)
        for a, b in zip(left, right, strict=True)
    )
