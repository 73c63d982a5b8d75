"""Small ONNX models made on the spot, each of a kind that real models are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str | None] | None

OPSET = 17


def value(name: str, kind: int, shape: Shape) -> Any:
    """A tensor input or output; the shape None declares no rank."""
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], weights: Sequence[Any] = ()) -> bytes:
    """A model's bytes."""
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), initializer=list(weights))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def identity(kind: int = TensorProto.FLOAT, shape: Shape = ("n", 3)) -> bytes:
    """y = x."""
    return model([helper.make_node("Identity", ["x"], ["y"])], [value("x", kind, shape)], [value("y", kind, shape)])


def arithmetic() -> bytes:
    """Two inputs, three outputs that are not in alphabetical order, and names with colons and slashes."""
    nodes = [
        helper.make_node("Add", ["in/a:0", "b"], ["sum:0"]),
        helper.make_node("Sub", ["in/a:0", "b"], ["difference"]),
        helper.make_node("Mul", ["in/a:0", "b"], ["7"]),
    ]
    dims = ("batch", 2)
    inputs = [value(name, TensorProto.FLOAT, dims) for name in ("in/a:0", "b")]
    return model(nodes, inputs, [value(name, TensorProto.FLOAT, dims) for name in ("sum:0", "difference", "7")])


def scaled() -> bytes:
    """A vector times a scalar (shape [])."""
    node = helper.make_node("Mul", ["x", "factor"], ["y"])
    inputs = [value("x", TensorProto.FLOAT, ("n",)), value("factor", TensorProto.FLOAT, ())]
    return model([node], inputs, [value("y", TensorProto.FLOAT, ("n",))])


def labels() -> bytes:
    """Text in, text out: a table of words, and itself."""
    table = {"keys_strings": ["cat", "hund"], "values_strings": ["Katze", "Hündin"], "default_string": "?"}
    nodes = [
        helper.make_node("LabelEncoder", ["words"], ["translated"], domain="ai.onnx.ml", **table),
        helper.make_node("Identity", ["words"], ["same"]),
    ]
    outputs = [value(name, TensorProto.STRING, ("n",)) for name in ("translated", "same")]
    return model(nodes, [value("words", TensorProto.STRING, ("n",))], outputs)


def fixed_batch() -> bytes:
    """Takes three rows, no more and no fewer."""
    return identity(shape=(3, 2))


def no_batch_axis() -> bytes:
    """The sum of everything, a scalar."""
    node = helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0)
    return model([node], [value("x", TensorProto.FLOAT, ("a", "b"))], [value("total", TensorProto.FLOAT, ())])


def wrong_output_rank() -> bytes:
    """Declares a matrix and makes whatever shape it is told to."""
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    inputs = [value("x", TensorProto.FLOAT, ("n",)), value("shape", TensorProto.INT64, ("rank",))]
    return model([node], inputs, [value("y", TensorProto.FLOAT, ("p", "q"))])


def joined() -> bytes:
    """Concatenates along the first axis: the output's size comes from both inputs."""
    node = helper.make_node("Concat", ["a", "b"], ["y"], axis=0)
    inputs = [value(name, TensorProto.INT64, (None, 2)) for name in ("a", "b")]
    return model([node], inputs, [value("y", TensorProto.INT64, (None, 2))])


def picky(width: int = 48) -> bytes:
    """Leaves its width open and takes one only, as text recognizers do."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weights = [numpy_helper.from_array(np.ones((width, 1), np.float32), "w")]
    inputs = [value("x", TensorProto.FLOAT, ("batch", "width"))]
    return model([node], inputs, [value("y", TensorProto.FLOAT, ("batch", 1))], weights)


def heavy(megabytes: int) -> bytes:
    """A square matrix of about so many MiB, of noise, so that nothing shares or compresses it."""
    side = int((megabytes * (1 << 20) / 4) ** 0.5)
    weights = np.random.default_rng(7).standard_normal((side, side), np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    inputs = [value("x", TensorProto.FLOAT, ("n", side))]
    outputs = [value("y", TensorProto.FLOAT, ("n", side))]
    return model([node], inputs, outputs, [numpy_helper.from_array(weights, "w")])


def endless() -> bytes:
    """Never comes to the end of a run."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["v_in", "v_in"], ["v_out"]),
            helper.make_node("Identity", ["on_in"], ["on_out"]),
        ],
        "body",
        [
            value("i", TensorProto.INT64, ()),
            value("on_in", TensorProto.BOOL, ()),
            value("v_in", TensorProto.FLOAT, (1,)),
        ],
        [value("on_out", TensorProto.BOOL, ()), value("v_out", TensorProto.FLOAT, (1,))],
    )
    weights = [
        numpy_helper.from_array(np.array(1 << 62, np.int64), "times"),
        numpy_helper.from_array(np.array(True), "on"),
    ]
    node = helper.make_node("Loop", ["times", "on", "x"], ["y"], body=body)
    return model([node], [value("x", TensorProto.FLOAT, (1,))], [value("y", TensorProto.FLOAT, (1,))], weights)


def sequence_output() -> bytes:
    """Makes a sequence of tensors."""
    node = helper.make_node("SplitToSequence", ["x"], ["parts"], axis=0)
    parts = helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    return model([node], [value("x", TensorProto.FLOAT, (2, 2))], [parts])


def missing_op() -> bytes:
    """Uses an operator that no library has."""
    node = helper.make_node("Levitate", ["x"], ["y"])
    return model([node], [value("x", TensorProto.FLOAT, (1,))], [value("y", TensorProto.FLOAT, (1,))])


def with_external_weights(folder: Path, weights: str = "onnx::MatMul_12") -> Path:
    """A model in ``folder`` whose weights lie in a file beside it; y = x · 2."""
    folder.mkdir(parents=True, exist_ok=True)
    tensor = numpy_helper.from_array(np.eye(64, dtype=np.float32) * 2, "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    inputs, outputs = [value("x", TensorProto.FLOAT, ("n", 64))], [value("y", TensorProto.FLOAT, ("n", 64))]
    loaded = onnx.load_from_string(model([node], inputs, outputs, [tensor]))
    path = folder / "model.onnx"
    onnx.save(loaded, str(path), save_as_external_data=True, location=weights, size_threshold=0)
    return path


def outer() -> bytes:
    """The sum of a vector's outer product with itself: small in, small out, large in between."""
    axes = [numpy_helper.from_array(np.array([axis], np.int64), f"axis{axis}") for axis in (0, 1)]
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axis0"], ["row"]),
        helper.make_node("Unsqueeze", ["x", "axis1"], ["column"]),
        helper.make_node("Mul", ["row", "column"], ["product"]),
        helper.make_node("ReduceSum", ["product"], ["y"], keepdims=0),
    ]
    return model(nodes, [value("x", TensorProto.FLOAT, ("n",))], [value("y", TensorProto.FLOAT, ())], axes)


def relocated(content: bytes, location: str) -> bytes:
    """The same model with its external weights said to lie in another place."""
    loaded = onnx.load_from_string(content)
    for tensor in loaded.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    return loaded.SerializeToString()
