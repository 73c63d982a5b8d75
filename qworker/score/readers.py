"""Inputs as tables, a chunk at a time: Parquet, Arrow, CSV, JSON Lines, numpy arrays, folders and globs of files.

A chunk is an Arrow record batch with the number of its first row. Chunks follow from the file alone: a run that is
resumed cuts the same ones. Everything here blocks, and is called in a thread.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qworker.errors import EmptyInput, InputUnreadable
from qworker.score.arrow import pyarrow
from qworker.score.cells import column_type
from qworker.score.mapping import ColumnType

CHUNK_ROWS = 1 << 15
CHUNK_BYTES = 16 << 20
TEXT_BLOCK = 4 << 20
WHOLE_DIGEST = 4 << 30
"""Bytes up to which all of the input is hashed; of more, samples of each file and its size."""
SAMPLE = 1 << 20

Opener = Callable[[], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class Chunk:
    first: int
    """The number of its first row in the input."""
    batch: Any


@dataclass(frozen=True, slots=True)
class Source:
    """An input that can be read again and again, always the same way."""

    name: str
    files: tuple[Path, ...]
    schema: Any
    rows: int | None
    """None: not known before all is read."""
    batches: Callable[[Sequence[str] | None], Iterator[Any]]
    """Record batches of these columns, or of all."""

    def columns(self) -> list[ColumnType]:
        return [column_type(field.name, field.type) for field in self.schema]

    def chunks(self, limit: int | None = None, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        """All rows, or the first ``limit``. Raises InputUnreadable where a part of it cannot be read."""
        first = 0
        for batch in self.batches(columns):
            for at in range(0, len(batch), CHUNK_ROWS):
                piece = batch.slice(at, CHUNK_ROWS)
                if limit is not None:
                    piece = piece.slice(0, limit - first)
                if len(piece):
                    yield Chunk(first, piece)
                    first += len(piece)
                if limit is not None and first >= limit:
                    return

    def digest(self) -> str:
        """What tells this input from another one: the sha256 of its files' names and bytes."""
        total = hashlib.sha256()
        whole = sum(path.stat().st_size for path in self.files) <= WHOLE_DIGEST
        for path in self.files:
            with _reading(path), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                total.update(f"{path.name if len(self.files) > 1 else ''}\0{size}\0".encode())
                if whole:
                    total.update(hashlib.file_digest(file, "sha256").digest())
                    continue
                for at in (0, size // 2, max(0, size - SAMPLE)):
                    file.seek(at)
                    total.update(file.read(SAMPLE))
        return total.hexdigest()


def open_source(where: str) -> Source:
    """The input at a path: a file, a folder, or a glob. Raises InputUnreadable, EmptyInput."""
    path = Path(where)
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))
        return _folder(where, files)
    if any(mark in where for mark in "*?[") and not path.exists():
        return _folder(
            where, sorted(Path(found) for found in glob.glob(where, recursive=True) if os.path.isfile(found))
        )
    if not path.exists():
        raise InputUnreadable(f"expected a file, a folder or a glob; there is no {where}: correct --input")
    if path.stat().st_size == 0:
        raise EmptyInput(f"{where} is an empty file: nothing to score")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputUnreadable(
            f"expected a file of {', '.join(_READERS)}, or a folder; found {path.name}: convert it, or name it so"
        )
    with _reading(path):
        return reader(path)


@contextmanager
def _reading(path: Path, where: str = "") -> Generator[None]:
    """Errors of the disk and of the format become InputUnreadable that names the place."""
    pa = pyarrow()
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, EOFError, KeyError) as exc:
        reason = str(exc).splitlines()[0][:300] if str(exc) else type(exc).__name__
        raise InputUnreadable(
            f"{path}{where} cannot be read: {reason}: mend or convert the file; mixed types in a column are not taken"
        ) from exc


def _safely(path: Path, where: Callable[[int], str], batches: Iterator[Any]) -> Iterator[Any]:
    number = 0
    while True:
        with _reading(path, where(number)):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
        number += 1


# --- tables --------------------------------------------------------------------------------------


def _parquet(path: Path) -> Source:
    pq = pyarrow("parquet")
    with pq.ParquetFile(path) as file:
        meta, schema = file.metadata, file.schema_arrow
        rows = int(meta.num_rows)
        nbytes = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
    size = _rows_of_chunk(rows, nbytes)

    def batches(columns: Sequence[str] | None) -> Iterator[Any]:
        with _reading(path):
            file = pq.ParquetFile(path)  # not mapped: pages that were read would count as ours
        with file:
            for group in range(file.metadata.num_row_groups):
                found = file.iter_batches(size, [group], columns=_some(columns))
                yield from _safely(path, lambda _, group=group: f", row group {group},", found)

    return _table(path, schema, rows, batches)


def _arrow(path: Path) -> Source:
    pa = pyarrow()

    def open_it() -> Any:
        try:
            return pa.ipc.open_file(pa.OSFile(str(path)))
        except pa.ArrowInvalid:
            return pa.ipc.open_stream(pa.OSFile(str(path)))

    opened = open_it()
    counted = hasattr(opened, "num_record_batches")
    rows = sum(len(opened.get_batch(i)) for i in range(opened.num_record_batches)) if counted else None

    def batches(columns: Sequence[str] | None) -> Iterator[Any]:
        with _reading(path):
            reader = open_it()
        found = (reader.get_batch(i) for i in range(reader.num_record_batches)) if counted else iter(reader)
        for batch in _safely(path, lambda number: f", batch {number},", found):
            wanted = batch if columns is None else batch.select(list(columns))
            size = _rows_of_chunk(len(batch), batch.nbytes)
            for at in range(0, len(batch), size):
                yield wanted.slice(at, size)

    return _table(path, opened.schema, rows, batches)


def _csv(path: Path) -> Source:
    csv = pyarrow("csv")

    def open_it() -> Any:
        return csv.open_csv(path, read_options=csv.ReadOptions(block_size=TEXT_BLOCK))

    return _text(path, open_it)


def _jsonl(path: Path) -> Source:
    json = pyarrow("json")

    def open_it() -> Any:
        return json.open_json(path, read_options=json.ReadOptions(block_size=TEXT_BLOCK))

    return _text(path, open_it)


def _text(path: Path, open_it: Callable[[], Any]) -> Source:
    with open_it() as opened:
        schema = opened.schema

    def batches(columns: Sequence[str] | None) -> Iterator[Any]:
        with _reading(path):
            opened = open_it()
        with opened:
            for batch in _safely(path, lambda number: f", about byte {number * TEXT_BLOCK},", iter(opened)):
                yield batch if columns is None else batch.select(list(columns))

    return _table(path, schema, None, batches)


def _table(
    path: Path, schema: Any, rows: int | None, batches: Callable[[Sequence[str] | None], Iterator[Any]]
) -> Source:
    if rows == 0:
        raise EmptyInput(f"{path} has no rows: nothing to score")
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        raise InputUnreadable(f"{path} has more than one column {', '.join(sorted(twice))}: rename them")
    return Source(str(path), (path,), schema, rows, batches)


# --- arrays --------------------------------------------------------------------------------------


def _npy(path: Path) -> Source:
    return _arrays(path, {path.stem: np.load(path, mmap_mode="r", allow_pickle=False)})


def _npz(path: Path) -> Source:
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if not arrays:
        raise EmptyInput(f"{path} has no arrays: nothing to score")
    return _arrays(path, arrays)


def _arrays(path: Path, arrays: dict[str, Any]) -> Source:
    """Arrays whose first axis counts rows."""
    counts = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
    if None in counts.values() or len(set(counts.values())) != 1:
        raise InputUnreadable(
            f"{path}: expected arrays with one first axis that counts rows; found {counts}: save them row by row"
        )
    rows = next(iter(arrays.values())).shape[0]
    size = _rows_of_chunk(rows, sum(array.nbytes for array in arrays.values()))

    def batches(columns: Sequence[str] | None) -> Iterator[Any]:
        for at in range(0, rows, size):
            yield _batch({n: a[at : at + size] for n, a in arrays.items() if columns is None or n in columns})

    return _table(path, _batch({name: array[:1] for name, array in arrays.items()}).schema, rows, batches)


def _batch(arrays: dict[str, Any]) -> Any:
    pa = pyarrow()
    return pa.RecordBatch.from_arrays([as_column(array) for array in arrays.values()], names=list(arrays))


def as_column(array: Any) -> Any:
    """An array as an Arrow column of its rows; the further axes become lists of fixed size."""
    pa = pyarrow()
    if array.dtype.kind == "O" or array.dtype.kind in "SU":
        flat = pa.array([bytes(v) if isinstance(v, bytes) else v for v in array.reshape(-1).tolist()])
    else:
        flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


# --- folders -------------------------------------------------------------------------------------


def _folder(where: str, files: list[Path]) -> Source:
    """Tables one after another, where all are of a kind and alike; else one row a file, its tensor or its bytes."""
    if not files:
        raise EmptyInput(f"{where} has no files: nothing to score")
    kinds = {path.suffix.lower() for path in files}
    if len(kinds) == 1 and kinds <= {".parquet", ".arrow", ".feather", ".csv", ".jsonl", ".npz"}:
        return _joined(where, files)
    return _one_row_each(where, files, npy=kinds == {".npy"})


def _joined(where: str, files: list[Path]) -> Source:
    sources = [open_source(str(path)) for path in files if path.stat().st_size]
    if not sources:
        raise EmptyInput(f"{where} has only empty files: nothing to score")
    schema = sources[0].schema
    for source in sources:
        if source.schema != schema:
            raise InputUnreadable(
                f"{source.name} has other columns than {sources[0].name}: score them in runs of their own, or convert"
            )

    def batches(columns: Sequence[str] | None) -> Iterator[Any]:
        for source in sources:
            yield from source.batches(columns)

    counts = [source.rows for source in sources]
    rows = None if None in counts else sum(count for count in counts if count is not None)
    return Source(where, tuple(files), schema, rows, batches)


def _one_row_each(where: str, files: list[Path], *, npy: bool) -> Source:
    """A column ``file`` with the names, and ``data`` with the contents."""
    pa = pyarrow()

    def row(path: Path) -> Any:
        with _reading(path):
            if npy:
                content = as_column(np.load(path, allow_pickle=False)[None])
            else:
                content = pa.array([path.read_bytes()], pa.large_binary())
        return pa.RecordBatch.from_arrays([pa.array([path.name]), content], names=["file", "data"])

    def batches(columns: Sequence[str] | None) -> Iterator[Any]:
        held: list[Any] = []
        for path in files:
            batch = row(path)
            if held and (sum(b.nbytes for b in held) + batch.nbytes > CHUNK_BYTES or batch.schema != held[0].schema):
                yield _stuck(held, columns)
                held = []
            held.append(batch)
        yield _stuck(held, columns)

    return Source(where, tuple(files), row(files[0]).schema, len(files), batches)


def _stuck(batches: list[Any], columns: Sequence[str] | None) -> Any:
    pa = pyarrow()
    joined = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    return joined if columns is None else joined.select(list(columns))


def _rows_of_chunk(rows: int, nbytes: int) -> int:
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // max(1, nbytes // max(1, rows))))


def _some(columns: Sequence[str] | None) -> list[str] | None:
    return None if columns is None else list(columns)


_READERS: dict[str, Callable[[Path], Source]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".npy": _npy,
    ".npz": _npz,
}
