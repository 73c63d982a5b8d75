"""Every kind of input becomes the same table, and what is wrong with one is told by a typed error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qworker.errors import EmptyInput, InputUnreadable, QworkerError
from qworker.score import readers
from qworker.score.readers import open_source

X = np.arange(30, dtype=np.float32).reshape(10, 3)
IDS = [f"r{i}" for i in range(10)]


def table() -> pa.Table:
    return pa.table({"id": IDS, "x": readers.as_column(X)})


def write_parquet(path: Path) -> None:
    pq.write_table(table(), path, row_group_size=4)


def write_arrow(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table().schema) as writer:
        writer.write_table(table(), max_chunksize=4)


def write_stream(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table().schema) as writer:
        writer.write_table(table(), max_chunksize=4)


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"id": i, "x": x}) + "\n" for i, x in zip(IDS, X.tolist(), strict=True)))


def write_npz(path: Path) -> None:
    np.savez(path, id=np.array(IDS), x=X)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("t.parquet", write_parquet),
        ("t.arrow", write_arrow),
        ("t.feather", write_stream),
        ("t.jsonl", write_jsonl),
        ("t.npz", write_npz),
    ],
)
def test_all_kinds_give_the_same_rows(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    """Row numbers, ids and values are those that were written, with and without a limit, and from a folder too."""
    write(tmp_path / name)
    for where, limit in ((tmp_path / name, None), (tmp_path / name, 7), (tmp_path, None), (tmp_path / "*", 3)):
        source = open_source(str(where))
        chunks = list(source.chunks(limit))
        count = limit or 10
        assert [chunk.first + i for chunk in chunks for i in range(len(chunk.batch))] == list(range(count))
        rows = [row for chunk in chunks for row in chunk.batch.to_pylist()]
        assert [str(row["id"]) for row in rows] == IDS[:count]
        assert np.array_equal(np.array([row["x"] for row in rows], np.float32), X[:count])


def test_csv_has_single_numbers_and_text(tmp_path: Path) -> None:
    """Types are those that the text shows."""
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n1,0.5,hi\n2,1.5,ho\n")
    source = open_source(str(path))
    assert [(c.name, c.datatype, c.dims) for c in source.columns()] == [
        ("a", "INT64", ()),
        ("b", "FP64", ()),
        ("c", "BYTES", ()),
    ]
    assert [row["a"] for chunk in source.chunks() for row in chunk.batch.to_pylist()] == [1, 2]


def test_npy_and_folders_of_files(tmp_path: Path) -> None:
    """An array has a row for each entry of its first axis; a folder has one for each file, in the order of names."""
    np.save(tmp_path / "x.npy", X)
    (column,) = open_source(str(tmp_path / "x.npy")).columns()
    assert (column.name, column.datatype, column.dims) == ("x", "FP32", (3,))
    folder = tmp_path / "tensors"
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"{i}.npy", X[i])
    rows = [row for chunk in open_source(str(folder)).chunks() for row in chunk.batch.to_pylist()]
    assert [(row["file"], row["data"]) for row in rows] == [(f"{i}.npy", X[i].tolist()) for i in range(3)]
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "b.bin").write_bytes(b"\0b")
    (raw / "a.jpg").write_bytes(b"a")
    rows = [row for chunk in open_source(str(raw)).chunks() for row in chunk.batch.to_pylist()]
    assert rows == [{"file": "a.jpg", "data": b"a"}, {"file": "b.bin", "data": b"\0b"}]


def test_chunks_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a row group is, a chunk has a bounded number of bytes."""
    monkeypatch.setattr(readers, "CHUNK_BYTES", 1 << 16)
    pq.write_table(pa.table({"x": readers.as_column(np.random.rand(2000, 64))}), tmp_path / "t.parquet")
    source = open_source(str(tmp_path / "t.parquet"))
    assert max(chunk.batch.nbytes for chunk in source.chunks()) < 1 << 17
    assert sum(len(chunk.batch) for chunk in source.chunks()) == 2000


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    """A copy elsewhere has the same digest, one other byte gives another."""
    (tmp_path / "a").mkdir()
    for name in ("x.parquet", "a/y.parquet"):
        write_parquet(tmp_path / name)
    x, y = (open_source(str(tmp_path / name)).digest() for name in ("x.parquet", "a/y.parquet"))
    assert x == y
    pq.write_table(table().slice(1), tmp_path / "x.parquet")
    assert open_source(str(tmp_path / "x.parquet")).digest() != y


def mixed_jsonl(path: Path) -> None:
    path.write_text('{"x": 1}\n{"x": "one"}\n')


def late_mixed_csv(path: Path) -> None:
    path.write_text("x\n" + "1\n" * (readers.TEXT_BLOCK // 2) + "one\n")


def damaged_parquet(path: Path) -> None:
    pq.write_table(pa.table({"x": readers.as_column(np.random.rand(4000, 8))}), path, row_group_size=1000)
    content = bytearray(path.read_bytes())
    start = len(content) // 3
    content[start : start + 40_000] = bytes(40_000)
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "make", "error"),
    [
        ("none.parquet", None, InputUnreadable),
        ("empty.parquet", lambda p: p.write_bytes(b""), EmptyInput),
        ("text.parquet", lambda p: p.write_text("no parquet at all"), InputUnreadable),
        ("rows.parquet", lambda p: pq.write_table(table().slice(0, 0), p), EmptyInput),
        ("t.xlsx", lambda p: p.write_bytes(b"PK"), InputUnreadable),
        ("mixed.jsonl", mixed_jsonl, InputUnreadable),
        ("late.csv", late_mixed_csv, InputUnreadable),
        ("damaged.parquet", damaged_parquet, InputUnreadable),
        ("folder", lambda p: p.mkdir(), EmptyInput),
        ("*.nothing", None, EmptyInput),
        ("scalar.npy", lambda p: np.save(p, np.array(1.0)), InputUnreadable),
        ("uneven.npz", lambda p: np.savez(p, a=X, b=X[:2]), InputUnreadable),
        ("pickled.npy", lambda p: np.save(p, np.array([{}]), allow_pickle=True), InputUnreadable),
        ("twice.csv", lambda p: p.write_text("a,a\n1,2\n"), InputUnreadable),
    ],
)
def test_bad_inputs(tmp_path: Path, name: str, make: Callable[[Path], Any] | None, error: type[QworkerError]) -> None:
    """Each is told as what it is, with the file's name in it."""
    path = tmp_path / name
    if make is not None:
        make(path)
    with pytest.raises(error) as told:
        for _ in open_source(str(path)).chunks():
            pass
    assert name.split(".", maxsplit=1)[0].lstrip("*") in str(told.value)
