"""Which column feeds which input follows from names and types, or is told to be unclear, with both sides."""

from __future__ import annotations

import pytest

from qworker.errors import ColumnMissing, MappingUnclear, QworkerError
from qworker.score.mapping import ColumnType, plan
from qworker.wire.rows import RowAxes
from qworker.wire.signature import Signature, TensorSpec

ROWS = RowAxes({"x": 0}, {"y": 0})


def signature(*inputs: TensorSpec) -> Signature:
    return Signature(inputs, (TensorSpec("y", "FP32", ("n",)),))


X = TensorSpec("x", "FP32", ("n", 3))
IDS = ColumnType("id", "BYTES")
VECTOR = ColumnType("v", "FP64", (None,))


def test_by_name_whatever_else_there_is() -> None:
    """A column of the input's name feeds it; a name that no table can have is matched by its plain form."""
    spec = TensorSpec("serving_default_x:0", "FP32", ("n", 3))
    found = plan("m", signature(spec), None, [VECTOR, ColumnType("serving_default_x", "FP32", (3,))], {})
    assert [(b.input, b.columns) for b in found.bindings] == [("serving_default_x:0", ("serving_default_x",))]


def test_the_only_column_that_fits() -> None:
    """Other columns are of other types or ranks, or are reserved."""
    columns = [IDS, ColumnType("n", "INT64"), ColumnType("other", "FP32", (3,)), VECTOR]
    (binding,) = plan("m", signature(X), ROWS, columns, {}, reserved=["other"]).bindings
    assert (binding.columns, binding.placing, binding.axis, binding.shape) == (("v",), "row", 0, (3,))


def test_single_numbers_are_packed() -> None:
    """As many number columns as the vector is long, in their order; or those that are asked for by a pattern."""
    numbers = [ColumnType(name, "FP64") for name in ("a", "b", "c")]
    (binding,) = plan("m", signature(X), ROWS, [IDS, *numbers], {}).bindings
    assert binding.columns == ("a", "b", "c")
    more = [ColumnType(f"f{i}", "INT64") for i in range(3)]
    (binding,) = plan("m", signature(X), ROWS, [*numbers, *more], {"x": "f*"}).bindings
    assert binding.columns == ("f0", "f1", "f2")


def test_axes_say_what_is_a_row_and_what_is_shared() -> None:
    """An input without a row axis is shared by the rows of a job; a cell as large as the input is all of it."""
    both = signature(TensorSpec("x", "FP32", (2, "n")), TensorSpec("rate", "INT64", ()))
    columns = [ColumnType("x", "FP32", (2,)), ColumnType("rate", "INT64")]
    found = plan("m", both, RowAxes({"x": 1}, {"y": 0}), columns, {})
    assert [(b.placing, b.axis) for b in found.bindings] == [("row", 1), ("shared", 0)]
    assert found.together
    whole = plan("m", signature(X), ROWS, [ColumnType("x", "FP32", (None, 3))], {})
    assert [b.placing for b in whole.bindings] == ["whole"]
    assert not whole.together


def test_models_that_are_not_batched_get_one_row_a_job() -> None:
    """Without verified axes rows are not put together, though a cell without the first axis is still a row."""
    found = plan("m", signature(X), None, [ColumnType("x", "FP32", (3,))], {})
    assert [b.placing for b in found.bindings] == ["row"]
    assert not found.together


@pytest.mark.parametrize(
    ("columns", "asked", "error", "words"),
    [
        ([IDS], {}, MappingUnclear, ["x (FP32 [n, 3])", "id (BYTES)"]),
        ([VECTOR, ColumnType("w", "FP32", (3,))], {}, MappingUnclear, ["several columns fit x: v, w"]),
        ([VECTOR], {"x": "u"}, ColumnMissing, ["column u", "v"]),
        ([VECTOR], {"z": "v"}, MappingUnclear, ["z: no such input"]),
        ([IDS, VECTOR], {"x": "id"}, MappingUnclear, ["cannot become FP32"]),
        ([IDS, VECTOR], {"x": "v,v"}, MappingUnclear, ["no single number"]),
        ([ColumnType("x", "FP32", (2, 2, 2))], {}, MappingUnclear, ["3 axes"]),
        ([ColumnType("x", None)], {}, MappingUnclear, ["no tensor type"]),
    ],
)
def test_unclear(columns: list[ColumnType], asked: dict[str, str], error: type[QworkerError], words: list[str]) -> None:
    """The error says what the model takes, what the input has, and what does not meet."""
    with pytest.raises(error) as told:
        plan("m", signature(X), ROWS, columns, asked)
    assert all(word in str(told.value) for word in words), str(told.value)
