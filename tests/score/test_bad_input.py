"""What is wrong with a request is told before anything is sent, by a typed error; nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qworker.store.local import LocalStore
from tests.e2e.fleet import Fleet
from tests.score.scoring import Scoring, read, rows_of, write_rows

pytestmark = pytest.mark.e2e

Make = Callable[[Path], Any]


def with_input(make: Make) -> Make:
    return make


CASES: list[tuple[str, Sequence[str], Make, str, list[str]]] = [
    ("no input", [], lambda p: p.unlink(), "input_unreadable", ["in.parquet"]),
    ("an empty file", [], lambda p: p.write_bytes(b""), "empty_input", ["in.parquet"]),
    ("no rows", [], lambda p: pq.write_table(pq.read_table(p).slice(0, 0), p), "empty_input", ["in.parquet"]),
    ("no such column", ["--map", "x=nope"], lambda _: None, "column_missing", ["nope", "id, x"]),
    ("no such column to carry", ["--columns", "nope"], lambda _: None, "column_missing", ["--columns"]),
    ("no such key", ["--key", "nope"], lambda _: None, "column_missing", ["--key"]),
    ("no such input of the model", ["--map", "z=x"], lambda _: None, "mapping_unclear", ["x (FP32 [n, 3])"]),
    ("no such output", ["--only", "z"], lambda _: None, "invalid_input", ["y"]),
    (
        "wrong rank",
        [],
        lambda p: pq.write_table(pa.table({"x": [[[[1.0, 2.0]]]]}), p),
        "mapping_unclear",
        ["3 axes"],
    ),
    ("text for numbers", [], lambda p: pq.write_table(pa.table({"x": ["1,2,3"]}), p), "mapping_unclear", ["BYTES"]),
    (
        "duplicate keys",
        ["--key", "id"],
        lambda p: pq.write_table(pa.table({"id": ["a", "b", "a"], "x": [[1.0, 2.0, 3.0]] * 3}), p),
        "duplicate_key",
        ["0 and 2"],
    ),
    ("an output without a folder", ["-o", "none/out.parquet"], lambda _: None, "output_unusable", ["make it"]),
    ("an output of no known kind", ["-o", "out.xlsx"], lambda _: None, "output_unusable", [".parquet"]),
    ("the input as output", ["-o", "in.parquet"], lambda _: None, "output_unusable", ["is the input"]),
    ("an unknown model", ["-m", "nope"], lambda _: None, "unknown_model", ["nope"]),
    ("two ways to name a model", ["--model-column", "id"], lambda _: None, "config_error", ["one of them"]),
]


@pytest.mark.parametrize(("options", "spoil", "code", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_told_before_anything_is_sent(
    score_store: Path, tmp_path: Path, options: Sequence[str], spoil: Make, code: str, words: Sequence[str]
) -> None:
    """There is not even a broker here."""
    spoil(write_rows(tmp_path / "in.parquet", 10))
    before = sorted(path.name for path in tmp_path.iterdir())
    scoring = Scoring("amqp://guest:guest@127.0.0.1:1/", score_store, tmp_path)
    defaults = {"-i": "in.parquet", "-o": "out.parquet", "-m": "echo"}
    command = [part for option, value in defaults.items() if option not in options for part in (option, value)]
    ended = scoring.run(*command, *options)
    assert (ended.code, ended.error) == (2 if code == "config_error" else 1, code), ended
    assert all(word in ended.message for word in words), ended.message
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_no_broker(score_store: Path, tmp_path: Path) -> None:
    """It says so at once, and the run can go on when there is one."""
    write_rows(tmp_path / "in.parquet", 10)
    scoring = Scoring("amqp://guest:guest@127.0.0.1:1/", score_store, tmp_path)
    ended = scoring.run("-i", "in.parquet", "-o", "out.parquet", "-m", "echo")
    assert (ended.code, ended.error) == (1, "broker_unavailable")
    assert not (tmp_path / "out.parquet").exists()


def test_rows_that_are_none(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """Nulls, ragged lists, wrong lengths and a cell of 20 MB are told row by row; the others are scored."""
    fleet.start(1)
    x: list[Any] = rows_of(8).tolist()
    x[1], x[3], x[4] = None, [1.0, 2.0], [1.0, None, 3.0]
    pq.write_table(pa.table({"x": pa.array(x, pa.list_(pa.float32()))}), tmp_path / "in.parquet")
    ended = scoring.run("-i", "in.parquet", "-o", "out.parquet", "-m", "echo", "--ordered")
    assert ended.code == 3, ended
    assert [row["row"] for row in read(tmp_path / "out.parquet")] == [0, 2, 5, 6, 7]
    errors = read(tmp_path / "out.parquet.errors.jsonl")
    assert {error["row"]: error["code"] for error in errors} == dict.fromkeys((1, 3, 4), "row_refused")
    lines = [json.dumps({"words": word}) for word in ("cat", "c" * (20 << 20), "hund")]
    (tmp_path / "words.parquet").unlink(missing_ok=True)
    pq.write_table(pa.table({"words": [json.loads(line)["words"] for line in lines]}), tmp_path / "words.parquet")
    ended = scoring.run("-i", "words.parquet", "-o", "words.jsonl", "-m", "words", "--ordered")
    assert ended.code == 3, ended
    assert [row["translated"] for row in read(tmp_path / "words.jsonl")] == ["Katze", "Hündin"]
    (error,) = read(tmp_path / "words.jsonl.errors.jsonl")
    assert error["row"] == 1
    assert "bytes that a message may have" in error["message"]
    fleet.finish()


def test_a_row_group_that_cannot_be_read(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """The run stops there, says which, and keeps what it has: with the file mended nothing is mixed."""
    fleet.start(1)
    x = np.random.default_rng(1).standard_normal((4000, 3)).astype(np.float32)
    path = tmp_path / "in.parquet"
    pq.write_table(
        pa.table({"x": pa.FixedSizeListArray.from_arrays(x.reshape(-1), 3)}),
        path,
        row_group_size=1000,
        compression=None,
    )
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content[start : start + 64] = bytes(64)
    path.write_bytes(bytes(content))
    ended = scoring.run("-i", "in.parquet", "-o", "out.parquet", "-m", "echo")
    assert (ended.code, ended.error) == (1, "input_unreadable"), ended
    assert "row group 2" in ended.message
    assert not (tmp_path / "out.parquet").exists()
    fleet.finish()


def test_a_model_that_goes_while_its_rows_are_scored(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """Its jobs are refused by the workers, and the run says which model it was."""
    write_rows(tmp_path / "in.parquet", 100)
    process = scoring.start("-i", "in.parquet", "-o", "out.parquet", "-m", "echo", "--batch-rows", 10)
    journal = tmp_path / "out.parquet.score" / "journal.jsonl"
    from tests.support.waiting import wait_until_sync

    wait_until_sync(lambda: journal.exists() and '"sent"' in journal.read_text(), 40, what="it has sent something")
    LocalStore(fleet.store).remove("echo")
    fleet.start(1)
    ended = scoring.ended(process)
    assert (ended.code, ended.error) == (1, "unknown_model"), ended
    assert "echo" in ended.message
    assert not (tmp_path / "out.parquet").exists()
