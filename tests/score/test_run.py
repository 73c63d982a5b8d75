"""``qworker score`` from end to end: every kind of file, exit codes, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.e2e.fleet import Fleet, queue_depths
from tests.score.scoring import Scoring, check_rows, read, rows_of, write_rows

pytestmark = pytest.mark.e2e


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".score" in path.name)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "npz"])
def test_a_file_in_a_file_out(fleet: Fleet, scoring: Scoring, tmp_path: Path, suffix: str) -> None:
    """All rows with their ids, in every form of output; a second run does nothing and says so."""
    fleet.start(1)
    write_rows(tmp_path / "in.parquet", 1000)
    command = ["-i", "in.parquet", "-o", f"out.{suffix}", "-m", "echo", "--columns", "id", "--batch-rows", 64]
    ended = scoring.run(*command, "--ordered")
    assert ended.code == 0, ended
    assert (ended.told["rows"], ended.told["failed"], ended.told["models"]["echo"]["jobs"]) == (1000, 0, 16)
    found = read(tmp_path / f"out.{suffix}")
    check_rows(found, 1000, ordered=True)
    assert [row["id"] for row in found] == [f"r{i}" for i in range(1000)]
    assert left_behind(tmp_path) == [f"out.{suffix}.score.json"]
    assert scoring.run(*command).told["already"]
    fleet.finish()


def test_every_kind_of_input(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """CSV with a column a number, JSON Lines with lists, arrays, and a folder of arrays."""
    fleet.start(1)
    x = rows_of(20)
    (tmp_path / "in.csv").write_text("a,b,c\n" + "".join(f"{a},{b},{c}\n" for a, b, c in x.tolist()))
    (tmp_path / "in.jsonl").write_text("".join(f'{{"x": {row}}}\n' for row in x.tolist()))
    np.save(tmp_path / "in.npy", x)
    (tmp_path / "many").mkdir()
    for number, row in enumerate(x):
        np.save(tmp_path / "many" / f"{number:02}.npy", row)
    for number, where in enumerate(("in.csv", "in.jsonl", "in.npy", "many", "many/*.npy")):
        ended = scoring.run("-i", where, "-o", f"out{number}.parquet", "-m", "echo")
        assert ended.code == 0, (where, ended)
        check_rows(read(tmp_path / f"out{number}.parquet"), 20)
    fleet.finish()


def test_text_in_text_out(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """Strings become BYTES, and come back as text."""
    fleet.start(1)
    (tmp_path / "in.csv").write_text("words\ncat\nhund\nfish\n")
    assert scoring.run("-i", "in.csv", "-o", "out.jsonl", "-m", "words", "--ordered").code == 0
    assert [row["translated"] for row in read(tmp_path / "out.jsonl")] == ["Katze", "Hündin", "?"]
    fleet.finish()


def test_bad_rows_do_not_stop_the_run(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """Three in a hundred fail at the model, others are no rows at all: they are told, and the exit code is 3."""
    fleet.start(1)
    ids = np.arange(1000)
    bad = set(range(7, 1000, 33))
    values = [10_000 if i in bad else int(i) for i in ids]
    values[500] = None  # pyright: ignore[reportCallIssue, reportArgumentType]
    write_rows(tmp_path / "in.parquet", 1000, ids=pa.array(values, pa.int64()))
    command = ["-i", "in.parquet", "-o", "out.parquet", "-m", "lookup", "--key", "id", "--batch-rows", 100]
    ended = scoring.run(*command)
    assert ended.code == 3, ended
    found = {row["row"]: row["y"] for row in read(tmp_path / "out.parquet")}
    assert found == {int(i): float(i) for i in ids if i not in bad and i != 500}
    errors = read(tmp_path / "out.parquet.errors.jsonl")
    assert {(e["row"], e["key"], e["code"]) for e in errors if e["row"] != 500} == {
        (i, f"r{i}", "invalid_input") for i in bad
    }
    assert [(e["key"], e["code"]) for e in errors if e["row"] == 500] == [("r500", "row_refused")]
    assert ended.told["failed"] == len(errors) == len(bad) + 1
    for option in (["--max-errors", 5], ["--max-error-rate", 0.01]):
        ended = scoring.run(*command[:3], f"stopped{len(option[0])}.parquet", *command[4:], *option)
        assert (ended.code, ended.error) == (1, "too_many_errors")
        assert not (tmp_path / f"stopped{len(option[0])}.parquet").exists()
        assert read(tmp_path / f"stopped{len(option[0])}.parquet.errors.jsonl")
    fleet.finish(left=0)


def test_two_clients_at_once(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """Neither gets the other's rows, and no queue of theirs is left."""
    fleet.start(1)
    write_rows(tmp_path / "a.parquet", 700)
    write_rows(tmp_path / "b.parquet", 900)
    both = [
        scoring.start("-i", "a.parquet", "-o", "a.out.parquet", "-m", "echo", "--batch-rows", 10),
        scoring.start("-i", "b.parquet", "-o", "b.out.parquet", "-m", "double", "--batch-rows", 10),
    ]
    assert [scoring.ended(process).code for process in both] == [0, 0]
    check_rows(read(tmp_path / "a.out.parquet"), 700)
    check_rows(read(tmp_path / "b.out.parquet"), 900, factor=2.0)
    assert queue_depths(fleet.url, ["qworker.batch.echo"]) == {"qworker.batch.echo": (0, 1)}
    fleet.finish()
