"""Calibration: rows of every form, and the step sizes that the three methods choose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from qworker.build.calibrate import BINS, METHODS, entropy_limit, largest_magnitudes, percentile_limit, scales
from qworker.build.calibrate_rows import fixed_rows, read_rows
from qworker.build.convert import onnx
from qworker.errors import InvalidInput, ModelRefused
from qworker.wire.signature import TensorSpec
from tests.support.models import model, value

X = TensorSpec("x", "FP32", ("n", 3))
IDS = TensorSpec("in/ids", "INT64", (1, "t"))
RATE = TensorSpec("rate", "INT64", ())


def test_a_stack_is_read_row_by_row(tmp_path: Path) -> None:
    """The first axis counts rows; what is given once is the same for all."""
    np.savez(tmp_path / "rows.npz", x=np.arange(12, dtype=np.float64).reshape(4, 3), rate=np.int64(16_000))
    rows = read_rows(tmp_path / "rows.npz", [X, RATE])
    assert rows.count == 4
    row = rows.read(2)
    assert (row["x"].dtype, row["x"].tolist(), int(row["rate"])) == (np.float32, [[6, 7, 8]], 16_000)


def test_rows_without_a_batch_axis_get_one(tmp_path: Path) -> None:
    """Four pictures of the model's shape without its first axis."""
    np.savez(tmp_path / "rows.npz", x=np.ones((5, 1, 3), np.float32))
    assert read_rows(tmp_path / "rows.npz", [X]).read(0)["x"].shape == (1, 3)


def test_a_folder_of_calls_may_vary_in_size(tmp_path: Path) -> None:
    """Texts have different lengths. Names with a slash are written with an underscore."""
    for length in (2, 5):
        np.savez(tmp_path / f"{length}.npz", in_ids=np.ones((1, length), np.int32))
    rows = read_rows(tmp_path, [IDS])
    assert [rows.read(i)["in/ids"].shape for i in range(rows.count)] == [(1, 2), (1, 5)]
    assert rows.read(0)["in/ids"].dtype == np.int64


def test_a_folder_of_arrays_is_one_call_each(tmp_path: Path) -> None:
    """A file a call for one input; a folder an input for several."""
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.full((3,), i, np.float32))
    assert read_rows(tmp_path, [X]).read(2)["x"].tolist() == [[2, 2, 2]]
    for name in ("x", "in_ids"):
        (tmp_path / "two" / name).mkdir(parents=True)
        np.save(tmp_path / "two" / name / "0.npy", np.ones((1, 3), np.int64 if name == "in_ids" else np.float32))
    assert set(read_rows(tmp_path / "two", [X, IDS]).read(0)) == {"x", "in/ids"}


def test_parquet_lists_take_the_inputs_shape(tmp_path: Path) -> None:
    """A column an input, a list a row."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"x": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "in/ids": [[1, 2], [3, 4]]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    row = read_rows(tmp_path / "rows.parquet", [X, IDS]).read(1)
    assert (row["x"].tolist(), row["in/ids"].tolist()) == ([[4, 5, 6]], [[3, 4]])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.ones((2, 3))}, "named 'x'"),
        ({"x": np.ones((2, 3), np.complex64)}, "found complex64"),
        ({"x": np.ones((2, 4), np.float32)}, "expected rows of shape"),
    ],
)
def test_rows_that_do_not_fit_are_told(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    """Names, types and shapes are the model's."""
    np.savez(tmp_path / "rows.npz", **arrays)
    with pytest.raises(InvalidInput, match=words):
        read_rows(tmp_path / "rows.npz", [X]).read(0)


def test_no_rows_are_an_error(tmp_path: Path) -> None:
    """An empty folder, a missing file, a file of another kind."""
    for path in (tmp_path, tmp_path / "none.npz", tmp_path / "rows.csv"):
        with pytest.raises(InvalidInput, match=r"rows|read"):
            read_rows(path, [X])


@given(st.integers(1, 200))
def test_held_out_rows_were_not_calibrated_on(count: int) -> None:
    """A fifth is kept back, at least one; only a single row serves both ends."""
    rows = fixed_rows([{"x": np.ones(1)}] * count, made_up=False)
    both = set(rows.calibration()) & set(rows.held_out())
    assert both == (set() if count > 1 else {0})
    assert len(rows.held_out()) == max(1, count // 5)
    assert set(rows.calibration()) | set(rows.held_out()) == set(range(count))


# --- step sizes ---------------------------------------------------------------------------------


def doubled() -> object:
    """y = x + x, with an inner tensor."""
    nodes = [helper.make_node("Add", ["x", "x"], ["inner"]), helper.make_node("Identity", ["inner"], ["y"])]
    dims = ("n", 3)
    content = model(nodes, [value("x", TensorProto.FLOAT, dims)], [value("y", TensorProto.FLOAT, dims)])
    return onnx.load_model_from_string(content)


def test_inputs_and_inner_tensors_are_seen() -> None:
    """The largest magnitude of each, over all rows asked for and no others."""
    feeds = [{"x": np.array([[1, -2, 0.5]], np.float32)}, {"x": np.array([[3, 0, 0]], np.float32)}]
    rows = fixed_rows(feeds, made_up=False)
    assert largest_magnitudes(doubled(), ["x", "inner"], rows, [0, 1]) == {"x": 3.0, "inner": 6.0}
    assert largest_magnitudes(doubled(), ["inner"], rows, [0]) == {"inner": 4.0}


def test_min_max_takes_the_whole_range() -> None:
    """127 steps to the largest magnitude."""
    rows = fixed_rows([{"x": np.array([[1, -2, 0.5]], np.float32)}], made_up=False)
    assert scales(doubled(), ["inner"], rows, [0], "minmax") == {"inner": pytest.approx(4 / 127)}


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_of_zeros_still_has_a_step(method: str) -> None:
    """A scale of zero would divide by zero."""
    rows = fixed_rows([{"x": np.zeros((1, 3), np.float32)}], made_up=False)
    assert scales(doubled(), ["inner"], rows, [0], method)["inner"] > 0  # type: ignore[arg-type]


def test_values_that_are_not_finite_are_named() -> None:
    """No step size covers infinity."""
    rows = fixed_rows([{"x": np.array([[np.inf, 0, 0]], np.float32)}], made_up=False)
    with pytest.raises(ModelRefused, match="'inner' is infinite"):
        scales(doubled(), ["inner"], rows, [0], "percentile")


def histogram(values: np.ndarray) -> np.ndarray:
    return np.histogram(np.abs(values), bins=BINS, range=(0, float(np.abs(values).max())))[0].astype(np.float64)


def test_one_outlier_does_not_take_the_range() -> None:
    """A single value 20 times the spread of the rest is clipped by both, min-max would spend 4 bits on it."""
    values = np.append(np.random.default_rng(1).standard_normal(200_000), 80.0)
    assert percentile_limit(histogram(values)) * 80 < 5
    assert entropy_limit(histogram(values)) * 80 < 10


def test_an_even_spread_is_not_clipped() -> None:
    """Where all values are in use, nothing may be cut off."""
    values = np.random.default_rng(2).uniform(-1, 1, 200_000)
    assert percentile_limit(histogram(values)) > 0.99
    assert entropy_limit(histogram(values)) > 0.99


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_limits_lie_within_the_range(seed: int, filled: float) -> None:
    """For any histogram, the empty one too."""
    rng = np.random.default_rng(seed)
    counts = np.where(rng.uniform(size=BINS) < filled, rng.integers(0, 1000, BINS), 0).astype(np.float64)
    for limit in (percentile_limit, entropy_limit):
        assert 0 < limit(counts) <= 1
