"""Which columns feed which inputs of a model. Pure.

A cell is one row of an input, without the axis that counts rows; a model that does not take rows together may also
be given whole inputs as cells. Several columns of single numbers may be packed into one vector, in their order.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from qworker.errors import ColumnMissing, MappingUnclear
from qworker.wire.datatypes import BYTES, dtype_of
from qworker.wire.rows import RowAxes
from qworker.wire.signature import Dim, Signature, TensorSpec

PACKED_LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column of the input: what its cells hold. ``datatype`` None: nothing that a tensor can hold (a date, say)."""

    name: str
    datatype: str | None
    dims: tuple[int | None, ...] = ()
    """Sizes of a cell's axes; None where they may differ from row to row."""

    def words(self) -> str:
        shape = f" [{', '.join('?' if dim is None else str(dim) for dim in self.dims)}]" if self.dims else ""
        return f"{self.name} ({self.datatype or 'no tensor type'}{shape})"


Placing = Literal["row", "shared", "whole"]


@dataclass(frozen=True, slots=True)
class Binding:
    """How one input is fed."""

    input: str
    columns: tuple[str, ...]
    """One, or several that are packed into a vector."""
    datatype: str
    shape: tuple[int | None, ...] | None
    """What a cell must look like; None: anything."""
    placing: Placing
    """``row``: cells are stacked along ``axis``; ``shared``: equal in all rows of a job; ``whole``: a cell is all of
    the input."""
    axis: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How the rows of a table become the inputs of one model."""

    bindings: tuple[Binding, ...]
    together: bool
    """Several rows may share a job."""
    axes: RowAxes | None
    """Of the outputs as well, where the model takes rows together."""


def plan(
    model: str,
    signature: Signature,
    axes: RowAxes | None,
    columns: Sequence[ColumnType],
    asked: Mapping[str, str],
    reserved: Sequence[str] = (),
) -> Plan:
    """The plan for ``model``. ``asked`` says ``input -> column``, or ``column,column`` or a pattern to pack them.

    What is not asked for goes by name; then the only input that is left to the only column, or columns, that fit.
    ``reserved`` columns feed nothing by themselves. Raises MappingUnclear with both sides, ColumnMissing.
    """
    return _Planner(model, signature, axes, columns, asked, reserved).plan()


class _Planner:
    def __init__(
        self,
        model: str,
        signature: Signature,
        axes: RowAxes | None,
        columns: Sequence[ColumnType],
        asked: Mapping[str, str],
        reserved: Sequence[str],
    ) -> None:
        self._model = model
        self._signature = signature
        self._axes = axes
        self._columns = {column.name: column for column in columns}
        self._asked = asked
        self._reserved = set(reserved)
        self._bound: dict[str, Binding] = {}

    def plan(self) -> Plan:
        inputs = {spec.name: spec for spec in self._signature.inputs}
        unknown = [name for name in self._asked if name not in inputs]
        if unknown:
            raise self._unclear(f"{', '.join(unknown)}: no such input")
        for name, wanted in self._asked.items():
            self._bound[name] = self._bind(inputs[name], self._named(name, wanted))
        for spec in self._signature.inputs:
            column = self._by_name(spec)
            if spec.name not in self._bound and column is not None:
                self._bound[spec.name] = self._bind(spec, (column,))
        left = [spec for spec in self._signature.inputs if spec.name not in self._bound]
        if len(left) == 1:
            self._bound[left[0].name] = self._bind(left[0], self._only_ones(left[0]))
        elif left:
            raise self._unclear(f"nothing by the names of {', '.join(spec.name for spec in left)}")
        bindings = tuple(self._bound[spec.name] for spec in self._signature.inputs)
        together = self._axes is not None and all(binding.placing != "whole" for binding in bindings)
        return Plan(bindings, together, self._axes if together else None)

    def _named(self, name: str, wanted: str) -> tuple[ColumnType, ...]:
        """The columns that were asked for. A column whose own name holds a comma or a star is meant first."""
        if wanted in self._columns:
            return (self._columns[wanted],)
        found: list[ColumnType] = []
        for part in wanted.split(","):
            matching = [c for c in self._columns if c == part] or fnmatch.filter(self._columns, part)
            if not matching:
                raise ColumnMissing(
                    f"expected the column {part} for input {name} of {self._model}; found {self._there()}: "
                    "correct --map"
                )
            found += [self._columns[each] for each in matching]
        return tuple(found)

    def _by_name(self, spec: TensorSpec) -> ColumnType | None:
        for column in self._columns.values():
            if column.name == spec.name or (_plain(column.name) == _plain(spec.name) and _plain(spec.name)):
                return column
        return None

    def _only_ones(self, spec: TensorSpec) -> tuple[ColumnType, ...]:
        taken = {name for binding in self._bound.values() for name in binding.columns} | self._reserved
        free = [column for column in self._columns.values() if column.name not in taken]
        fitting = [column for column in free if self._placing(spec, len(column.dims)) and _casts(column, spec)]
        fitting = [column for column in fitting if self._sizes_fit(spec, column)]
        if len(fitting) == 1:
            return (fitting[0],)
        numbers = [c for c in free if not c.dims and c.datatype not in (None, BYTES) and _casts(c, spec)]
        width = self._width(spec)
        if not fitting and width is not None and len(numbers) == width:
            return tuple(numbers)
        if not fitting:
            raise self._unclear(f"no free column fits {spec.name}")
        raise self._unclear(f"several columns fit {spec.name}: {', '.join(column.name for column in fitting)}")

    def _width(self, spec: TensorSpec) -> int | None:
        """The fixed length of a vector that single numbers can be packed into."""
        if spec.shape is None or len(spec.shape) != 2:
            return None
        width = spec.shape[1 - self._axis(spec)]
        return width if isinstance(width, int) else None

    def _bind(self, spec: TensorSpec, columns: Sequence[ColumnType]) -> Binding:
        for column in columns:
            if not _casts(column, spec):
                raise self._unclear(f"{column.words()} cannot become {spec.datatype} for {spec.name}")
            if len(columns) > 1 and column.dims:
                raise self._unclear(f"{column.words()} is no single number, and only those are packed into {spec.name}")
        rank = len(columns[0].dims) + (len(columns) > 1)
        placing = self._placing(spec, rank)
        if placing is None:
            raise self._unclear(f"cells of {columns[0].words()} have {rank} axes, {_spec_words(spec)} takes others")
        axis = self._axis(spec)
        shape: tuple[int | None, ...] | None = None
        if spec.shape is not None:
            rest = _without(spec.shape, axis) if placing == "row" else spec.shape
            shape = tuple(dim if isinstance(dim, int) else None for dim in rest)
        return Binding(spec.name, tuple(c.name for c in columns), spec.datatype, shape, placing, axis)

    def _axis(self, spec: TensorSpec) -> int:
        return 0 if self._axes is None else self._axes.inputs.get(spec.name, 0)

    def _placing(self, spec: TensorSpec, rank: int) -> Placing | None:
        """How a cell with so many axes feeds ``spec``; None: not at all."""
        counted = self._axes is None or spec.name in self._axes.inputs
        if spec.shape is None:
            return "row" if self._axes is not None and counted else "whole"
        if counted and rank == len(spec.shape) - 1:
            return "row"
        if rank == len(spec.shape):
            return "whole" if counted else "shared"
        return None

    def _sizes_fit(self, spec: TensorSpec, column: ColumnType) -> bool:
        if spec.shape is None:
            return True
        dims = column.dims
        rest = _without(spec.shape, self._axis(spec)) if len(dims) == len(spec.shape) - 1 else spec.shape
        pairs = zip(rest, dims, strict=True)
        return all(not isinstance(want, int) or have is None or want == have for want, have in pairs)

    def _there(self) -> str:
        return ", ".join(self._columns) or "none"

    def _unclear(self, why: str) -> MappingUnclear:
        inputs = ", ".join(_spec_words(spec) for spec in self._signature.inputs)
        columns = ", ".join(column.words() for column in list(self._columns.values())[:60]) or "none"
        return MappingUnclear(
            f"{why}. {self._model} takes: {inputs}. The input has: {columns}. Say which column feeds which input, as "
            "in --map input=column, or --map input=column1,column2 to pack single numbers"
        )


def _without(shape: tuple[Dim, ...], axis: int) -> tuple[Dim, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _casts(column: ColumnType, spec: TensorSpec) -> bool:
    """Whether cells can become what the input takes, as far as types tell: values are looked at row by row."""
    if column.datatype is None:
        return False
    if BYTES in (column.datatype, spec.datatype):
        return column.datatype == spec.datatype
    have, want = dtype_of(column.datatype), dtype_of(spec.datatype)
    if spec.datatype == "BF16" or column.datatype == "BF16":
        return column.datatype == spec.datatype
    return have == want or have.kind in "biu" or want.kind == "f"


def _spec_words(spec: TensorSpec) -> str:
    shape = "?" if spec.shape is None else ", ".join("?" if dim is None else str(dim) for dim in spec.shape)
    return f"{spec.name} ({spec.datatype} [{shape}])"


def _plain(name: str) -> str:
    """A tensor's name as people write it in a table: ``serving_default_x:0`` is ``serving_default_x``."""
    return re.sub(r"\W+", "_", re.sub(r":\d+$", "", name)).strip("_").lower()
