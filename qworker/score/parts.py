"""Rows cut into parts, each one job: rows of a part have one shape and equal shared inputs.

Which rows a part has follows from the input and the options alone, so that a run that is resumed counts the same
parts. Rows that match nobody wait for company, but not past ``HOLD`` parts' worth of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qworker.errors import RowRefused
from qworker.score.cells import Cells, cells_of
from qworker.score.mapping import Binding, Plan
from qworker.wire.datatypes import BYTES
from qworker.wire.messages import Tensor

HOLD = 16
Rows = NDArray[np.int64]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that travel as one job."""

    number: int
    """Counts the parts of one model."""
    rows: Rows
    """Their numbers in the input, ascending."""
    columns: tuple[Array, ...]
    """One array an input, its first axis counts the rows; with one row for all where the input is shared."""
    carried: Any = None
    """What goes through to the output: Arrow record batches of the same rows, one after another; or None."""

    def tensors(self, plan: Plan, lo: int, hi: int) -> tuple[Tensor, ...]:
        """The job's inputs for the rows ``lo`` to ``hi`` of this part."""
        return tuple(_tensor(b, array, lo, hi) for b, array in zip(plan.bindings, self.columns, strict=True))


def _tensor(binding: Binding, array: Array, lo: int, hi: int) -> Tensor:
    if binding.placing == "shared":
        cut = array[0]
    elif binding.placing == "whole":
        cut = array[lo]
    else:
        cut = array[lo:hi] if binding.axis == 0 else np.moveaxis(array[lo:hi], 0, binding.axis)
    return Tensor(binding.input, binding.datatype, np.asarray(cut, order="C"))


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that no job can be made of."""

    row: int
    error: RowRefused
    carried: Any = None


@dataclass(slots=True)
class _Bucket:
    """Rows that may share a part and wait for more."""

    rows: list[Rows] = field(default_factory=list[Rows])
    columns: list[tuple[Array, ...]] = field(default_factory=list[tuple[Array, ...]])
    carried: list[Any] = field(default_factory=list[Any])
    count: int = 0
    nbytes: int = 0
    first: int = 0


class Cutter:
    """Cuts one model's rows. Feed it chunks in order, then ``rest``."""

    def __init__(self, plan: Plan, batch_rows: int, *, job_bytes: int, most_bytes: int) -> None:
        """``job_bytes``: what a part should have at most; ``most_bytes``: what a single row may have."""
        self._plan = plan
        self._batch_rows = batch_rows if plan.together else 1
        self._job_bytes = job_bytes
        self._most_bytes = most_bytes
        self._buckets: dict[Any, _Bucket] = {}
        self._numbers = 0

    def feed(self, rows: Rows, columns: Sequence[Sequence[Any]], carried: Any) -> Iterator[Part | Refused]:
        """Parts that are full, and rows that are refused. ``columns``: the Arrow columns of each binding."""
        cells = [cells_of(binding, found) for binding, found in zip(self._plan.bindings, columns, strict=True)]
        refused: dict[int, RowRefused] = {}
        for each in cells:
            refused |= each.refused
        for key, positions, arrays in self._alike(cells, len(rows)):
            if refused:
                keep = ~np.isin(positions, np.fromiter(refused, np.int64))
                positions, arrays = positions[keep], [array[keep] for array in arrays]  # noqa: PLW2901
            heavy = [p for p, w in zip(positions, _weights(arrays), strict=True) if w > self._most_bytes]
            if heavy:
                keep = ~np.isin(positions, heavy)
                positions, arrays = positions[keep], [array[keep] for array in arrays]  # noqa: PLW2901
                refused |= dict.fromkeys(map(int, heavy), self._too_large())
            if len(positions):
                yield from self._put(key, rows[positions], tuple(arrays), _taken(carried, positions, len(rows)))
        for position, error in sorted(refused.items()):
            yield Refused(int(rows[position]), error, _taken(carried, np.array([position]), -1))
        if len(rows):
            yield from self._flush(int(rows[-1]) - HOLD * self._batch_rows)

    def rest(self) -> Iterator[Part]:
        """What still waits, once all chunks were fed."""
        yield from self._flush(None)

    # --- buckets -----------------------------------------------------------------------------------

    def _alike(self, cells: Sequence[Cells], count: int) -> Iterable[tuple[Any, Rows, list[Array]]]:
        """Key, positions and arrays of the rows that may share a part."""
        plain = [len(each.groups) == 1 and len(each.groups[0][0]) == count for each in cells]
        shared = [binding.placing == "shared" for binding in self._plan.bindings]
        if all(plain) and not any(shared):
            arrays = [each.groups[0][1] for each in cells]
            yield tuple(array.shape[1:] for array in arrays), np.arange(count, dtype=np.int64), arrays
            return
        kinds = [np.full(count, -1, np.int64) for _ in cells]  # which group, or which shared value, a row is of
        at = [np.zeros(count, np.int64) for _ in cells]  # where in its group
        values: list[list[Any]] = []
        for index, each in enumerate(cells):
            known: dict[Any, int] = {}
            for group, (positions, array) in enumerate(each.groups):
                at[index][positions] = np.arange(len(positions))
                if shared[index]:
                    keys = [(array.shape[1:], _bytes_of(row)) for row in array]
                    kinds[index][positions] = [known.setdefault(key, len(known)) for key in keys]
                else:
                    kinds[index][positions] = group
            values.append(list(known))
        whole = np.stack(kinds, axis=1)
        good = np.flatnonzero((whole >= 0).all(axis=1))
        if not len(good):
            return
        distinct, inverse = np.unique(whole[good], axis=0, return_inverse=True)
        for number, combination in enumerate(distinct):
            positions = good[inverse.reshape(-1) == number]
            arrays = [_pick(each, positions, at[index]) for index, each in enumerate(cells)]
            key = tuple(
                values[index][kind] if shared[index] else arrays[index].shape[1:]
                for index, kind in enumerate(combination.tolist())
            )
            yield key, positions, arrays

    def _put(self, key: Any, rows: Rows, columns: tuple[Array, ...], carried: Any) -> Iterator[Part]:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(first=int(rows[0]))
        weights = _weights(columns)
        start = 0
        while start < len(rows):
            most = self._room(bucket, weights, start)
            if most == 0:
                yield self._cut(key)
                bucket = self._buckets[key] = _Bucket(first=int(rows[start]))
                continue
            end = min(len(rows), start + most)
            bucket.rows.append(rows[start:end])
            bucket.columns.append(tuple(array[start:end] for array in columns))
            bucket.carried.append(None if carried is None else carried.slice(start, end - start))
            bucket.count += end - start
            bucket.nbytes += int(weights[start:end].sum())
            start = end
            if bucket.count >= self._batch_rows:
                yield self._cut(key)
                if start < len(rows):
                    bucket = self._buckets[key] = _Bucket(first=int(rows[start]))

    def _room(self, bucket: _Bucket, weights: Rows, start: int) -> int:
        """How many more rows, from ``start`` on, this bucket takes; at least one while it is empty."""
        more = weights[start : start + self._batch_rows - bucket.count]
        fitting = int(np.searchsorted(bucket.nbytes + np.cumsum(more), self._job_bytes, side="right"))
        return fitting if bucket.count else max(1, fitting)

    def _flush(self, before: int | None) -> Iterator[Part]:
        for key, bucket in sorted(self._buckets.items(), key=lambda pair: pair[1].first):
            if before is None or bucket.first < before:
                yield self._cut(key)

    def _cut(self, key: Any) -> Part:
        bucket = self._buckets.pop(key)
        pa_batches = [batch for batch in bucket.carried if batch is not None]
        self._numbers += 1
        return Part(
            self._numbers - 1,
            np.concatenate(bucket.rows),
            tuple(
                arrays[0][:1] if binding.placing == "shared" else _one(arrays)
                for binding, arrays in zip(self._plan.bindings, zip(*bucket.columns, strict=True), strict=True)
            ),
            pa_batches or None,
        )

    def _too_large(self) -> RowRefused:
        return RowRefused(
            f"the row has more than the {self._most_bytes} bytes that a message may have: shrink it, or raise max_body "
            "here, at the workers and at the broker"
        )


def _one(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _pick(cells: Cells, positions: Rows, at: Rows) -> Array:
    """The cells at these positions; all are of one shape, though with shared values they may be of several groups."""
    for found, array in cells.groups:
        if np.isin(positions[:1], found).any():
            return array[at[positions]]
    raise AssertionError("a good row is in some group")


def _weights(columns: Sequence[Array]) -> Rows:
    """Bytes of each row."""
    count = len(columns[0])
    total = np.zeros(count, np.int64)
    for array in columns:
        if array.dtype == object:
            flat = array.reshape(count, -1)
            total += np.fromiter((sum(map(len, row)) + 5 * len(row) for row in flat), np.int64, count)
        else:
            total += array.nbytes // max(1, count)
    return total


def _bytes_of(row: Any) -> Any:
    array = np.asarray(row)
    return tuple(array.reshape(-1).tolist()) if array.dtype == object else array.tobytes()


def _taken(carried: Any, positions: Rows, count: int) -> Any:
    if carried is None or len(positions) == count:
        return carried
    return carried.take(positions)


def row_bytes(plan: Plan, batch: Any) -> int | None:
    """Bytes of a row of the inputs, about: by the first rows. None where nothing is there."""
    if not len(batch):
        return None
    total = 0
    for binding in plan.bindings:
        for name in binding.columns:
            column = batch.column(name).slice(0, 64)
            total += column.nbytes // max(1, len(column)) if binding.datatype == BYTES else 0
        if binding.datatype != BYTES:
            found = cells_of(binding, [batch.column(name).slice(0, 64) for name in binding.columns])
            total += max((array.nbytes // len(array) for _, array in found.groups), default=0)
    return total
