"""Columns of Arrow tables as arrays of equal cells; what cannot be one is told row by row.

Almost all columns have cells of one shape, and become one array without a loop. Where shapes differ from row to row,
rows of a shape stand together; a null, or a cell that is not evenly nested, is that row's error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qworker.errors import InvalidInput, RowRefused
from qworker.score.arrow import pyarrow
from qworker.score.mapping import Binding, ColumnType
from qworker.wire.datatypes import BYTES, bytes_array, datatype_of, dtype_of, tensor, to_bytes

Array = NDArray[Any]
Positions = NDArray[np.int64]


@dataclass(slots=True)
class Cells:
    """One input's cells in a chunk: ``groups`` of rows (positions in the chunk, ascending) with equal shapes."""

    groups: list[tuple[Positions, Array]] = field(default_factory=list[tuple[Positions, Array]])
    refused: dict[int, RowRefused] = field(default_factory=dict[int, RowRefused])


# --- types ---------------------------------------------------------------------------------------


def column_type(name: str, kind: Any) -> ColumnType:
    """What the cells of an Arrow column hold."""
    pa = pyarrow()
    dims: list[int | None] = []
    while True:
        if pa.types.is_fixed_size_list(kind):
            dims.append(int(kind.list_size))
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            dims.append(None)
        else:
            break
        kind = kind.value_type
    return ColumnType(name, _leaf(pa, kind), tuple(dims))


def _leaf(pa: Any, kind: Any) -> str | None:
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return BYTES
    if types.is_fixed_size_binary(kind):
        return BYTES
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return datatype_of(np.dtype(kind.to_pandas_dtype()))
    return None


# --- values --------------------------------------------------------------------------------------


def cells_of(binding: Binding, columns: Sequence[Any]) -> Cells:
    """The cells that feed one input, of its columns (Arrow arrays of equal length), in the input's datatype."""
    parts = [_groups(column, binding) for column in columns]
    found = parts[0] if len(parts) == 1 else _packed(parts)
    checked = Cells(refused=found.refused)
    for positions, array in found.groups:
        wrong = _wrong_shape(binding, array.shape[1:])
        if wrong is not None:
            checked.refused |= dict.fromkeys(positions.tolist(), wrong)
        else:
            _cast(binding, positions, array, checked)
    return checked


def _groups(column: Any, binding: Binding) -> Cells:
    pa = pyarrow()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    count = len(column)
    positions = np.arange(count, dtype=np.int64)
    cells = Cells()
    if column.null_count:
        there = column.is_valid().to_numpy(zero_copy_only=False)
        null = RowRefused(f"input {binding.input}: column {binding.columns[0]} is null: fill it, or leave the row out")
        cells.refused = dict.fromkeys(positions[~there].tolist(), null)
        positions, column = positions[there], column.drop_null()
    if not len(column):
        return cells
    even = _even(pa, column)
    if even is not None:
        cells.groups.append((positions, even))
        return cells
    return _one_by_one(column, positions, binding, cells)


def _even(pa: Any, column: Any) -> Array | None:
    """All cells as one array, where they have one shape and no null in them; without a loop over rows."""
    dims = [len(column)]
    while True:
        kind = column.type
        if pa.types.is_fixed_size_list(kind):
            size = int(kind.list_size)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            lengths = np.diff(column.offsets.to_numpy())
            size = int(lengths[0]) if len(lengths) else 0
            if not (lengths == size).all():
                return None
        else:
            break
        dims.append(size)
        column = column.flatten()
        if column.null_count:
            return None
    if _leaf(pa, column.type) == BYTES:
        return bytes_array(_as_bytes(pa, column), tuple(dims))
    return column.to_numpy(zero_copy_only=False).reshape(dims)


def _as_bytes(pa: Any, column: Any) -> list[bytes]:
    kind = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
    text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    return (column.cast(kind) if text else column).to_pylist()


def _one_by_one(column: Any, positions: Positions, binding: Binding, cells: Cells) -> Cells:
    by_shape: dict[tuple[int, ...], tuple[list[int], list[Array]]] = {}
    leaf = column_type("", column.type).datatype
    for position, cell in zip(positions.tolist(), column, strict=True):
        try:
            array = _nested(cell.as_py(), leaf)
        except InvalidInput as exc:
            cells.refused[position] = RowRefused(f"input {binding.input}: {exc}")
            continue
        at, arrays = by_shape.setdefault(array.shape, ([], []))
        at.append(position)
        arrays.append(array)
    cells.groups = [(np.array(at, np.int64), np.stack(arrays)) for at, arrays in by_shape.values()]
    return cells


def _nested(cell: Any, leaf: str | None) -> Array:
    """One cell of nested lists. Raises InvalidInput for a null inside, and for uneven lists."""
    flat: list[Any] = []
    shape = _shape_of(cell, flat)
    if any(value is None for value in flat):
        raise InvalidInput("the cell has a null in it: fill it, or leave the row out")
    if leaf == BYTES:
        return bytes_array([to_bytes(value) for value in flat], shape)
    return np.array(flat, dtype_of(leaf) if leaf is not None else None).reshape(shape)


def _shape_of(cell: Any, flat: list[Any]) -> tuple[int, ...]:
    if not isinstance(cell, list):
        flat.append(cell)
        return ()
    if any(inner is None for inner in cell):  # pyright: ignore[reportUnknownVariableType]
        raise InvalidInput("the cell has a null in it: fill it, or leave the row out")
    inner = {_shape_of(each, flat) for each in cell}  # pyright: ignore[reportUnknownVariableType]
    if len(inner) > 1:
        raise InvalidInput("the cell is ragged, its lists have different lengths: pad them, or leave the row out")
    return (len(cell), *(inner.pop() if inner else ()))  # pyright: ignore[reportUnknownArgumentType]


def _packed(parts: Sequence[Cells]) -> Cells:
    """Single numbers of several columns as vectors."""
    cells = Cells()
    for part in parts:
        cells.refused |= part.refused
    kept = [
        (positions, array) for part in parts for positions, array in (part.groups or [(np.zeros(0, np.int64), None)])
    ]
    there = kept[0][0]
    for positions, _ in kept[1:]:
        there = np.intersect1d(there, positions, assume_unique=True)
    if len(there):
        vectors = [array[np.searchsorted(positions, there)] for positions, array in kept if array is not None]
        cells.groups.append((there, np.stack(vectors, axis=1)))
    return cells


def _wrong_shape(binding: Binding, shape: tuple[int, ...]) -> RowRefused | None:
    wanted = binding.shape
    if wanted is None or (
        len(wanted) == len(shape)
        and all(want is None or want == have for want, have in zip(wanted, shape, strict=True))
    ):
        return None
    expected = "x".join("?" if dim is None else str(dim) for dim in wanted) or "one value"
    found = "x".join(map(str, shape)) or "one value"
    return RowRefused(f"input {binding.input}: expected a cell of {expected}; found {found}: reshape or pad it")


def _cast(binding: Binding, positions: Positions, array: Array, cells: Cells) -> None:
    """Put ``array`` into ``cells`` in the datatype of the input; rows whose values do not go into it are refused."""
    try:
        cells.groups.append((positions, tensor(binding.input, array, binding.datatype).array))
        return
    except InvalidInput:
        good: list[tuple[int, Array]] = []
        for position, row in zip(positions.tolist(), array, strict=True):
            try:
                good.append((position, tensor(binding.input, row, binding.datatype).array))
            except InvalidInput as exc:
                cells.refused[position] = RowRefused(str(exc))
        if good:
            at = np.array([position for position, _ in good], np.int64)
            cells.groups.append((at, np.stack([row for _, row in good])))
