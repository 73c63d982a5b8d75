"""Several models in one run: rows that name their model, and rows that go to several."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.models import put
from tests.score.scoring import Scoring, check_rows, doubled, read, rows_of, write_rows
from tests.support.models import identity

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("ordered", [False, True])
def test_a_column_names_the_model(fleet: Fleet, scoring: Scoring, tmp_path: Path, ordered: bool) -> None:
    """Each row by its own model, whatever the order; a row that names none is told."""
    fleet.start(1)
    names: list[str | None] = [random.Random(i).choice(["echo", "double"]) for i in range(500)]
    names[77] = None
    write_rows(tmp_path / "in.parquet", 500, model=pa.array(names))
    command = ["-i", "in.parquet", "-o", "out.parquet", "--columns", "id", "--batch-rows", 16]
    ended = scoring.run(*command, *(["--ordered"] if ordered else []))
    assert ended.code == 3, ended
    found = read(tmp_path / "out.parquet")
    numbers = [row["row"] for row in found]
    assert sorted(numbers) == [i for i in range(500) if i != 77]
    assert not ordered or numbers == sorted(numbers)
    x = rows_of(500)
    for row in found:
        assert row["model"] == names[row["row"]]
        assert row["id"] == f"r{row['row']}"
        assert row["y"] == (x[row["row"]] * (2 if row["model"] == "double" else 1)).tolist()
    (error,) = read(tmp_path / "out.parquet.errors.jsonl")
    assert error["row"] == 77
    fleet.finish()


def test_each_row_to_several_models(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """One row of output for each row and model; in order, those of a row stand together."""
    fleet.start(1)
    write_rows(tmp_path / "in.parquet", 60)
    ended = scoring.run(
        "-i", "in.parquet", "-o", "out.jsonl", "--models", "echo,double", "--ordered", "--batch-rows", 7
    )
    assert ended.code == 0, ended
    found = read(tmp_path / "out.jsonl")
    assert [(row["row"], row["model"]) for row in found] == [(i, m) for i in range(60) for m in ("echo", "double")]
    for model, factor in (("echo", 1.0), ("double", 2.0)):
        check_rows([row for row in found if row["model"] == model], 60, factor=factor)
    fleet.finish()


def test_models_are_loaded_once_where_three_of_ten_fit(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """Rows of ten models in any order: each model is loaded about once."""
    mib = 1 << 20
    models = [f"m{i}" for i in range(10)]
    for number, name in enumerate(models):
        put(fleet.store, name, doubled() if number % 2 else identity(), resident_bytes=10 * mib)
    fleet.start(1, memory="32MiB")
    names = [models[i % 10] for i in range(400)]
    random.Random(3).shuffle(names)
    write_rows(tmp_path / "in.parquet", 400, model=names)
    ended = scoring.run("-i", "in.parquet", "-o", "out.parquet", "--in-flight", 8, timeout=100)
    assert ended.code == 0, ended
    x = rows_of(400)
    for row in read(tmp_path / "out.parquet"):
        assert row["y"] == (x[row["row"]] * (1 + models.index(row["model"]) % 2)).tolist()
    assert fleet.counter("loads") <= 12
    fleet.finish()
