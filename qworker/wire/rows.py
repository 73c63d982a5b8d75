"""Rows of tensors: those of several jobs stacked into one run, and its outputs given back to each.

Which axis counts rows is a measured fact of the model (``build/verify``). Nothing here copies an array twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qworker.errors import InferenceFailed
from qworker.wire.messages import Tensor


class RowsMixed(InferenceFailed):
    """An output does not have one row for each row that went in."""


@dataclass(frozen=True, slots=True)
class RowAxes:
    """The axis that counts rows, by tensor. An input without one is *shared*: equal in all that run together."""

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


def count_rows(axes: RowAxes, inputs: Sequence[Tensor]) -> int | None:
    """How many rows a job has; None when its inputs disagree, or have none."""
    counts = {tensor.array.shape[axes.inputs[tensor.name]] for tensor in inputs if tensor.name in axes.inputs}
    count = counts.pop() if len(counts) == 1 else 0
    return count or None


def take(tensors: Sequence[Tensor], axes: Mapping[str, int], first: int, rows: int) -> list[Tensor]:
    """``rows`` rows from ``first`` on, as views; tensors without an axis as they are."""
    return [
        Tensor(t.name, t.datatype, t.array[_slice(axes[t.name], first, rows)]) if t.name in axes else t for t in tensors
    ]


def stack(axes: RowAxes, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The inputs of one run for all ``parts``, which differ in nothing but their rows. Copies once."""
    if len(parts) == 1:
        return [Tensor(t.name, t.datatype, np.asarray(t.array, order="C")) for t in parts[0]]
    by_name = [{tensor.name: tensor.array for tensor in part} for part in parts]
    return [
        Tensor(t.name, t.datatype, _joined([part[t.name] for part in by_name], axes.inputs[t.name]))
        if t.name in axes.inputs
        else t
        for t in parts[0]
    ]


def split(axes: RowAxes, outputs: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """The outputs of each part, in order; views wherever rows lie together. Raises RowsMixed."""
    total = sum(counts)
    for output in outputs:
        axis = axes.outputs[output.name]
        shape = output.array.shape
        if axis >= len(shape) or shape[axis] != total:
            raise RowsMixed(
                f"expected {total} rows along axis {axis} of output {output.name!r}; found the shape {list(shape)}: "
                "the model does not give one row for each that it takes; register it again with a sample like this job"
            )
    parts: list[list[Tensor]] = []
    first = 0
    for count in counts:
        views = take(outputs, axes.outputs, first, count)
        parts.append([Tensor(t.name, t.datatype, np.asarray(t.array, order="C")) for t in views])
        first += count
    return parts


def join(axes: RowAxes, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """One job's outputs of the parts that it was split into, in order."""
    if len(parts) == 1:
        return list(parts[0])
    return [
        Tensor(t.name, t.datatype, _joined([part[i].array for part in parts], axes.outputs[t.name]))
        for i, t in enumerate(parts[0])
    ]


def _joined(arrays: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    return np.asarray(np.concatenate(arrays, axis=axis), order="C")


def _slice(axis: int, first: int, rows: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(first, first + rows))
