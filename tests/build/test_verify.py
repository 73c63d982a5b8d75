"""Whether rows may share a run: found out by running, for models of every kind that real ones are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from qworker.build.inspect import inspect
from qworker.build.register import register
from qworker.build.run_times import choose_rows, measure_batches
from qworker.build.verify import TOLERANCES, Budget, Unbatched, Verified, verify
from qworker.engine.base import Engine, ModelSource
from qworker.engine.onnx import OnnxBackend
from qworker.engine.warmup import made_up_inputs, sample_tensors
from qworker.store.local import LocalStore
from tests.support import models
from tests.support.models import model, value

FLOAT = TensorProto.FLOAT
ROWS = ("n", 3)


def load(content: bytes) -> Engine:
    return OnnxBackend().load(ModelSource("m", "1", Path("-"), content))


def verdict(content: bytes, sample: Mapping[str, Any] | None = None, **settings: Any) -> Verified | Unbatched:
    """What ``verify`` says of a model, on a sample or on made-up inputs."""
    engine = load(content)
    tensors = made_up_inputs(engine) if sample is None else sample_tensors(engine.signature, sample)
    assert tensors is not None
    return verify(engine, tensors, **settings)


def one_input(*nodes: Any, out: Sequence[Any] = ROWS, weights: Mapping[str, Any] | None = None) -> bytes:
    """A model of the input ``x`` with rows of three, and the output ``y``."""
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    return model(nodes, [value("x", FLOAT, ROWS)], [value("y", FLOAT, out)], constants)


node = helper.make_node


def recurrent() -> bytes:
    """A step of a recurrent net: rows on axis 0 of ``x``, on axis 1 of the state, a shared rate, time first out."""
    nodes = [
        node("Mul", ["x", "rate"], ["scaled"]),
        node("Unsqueeze", ["scaled", "zero"], ["one_step"]),  # [1, n, 4]
        node("Add", ["state", "one_step"], ["next"]),  # [2, n, 4]
        node("Concat", ["next", "one_step"], ["steps"], axis=0),  # [3, n, 4]: time, rows, values
    ]
    inputs = [value("x", FLOAT, ("n", 4)), value("state", FLOAT, (2, None, 4)), value("rate", FLOAT, ())]
    outputs = [value("next", FLOAT, (2, None, 4)), value("steps", FLOAT, (3, None, 4))]
    return model(nodes, inputs, outputs, [numpy_helper.from_array(np.array([0], np.int64), "zero")])


# --- models that are batched --------------------------------------------------------------------


def test_axes_are_found_for_each_tensor() -> None:
    """State on axis 1, time-major output, and a scalar that all rows share."""
    sample = {"x": np.ones((1, 4), np.float32), "state": np.zeros((2, 1, 4), np.float32), "rate": np.float32(0.5)}
    found = verdict(recurrent(), sample)
    assert isinstance(found, Verified)
    assert (found.axes.inputs, found.axes.outputs) == ({"x": 0, "state": 1}, {"next": 1, "steps": 1})
    assert found.max_error < 1e-6


def test_time_first_inputs() -> None:
    """A cumulated sum over the first axis couples it: the rows are on the second."""
    nodes = [node("CumSum", ["x", "axis"], ["y"])]
    shape = ("time", "n", 2)
    content = model(
        nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, shape)], [numpy_helper.from_array(np.array(0), "axis")]
    )
    found = verdict(content, {"x": np.ones((5, 1, 2), np.float32)})
    assert isinstance(found, Verified)
    assert (found.axes.inputs, found.axes.outputs) == ({"x": 1}, {"y": 1})


def test_tables_are_tried_over_their_whole_length() -> None:
    """Whole numbers are places in a table of unknown length: rows differ, though the sample is all ones."""
    table = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    content = model(
        [node("Gather", ["table", "ids"], ["y"])],
        [value("ids", TensorProto.INT64, ("n", "length"))],
        [value("y", FLOAT, ("n", "length", 4))],
        [numpy_helper.from_array(table, "table")],
    )
    found = verdict(content, {"ids": np.ones((1, 6), np.int64)})
    assert isinstance(found, Verified)
    places = {int(i) for row in found.rows for i in row[0].array.reshape(-1)}
    assert len(places) > 10


def test_floats_that_are_places_in_a_table() -> None:
    """Random floats make no places; values of the sample do."""
    content = one_input(
        node("Cast", ["x"], ["places"], to=TensorProto.INT64),
        node("Gather", ["table", "places"], ["y"]),
        weights={"table": np.linspace(0, 1, 20, dtype=np.float32)},
    )
    found = verdict(content, {"x": np.array([[19, 18, 17]], np.float32)})
    assert isinstance(found, Verified)


# --- models that are not ------------------------------------------------------------------------


COUPLED = {
    "mean over rows": one_input(
        node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1), node("Sub", ["x", "mean"], ["y"])
    ),
    "largest of all rows, beyond what is usual": one_input(
        node("Abs", ["x"], ["sizes"]),
        node("ReduceMax", ["sizes"], ["most"], keepdims=0),
        node("Max", ["most", "hundred"], ["scale"]),
        node("Div", ["x", "scale"], ["y"]),
        weights={"hundred": np.float32(100)},
    ),
    "rows before it": one_input(node("CumSum", ["x", "axis"], ["y"]), weights={"axis": np.array(0)}),
    "number of rows": one_input(
        node("Shape", ["x"], ["shape"], start=0, end=1),
        node("Cast", ["shape"], ["rows"], to=FLOAT),
        node("Mul", ["rows", "little"], ["share"]),
        node("Add", ["one", "share"], ["factor"]),
        node("Mul", ["x", "factor"], ["y"]),
        weights={"little": np.float32(1e-3), "one": np.float32(1)},
    ),
    "place among the rows": one_input(
        node("Shape", ["x"], ["shape"], start=0, end=1),
        node("Squeeze", ["shape"], ["rows"]),
        node("Range", ["zero", "rows", "one"], ["places"]),
        node("Cast", ["places"], ["floats"], to=FLOAT),
        node("Unsqueeze", ["floats", "last"], ["column"]),
        node("Add", ["x", "column"], ["y"]),
        weights={"zero": np.array(0), "one": np.array(1), "last": np.array([1])},
    ),
}


@pytest.mark.parametrize("content", COUPLED.values(), ids=list(COUPLED))
def test_coupled_rows(content: bytes) -> None:
    """An answer that depends on the rows beside it, in any way."""
    found = verdict(content)
    assert isinstance(found, Unbatched)
    assert found.reason.startswith("its rows are coupled: output 'y'")


REFUSED = {
    "fixed batch": (models.fixed_batch(), "its batch is fixed"),
    "text": (models.labels(), "nothing but text"),
    "no axis of rows in an output": (models.no_batch_axis(), "output 'total' has no axis that counts rows"),
    "rows that become columns": (one_input(node("Transpose", ["x"], ["t"]), node("MatMul", ["x", "t"], ["y"])), "grow"),
    "an output as long as its values say": (
        one_input(node("NonZero", ["x"], ["places"]), node("Cast", ["places"], ["y"], to=FLOAT), out=(2, "found")),
        "output 'y'",
    ),
    "one row is another shape": (one_input(node("Squeeze", ["x"], ["y"]), out=None), "output 'y'"),
    "random": (
        one_input(node("RandomNormalLike", ["x"], ["noise"]), node("Add", ["x", "noise"], ["y"])),
        "its answers are random",
    ),
    "one answer for all": (
        one_input(node("Mul", ["x", "nought"], ["y"]), weights={"nought": np.float32(0)}),
        "cannot be told apart",
    ),
    "at most two rows": (
        one_input(
            node("Shape", ["x"], ["shape"], start=0, end=1),
            node("Sub", ["shape", "one"], ["place"]),
            node("Gather", ["two", "place"], ["factor"]),
            node("Mul", ["x", "factor"], ["y"]),
            weights={"one": np.array([1]), "two": np.ones(2, np.float32)},
        ),
        "does not take 3 rows at once",
    ),
}


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_batched(content: bytes, reason: str) -> None:
    """Each with its reason."""
    found = verdict(content)
    assert isinstance(found, Unbatched)
    assert reason in found.reason


def test_dynamic_quantization(tmp_path: Path) -> None:
    """The scale of a run is taken over all its rows: known from the graph, also inside a branch, and felt."""
    quantize = [
        node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    felt = verdict(one_input(*quantize))
    assert isinstance(felt, Unbatched)
    assert "coupled" in felt.reason
    branch = helper.make_graph(quantize, "then", [], [value("y", FLOAT, ROWS)])
    other = helper.make_graph([node("Identity", ["x"], ["y"])], "else", [], [value("y", FLOAT, ROWS)])
    content = one_input(
        node("If", ["yes"], ["y"], then_branch=branch, else_branch=other), weights={"yes": np.array(True)}
    )
    (tmp_path / "model.onnx").write_bytes(content)
    assert inspect(tmp_path / "model.onnx").dynamic_quantization
    known = verdict(content, dynamic_quantization=True)
    assert isinstance(known, Unbatched)
    assert "quantized dynamically" in known.reason


def test_tolerance_is_a_setting() -> None:
    """A model that moves by thousandths is refused, unless that is declared harmless."""
    moves = COUPLED["number of rows"]
    assert isinstance(verdict(moves), Unbatched)
    found = verdict(moves, tolerances=dict.fromkeys(TOLERANCES, 0.1))
    assert isinstance(found, Verified)
    assert 1e-3 < found.max_error < 0.1
    assert found.tolerance == 0.1


def test_too_slow_to_verify() -> None:
    """What is not verified in time is not batched."""
    found = verdict(models.identity(), budget=Budget(0.0))
    assert isinstance(found, Unbatched)
    assert "not enough to verify" in found.reason


# --- how many -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [
        ([], 1),
        ([1.0], 1),
        ([1.0, 2.0, 4.0], 1),
        ([1.0, 1.8, 3.6], 1),  # a tenth is no gain
        ([1.0, 1.0, 1.1, 1.2], 8),
        ([1.0, 1.0, 1.0, 1.95, 4.0], 4),  # 8 rows are hardly better than 4
        ([1.0, 3.0, 2.0, 2.0], 8),  # worse before it is better
    ],
)
def test_choice_of_rows(seconds: list[float], rows: int) -> None:
    """The fewest with nearly the best rate, and none where that is hardly better than one by one."""
    assert choose_rows([(2**i, each) for i, each in enumerate(seconds)]) == rows


def test_larger_batches_are_compared_too() -> None:
    """A model that goes wrong from five rows on is batched up to four."""
    content = one_input(
        node("Shape", ["x"], ["shape"], start=0, end=1),
        node("Greater", ["shape", "many"], ["too_many"]),
        node("Cast", ["too_many"], ["wrong"], to=FLOAT),
        node("MatMul", ["x", "w"], ["right"]),
        node("Add", ["right", "wrong"], ["y"]),
        weights={"many": np.array([6]), "w": np.eye(3, dtype=np.float32)},
    )
    engine = load(content)
    inputs = made_up_inputs(engine)
    assert inputs is not None
    found = verify(engine, inputs)
    assert isinstance(found, Verified)
    assert [rows for rows, _ in measure_batches(engine, found, Budget(5.0), 1 << 20).times] == [1, 2, 4]


# --- in the card --------------------------------------------------------------------------------


def test_the_card_says_what_was_found(tmp_path: Path) -> None:
    """Axes, rows, run times; or the reason. A batch's memory is in what the ledger books."""
    store = LocalStore(tmp_path / "store")
    wide = tmp_path / "wide.onnx"
    weights = np.random.default_rng(0).standard_normal((4096, 1024), np.float32)
    wide.write_bytes(
        model(
            [node("MatMul", ["x", "w"], ["y"])],
            [value("x", FLOAT, ("n", 4096))],
            [value("y", FLOAT, ("n", 1024))],
            [numpy_helper.from_array(weights, "w")],
        )
    )
    card = register(store, wide)
    assert card.batching is not None
    assert (card.batching.inputs, card.batching.outputs) == ({"x": 0}, {"y": 0})
    assert card.batching.max_rows > 1, "16 MiB are read for one row or for many"
    assert card.unbatched is None
    assert [time.rows for time in card.run_times][:3] == [1, 2, 4]
    coupled = tmp_path / "coupled.onnx"
    coupled.write_bytes(COUPLED["mean over rows"])
    card = register(store, coupled)
    assert card.batching is None
    assert card.unbatched is not None
    assert "coupled" in card.unbatched
    assert len(card.run_times) == 1
