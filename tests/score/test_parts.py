"""Rows cut into jobs: each row once, equal shapes in a job, bounded sizes, and the same cuts every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from qworker.score.mapping import Binding, Plan
from qworker.score.parts import HOLD, Cutter, Part, Refused
from qworker.wire.rows import RowAxes

AXES = RowAxes({"x": 0}, {"y": 0})
X = Binding("x", ("x",), "FP32", (None,), "row", 0)
RATE = Binding("rate", ("rate",), "INT64", (), "shared", 0)


def cut(plan: Plan, table: pa.Table, chunk: int, batch_rows: int, **sizes: int) -> list[Part | Refused]:
    cutter = Cutter(plan, batch_rows, **{"job_bytes": 1 << 20, "most_bytes": 1 << 20, **sizes})
    found: list[Part | Refused] = []
    for first in range(0, len(table), chunk):
        (batch,) = table.slice(first, chunk).combine_chunks().to_batches()
        rows = np.arange(first, first + len(batch), dtype=np.int64)
        columns = [[batch.column(name) for name in binding.columns] for binding in plan.bindings]
        found += cutter.feed(rows, columns, batch.select(["id"]))
    return [*found, *cutter.rest()]


cell = st.one_of(
    st.none(), st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=3)
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(cell, st.sampled_from([8000, 16000])), min_size=1, max_size=60),
    chunk=st.integers(1, 25),
    batch_rows=st.integers(1, 9),
    job_bytes=st.integers(4, 200),
)
def test_every_row_once_with_its_own_values(
    rows: list[tuple[Any, int]], chunk: int, batch_rows: int, job_bytes: int
) -> None:
    """Also with nulls, shapes and shared values that change from row to row."""
    table = pa.table(
        {
            "id": list(range(len(rows))),
            "x": pa.array([x for x, _ in rows], pa.list_(pa.float32())),
            "rate": [rate for _, rate in rows],
        }
    )
    plan = Plan((X, RATE), True, AXES)
    found = cut(plan, table, chunk, batch_rows, job_bytes=job_bytes)
    seen: list[int] = []
    for each in found:
        if isinstance(each, Refused):
            assert rows[each.row][0] is None
            assert each.carried.column("id").to_pylist() == [each.row]
            seen.append(each.row)
            continue
        x, rate = each.tensors(plan, 0, len(each.rows))
        assert len(each.rows) <= batch_rows
        assert x.array.nbytes <= max(job_bytes, x.array.nbytes // len(each.rows))
        assert (np.diff(each.rows) > 0).all()
        assert [i for batch in each.carried for i in batch.column("id").to_pylist()] == each.rows.tolist()
        for position, row in enumerate(each.rows.tolist()):
            assert x.array[position].tolist() == [np.float32(v) for v in rows[row][0]]
            assert int(rate.array) == rows[row][1]
        seen += each.rows.tolist()
    assert sorted(seen) == list(range(len(rows)))
    parts = [each for each in found if isinstance(each, Part)]
    assert [part.number for part in parts] == list(range(len(parts)))
    again = [
        each.rows.tolist()
        for each in cut(plan, table, chunk, batch_rows, job_bytes=job_bytes)
        if isinstance(each, Part)
    ]
    assert again == [part.rows.tolist() for part in parts]


def test_a_rare_shape_does_not_wait_for_ever() -> None:
    """A row that matches nobody goes once enough others have passed, so that little is held."""
    cells = [[1.0, 2.0]] + [[1.0]] * (HOLD * 4 + 40)
    table = pa.table({"id": range(len(cells)), "x": pa.array(cells, pa.list_(pa.float32()))})
    found = cut(Plan((X,), True, AXES), table, 10, 4)
    rare = next(i for i, part in enumerate(found) if isinstance(part, Part) and part.rows[0] == 0)
    assert rare < len(found) - 5


def test_a_row_too_large_for_a_message_is_refused() -> None:
    """Text and numbers alike; the rows around it go on."""
    text = Binding("t", ("t",), "BYTES", (), "row", 0)
    table = pa.table({"id": range(3), "t": ["a", "b" * 5000, "c"]})
    found = cut(Plan((text,), True, RowAxes({"t": 0}, {"y": 0})), table, 3, 8, most_bytes=1000)
    assert [(each.row, "1000 bytes" in str(each.error)) for each in found if isinstance(each, Refused)] == [(1, True)]
    assert [part.rows.tolist() for part in found if isinstance(part, Part)] == [[0, 2]]


def test_another_row_axis() -> None:
    """Rows are stacked along the axis that the model counts them by."""
    plan = Plan((Binding("x", ("x",), "FP32", (2,), "row", 1),), True, RowAxes({"x": 1}, {"y": 0}))
    table = pa.table({"id": range(3), "x": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2))})
    (part,) = cut(plan, table, 3, 8)
    assert isinstance(part, Part)
    (x,) = part.tensors(plan, 1, 3)
    assert x.array.tolist() == [[3, 5], [4, 6]]
