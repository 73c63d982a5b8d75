"""Outputs: Parquet, JSON Lines and ``.npz``, block by block. Memory holds one row group, however many rows come."""

from __future__ import annotations

import base64
import json
import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from qworker.errors import OutputUnusable
from qworker.score.arrow import pyarrow
from qworker.score.tables import Block, OutColumn, arrow_column, plain
from qworker.wire.datatypes import BF16, BYTES, dtype_of

GROUP_ROWS = 1 << 17
GROUP_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """What the output looks like. Its columns: row number, model where there are several, carried ones, outputs."""

    models: Sequence[str]
    row_name: str
    model_name: str | None
    carried: Any
    """The Arrow schema of the columns that go through."""
    columns: Sequence[OutColumn]
    rows: int


class Writer(Protocol):
    def write(self, block: Block) -> None: ...
    def close(self) -> None: ...


def make_writer(path: Path, suffix: str, layout: Layout) -> Writer:
    """The writer for an output with this suffix. Raises OutputUnusable for one that the format cannot hold."""
    return _WRITERS[suffix](path, layout)


class _Parquet:
    def __init__(self, path: Path, layout: Layout) -> None:
        pa, pq = pyarrow(), pyarrow("parquet")
        self._layout = layout
        fields: list[Any] = [pa.field(layout.row_name, pa.int64())]
        if layout.model_name is not None:
            fields.append(pa.field(layout.model_name, pa.string()))
        fields += list(layout.carried)
        fields += [pa.field(column.name, column.arrow_type()) for column in layout.columns]
        self._schema = pa.schema(fields)
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", compression_level=1)
        self._held: list[Any] = []
        self._rows = 0
        self._bytes = 0

    def write(self, block: Block) -> None:
        pa, layout = pyarrow(), self._layout
        arrays: list[Any] = [pa.array(block.rows)]
        if layout.model_name is not None:
            arrays.append(pa.array([layout.models[block.model]] * len(block.rows), pa.string()))
        if block.carried is not None:
            arrays += block.carried.columns
        arrays += [arrow_column(column, block) for column in layout.columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._held.append(batch)
        self._rows += len(batch)
        self._bytes += batch.nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(pyarrow().Table.from_batches(self._held), row_group_size=GROUP_ROWS)
        self._held, self._rows, self._bytes = [], 0, 0

    def close(self) -> None:
        self._flush()
        self._writer.close()


class _JsonLines:
    def __init__(self, path: Path, layout: Layout) -> None:
        self._layout = layout
        self._file = path.open("w", encoding="utf-8")

    def write(self, block: Block) -> None:
        layout = self._layout
        nothing: list[dict[str, Any]] = [{}] * len(block.rows)
        carried: list[dict[str, Any]] = nothing if block.carried is None else block.carried.to_pylist()
        mine = [c for c in layout.columns if block.model in c.models and c.output in block.outputs]
        values = [_listed(*block.outputs[column.output]) for column in mine]
        for at, row in enumerate(block.rows.tolist()):
            line: dict[str, Any] = {layout.row_name: row}
            if layout.model_name is not None:
                line[layout.model_name] = layout.models[block.model]
            line |= {name: as_json(value) for name, value in carried[at].items()}
            line |= {column.name: found[at] for column, found in zip(mine, values, strict=True)}
            self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


def _listed(datatype: str, array: Any) -> list[Any]:
    if datatype != BYTES and array.dtype.kind in "biu" and datatype != BF16:
        return array.tolist()
    if datatype == BYTES or not np.isfinite(plain(datatype, array)).all():
        return as_json(array.tolist())
    return plain(datatype, array).tolist()


def as_json(value: Any) -> Any:
    """A value as JSON can hold it: bytes as text where they are, numbers that are none as null."""
    if isinstance(value, list):
        return [as_json(each) for each in cast("list[Any]", value)]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


class _Npz:
    """One array a column. They are written one after another, each kept in a file of its own until then."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._layout = layout
        self._path = path
        self._parts: dict[str, tuple[Any, Any, tuple[int, ...]]] = {}
        for column in layout.columns:
            dims = tuple(dim for dim in column.dims if dim is not None)
            if len(dims) != len(column.dims) or column.datatype == BYTES or len(column.models) < len(layout.models):
                raise OutputUnusable(
                    f"{column.name} has cells of different sizes, text, or not all models have it, and .npz holds "
                    "even arrays of numbers only: choose .parquet or .jsonl (with --resume nothing is computed again)"
                )
            dtype = np.dtype("<f4") if column.datatype == BF16 else dtype_of(column.datatype)
            self._add(column.name, dtype, dims)
        self._add(layout.row_name, np.dtype("<i8"), ())
        self._carried: list[Any] = []
        self._models: list[Any] = []

    def _add(self, name: str, dtype: Any, dims: tuple[int, ...]) -> None:
        file = self._path.with_name(f"{self._path.name}.{len(self._parts)}").open("w+b")
        self._parts[name] = (file, dtype, dims)

    def write(self, block: Block) -> None:
        self._parts[self._layout.row_name][0].write(block.rows.astype("<i8").tobytes())
        for column in self._layout.columns:
            datatype, array = block.outputs[column.output]
            self._parts[column.name][0].write(plain(datatype, array).tobytes())
        if block.carried is not None:
            self._carried.append(block.carried)
        if self._layout.model_name is not None:
            self._models.append(np.full(len(block.rows), self._layout.models[block.model]))

    def close(self) -> None:
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, (file, dtype, dims) in self._parts.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    _npy_head(entry, dtype, (self._layout.rows, *dims))
                    file.seek(0)
                    while content := file.read(1 << 20):
                        entry.write(content)
                file.close()
                Path(file.name).unlink()
            if self._models:
                _store(archive, cast("str", self._layout.model_name), np.concatenate(self._models))
            if self._carried:
                table = pyarrow().Table.from_batches(self._carried)
                for name in table.column_names:
                    column = np.array(table.column(name).to_pylist())
                    if column.dtype == object:
                        raise OutputUnusable(f"column {name} has nulls or uneven cells, which .npz cannot hold")
                    _store(archive, name, column)


def _store(archive: zipfile.ZipFile, name: str, array: Any) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, array, allow_pickle=False)


def _npy_head(entry: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(entry, cast("Any", head))


_WRITERS: dict[str, Callable[[Path, Layout], Writer]] = {".parquet": _Parquet, ".jsonl": _JsonLines, ".npz": _Npz}
SUFFIXES = tuple(_WRITERS)
