"""Answers as columns: what each output is called, of which type its column is, and its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qworker.errors import OutputUnusable, ScoreError
from qworker.score.arrow import pyarrow
from qworker.score.journal import OutputShape, RecordHead
from qworker.score.mapping import Plan
from qworker.score.parts import Rows
from qworker.wire.datatypes import BF16, BYTES, dtype_of
from qworker.wire.messages import Result
from qworker.wire.signature import Signature

Array = NDArray[Any]


def by_row(result: Result, plan: Plan, signature: Signature, rows: int) -> dict[str, tuple[str, Array]]:
    """Each output as datatype and an array whose first axis counts the job's rows.

    Raises ScoreError when the model does not give one row for each.
    """
    found: dict[str, tuple[str, Array]] = {}
    declared = {spec.name: spec.shape for spec in signature.outputs}
    for tensor in result.outputs:
        array = tensor.array
        if plan.axes is not None:
            axis = plan.axes.outputs.get(tensor.name, 0)
            if axis >= array.ndim or array.shape[axis] != rows:
                raise ScoreError(
                    f"{result.model}: expected {rows} rows along axis {axis} of output {tensor.name}; found the shape "
                    f"{list(array.shape)}: register the model again with a sample like these rows"
                )
            array = np.moveaxis(array, axis, 0)
        elif not _is_one_row(plan, declared.get(tensor.name), array):
            array = array[None]
        found[tensor.name] = (tensor.datatype, array)
    return found


def _is_one_row(plan: Plan, declared: Sequence[Any] | None, array: Array) -> bool:
    """Whether the first axis of an output is the row that a job of one row was given."""
    placed = any(binding.placing == "row" for binding in plan.bindings)
    counts = not declared or not isinstance(declared[0], int) or declared[0] == 1
    return placed and counts and array.ndim > 0 and array.shape[0] == 1


def shapes_of(outputs: Mapping[str, tuple[str, Array]]) -> tuple[OutputShape, ...]:
    """What a record's head says of its outputs."""
    return tuple(OutputShape(name, datatype, array.shape[1:]) for name, (datatype, array) in outputs.items())


# --- columns -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutColumn:
    """A column of the output that is an output of one model, or of several that agree on its type."""

    name: str
    output: str
    models: frozenset[int]
    datatype: str
    dims: tuple[int | None, ...]

    def arrow_type(self) -> Any:
        pa = pyarrow()
        kind = _ARROW[self.datatype]() if self.datatype in _ARROW else pa.from_numpy_dtype(dtype_of(self.datatype))
        for dim in reversed(self.dims):
            kind = pa.list_(kind) if dim is None else pa.list_(kind, dim)
        return kind


_ARROW = {BYTES: lambda: pyarrow().binary(), BF16: lambda: pyarrow().float32()}


class Columns:
    """The output columns that all records together need. Feed it each head, then ask for ``found``."""

    def __init__(self, models: Sequence[str], taken: Iterable[str]) -> None:
        """``taken``: names of the columns that come before those of the outputs."""
        self._models = models
        self._taken = set(taken)
        self._seen: dict[tuple[str, int], tuple[str, list[int | None]]] = {}  # by output and model

    def add(self, head: RecordHead) -> None:
        for output in head.outputs:
            known = self._seen.setdefault((output.name, head.model), (output.datatype, list(output.shape)))
            datatype, dims = known
            if datatype != output.datatype or len(dims) != len(output.shape):
                raise OutputUnusable(
                    f"output {output.name} of {self._models[head.model]} has cells of different kinds "
                    f"({datatype} {dims}, {output.datatype} {list(output.shape)}): no column holds both"
                )
            for axis, size in enumerate(output.shape):
                if dims[axis] != size:
                    dims[axis] = None

    def found(self) -> list[OutColumn]:
        """A column an output; one a model where models disagree on the type of an output they both have."""
        by_output: dict[str, list[int]] = {}
        for name, model in self._seen:
            by_output.setdefault(name, []).append(model)
        columns: list[OutColumn] = []
        for name, models in by_output.items():
            kinds = {(self._seen[name, m][0], len(self._seen[name, m][1])) for m in models}
            if len(kinds) == 1 and name not in self._taken:
                columns.append(self._column(name, name, models))
            else:
                columns += [self._column(f"{self._models[m]}.{name}", name, [m]) for m in models]
        return columns

    def _column(self, column: str, output: str, models: Sequence[int]) -> OutColumn:
        datatype, dims = self._seen[output, models[0]]
        merged = list(dims)
        for model in models[1:]:
            for axis, size in enumerate(self._seen[output, model][1]):
                if merged[axis] != size:
                    merged[axis] = None
        return OutColumn(column, output, frozenset(models), datatype, tuple(merged))


@dataclass(slots=True)
class Block:
    """Rows of the output, of one model: their numbers, what they carry, and their outputs."""

    model: int
    rows: Rows
    carried: Any
    outputs: dict[str, tuple[str, Array]]

    def cut(self, lo: int, hi: int) -> Block:
        return Block(
            self.model,
            self.rows[lo:hi],
            None if self.carried is None else self.carried.slice(lo, hi - lo),
            {name: (datatype, array[lo:hi]) for name, (datatype, array) in self.outputs.items()},
        )


def arrow_column(column: OutColumn, block: Block) -> Any:
    """The rows of ``block`` in ``column``; nulls where its model has no such output."""
    pa = pyarrow()
    kind = column.arrow_type()
    if block.model not in column.models or column.output not in block.outputs:
        return pa.nulls(len(block.rows), kind)
    datatype, array = block.outputs[column.output]
    if datatype == BYTES:
        flat = pa.array(array.reshape(-1).tolist(), pa.binary())
    else:
        flat = pa.array(plain(datatype, array).reshape(-1))
    for size, dim in zip(reversed(array.shape[1:]), reversed(column.dims), strict=True):
        if dim is None:
            count = len(flat) // size if size else int(np.prod(array.shape[:-1]))
            flat = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * size), flat)
        else:
            flat = pa.FixedSizeListArray.from_arrays(flat, dim)
    return flat.cast(kind) if flat.type != kind else flat


def plain(datatype: str, array: Array) -> Array:
    """An array that any reader understands: contiguous, and BF16 widened to FP32."""
    if datatype == BF16:
        return (np.ascontiguousarray(array).astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array)
