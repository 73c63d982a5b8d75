"""Conversions: what changes in a graph, what does not, and that the answers stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from qworker.build.convert import (
    at_least_opset,
    check_takeable,
    read_model,
    release_names,
    simplified,
    source_digest,
    write_model,
)
from qworker.build.convert_fp16 import rounded, to_fp16
from qworker.build.convert_int8 import place, quantize_weight, to_int8
from qworker.build.profiles import parse_profiles
from qworker.errors import ModelRefused
from tests.support import models
from tests.support.models import model, value

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
RNG = np.random.default_rng(5)


def graph(
    nodes: Sequence[Any], shape: Sequence[Any] = ("n", 4), out: Sequence[Any] | None = None, **weights: np.ndarray
) -> Any:
    """A model from x to y, as a message."""
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    content = model(nodes, [value("x", FLOAT, shape)], [value("y", FLOAT, out or shape)], tensors)
    return onnx.load_model_from_string(content)


def node(operator: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), [output], name=output, **attributes)


def run(built: Any, **feeds: np.ndarray) -> np.ndarray:
    """The first output; the model is checked first, and rounds where it says so."""
    onnx.checker.check_model(built, full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        rounded(built).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, feeds)[0])


def element_type(built: Any, name: str) -> int:
    """The type of an inner tensor."""
    inferred = onnx.shape_inference.infer_shapes(built)
    return next(each.type.tensor_type.elem_type for each in inferred.graph.value_info if each.name == name)


def copy(built: Any) -> Any:
    return onnx.load_model_from_string(built.SerializeToString())


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# --- FP16 ---------------------------------------------------------------------------------------


def test_inside_is_half_and_outside_is_not() -> None:
    """Inputs and outputs keep their types; weights are stored in two bytes."""
    built = graph([node("MatMul", "x w", "h"), node("Relu", "h", "y")], w=floats(4, 4))
    x = floats(3, 4)
    expected = run(built, x=x)
    half = to_fp16(copy(built))
    assert (half.halved, half.floating) == (2, 2)
    assert element_type(half.model, "h") == HALF
    assert [tensor.data_type for tensor in half.model.graph.initializer] == [HALF]
    found = run(half.model, x=x)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=5e-3)


def test_a_cast_to_float_becomes_a_cast_to_half() -> None:
    """What breaks converters that change types by name: nodes whose type is an attribute."""
    nodes = [node("Cast", "x", "i", to=TensorProto.INT64), node("Cast", "i", "f", to=FLOAT), node("Mul", "f w", "y")]
    built = graph(nodes, w=floats(4))
    x = np.array([[1.5, 2.5, -3.5, 4]], np.float32)
    half = to_fp16(copy(built))
    assert element_type(half.model, "f") == HALF
    np.testing.assert_allclose(run(half.model, x=x), run(built, x=x), rtol=5e-3)


def test_a_constant_serves_both_precisions() -> None:
    """One node in FP32 and one in FP16 read the same weight, a Constant node's too."""
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(floats(4)))
    built = graph(
        [constant, node("Mul", "x w", "a"), node("Exp", "a", "e"), node("Pow", "e w", "p"), node("Add", "p w", "y")]
    )
    x = floats(2, 4) * 0.1
    half = to_fp16(copy(built))
    assert 0 < half.halved < half.floating
    np.testing.assert_allclose(run(half.model, x=x), run(built, x=x), rtol=2e-2, atol=1e-2)


def test_tensors_seen_beyond_the_range_stay() -> None:
    """A product of 1e6 has no FP16 value; its neighbours have."""
    nodes = [node("Mul", "x big", "h"), node("Div", "h big", "d"), node("Relu", "d", "y")]
    built = graph(nodes, big=np.array([1e3], np.float32))
    x = np.full((1, 4), 1e3, np.float32)
    assert np.isinf(run(to_fp16(copy(built)).model, x=x)).any()
    half = to_fp16(copy(built), frozenset({"h"}))
    np.testing.assert_allclose(run(half.model, x=x), x, rtol=1e-2)
    assert element_type(half.model, "h") == FLOAT


@pytest.mark.parametrize("constant", [1e-12, 1e9])
def test_constants_without_a_half_value_keep_their_node(constant: float) -> None:
    """An epsilon of 1e-12 would become zero, and the division after it infinite."""
    nodes = [node("Add", "x c", "h"), node("Reciprocal", "h", "y")]
    built = graph(nodes, c=np.array(constant, np.float32))
    half = to_fp16(copy(built))
    x = np.zeros((1, 4), np.float32)
    assert element_type(half.model, "h") == FLOAT
    assert np.isfinite(run(half.model, x=x)).all() == (constant > 1)  # 1e12 is beyond FP16 itself


def test_a_bound_beyond_the_range_becomes_its_end() -> None:
    """Clip at 1e9 clips nothing, in FP16 neither."""
    built = graph([node("Clip", "x low high", "y")], low=np.array(-1e9, np.float32), high=np.array(1e9, np.float32))
    x = floats(2, 4)
    half = to_fp16(copy(built))
    assert half.halved == 1
    np.testing.assert_allclose(run(half.model, x=x), x, rtol=2e-3)


@pytest.mark.parametrize("operators", [("Pow", "Pow", "Log"), ("Mul", "Mul", "Sqrt")])
def test_spectra_stay(operators: tuple[str, str, str]) -> None:
    """What leads to a logarithm or a magnitude stays in FP32, and the layers behind it do not."""
    two = {"two": np.array(2, np.float32)} if operators[0] == "Pow" else {}
    second = "two" if two else None
    nodes = [
        node("MatMul", "x wr", "re"),
        node("MatMul", "x wi", "im"),
        node(operators[0], f"re {second or 're'}", "rr"),
        node(operators[1], f"im {second or 'im'}", "ii"),
        node("Add", "rr ii", "power"),
        node(operators[2], "power", "spectrum"),
        node("MatMul", "spectrum w", "layer"),
        node("Relu", "layer", "y"),
    ]
    built = graph(nodes, wr=floats(4, 4), wi=floats(4, 4), w=floats(4, 4), **two)
    half = to_fp16(copy(built))
    assert {name: element_type(half.model, name) for name in ("re", "ii", "power")} == dict.fromkeys(
        ("re", "ii", "power"), FLOAT
    )
    assert element_type(half.model, "layer") == HALF
    assert [each.node.output[0] for each in place(copy(built)).nodes] == ["layer"]


def test_inner_graphs_see_what_they_saw() -> None:
    """If reads tensors of the outer graph: they stay FP32 under their names, and its body is left alone."""
    branch = helper.make_graph([node("Add", "h w", "b")], "then", [], [value("b", FLOAT, ("n", 4))])
    other = helper.make_graph([node("Sub", "h w", "b")], "else", [], [value("b", FLOAT, ("n", 4))])
    nodes = [
        node("Mul", "x w", "h"),
        node("ReduceMax", "x", "m", keepdims=0),
        node("Greater", "m zero", "c"),
        node("If", "c", "z", then_branch=branch, else_branch=other),
        node("Mul", "z h", "y"),
    ]
    built = graph(nodes, w=floats(4), zero=np.array(0, np.float32))
    half = to_fp16(copy(built))
    assert half.halved > 0
    for x in (floats(2, 4) + 5, floats(2, 4) - 9):
        np.testing.assert_allclose(run(half.model, x=x), run(built, x=x), rtol=2e-2, atol=2e-2)


def test_parameters_that_are_always_float_stay() -> None:
    """The scales of Resize have no FP16 form; its picture has."""
    nodes = [node("Relu", "x", "r"), helper.make_node("Resize", ["r", "", "scales"], ["y"], mode="linear")]
    built = graph(nodes, (1, 1, 4, 4), (1, 1, 8, 8), scales=np.array([1, 1, 2, 2], np.float32))
    half = to_fp16(copy(built))
    assert half.halved == 2
    x = floats(1, 1, 4, 4)
    np.testing.assert_allclose(run(half.model, x=x), run(built, x=x), rtol=5e-3, atol=5e-3)


OPERATORS = {
    "Add": 2,
    "Mul": 2,
    "Relu": 1,
    "Tanh": 1,
    "Exp": 1,
    "MatMul": 2,
    "Sigmoid": 1,
    "ReduceSum": 1,
    "Softmax": 1,
}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8
    )
)
def test_any_graph_stays_valid_and_gives_about_the_same(steps: list[tuple[str, int, int]]) -> None:
    """Nodes in any order, outputs that are read again, casts wherever the precisions meet."""
    made, nodes = ["x", "w"], []
    for number, (operator, first, second) in enumerate(steps):
        inputs = [made[first % len(made)], made[second % len(made)]][: OPERATORS[operator]]
        scaled = f"s{number}"
        attributes = {"keepdims": 1} if operator == "ReduceSum" else {}
        nodes.append(node(operator, " ".join(inputs), f"t{number}", **attributes))
        nodes.append(node("Tanh", f"t{number}", scaled))
        made.append(scaled if operator != "ReduceSum" else "x")
    nodes.append(node("Identity", made[-1], "y"))
    built = graph(nodes, (4, 4), w=np.eye(4, dtype=np.float32) * 0.5)
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    half = to_fp16(copy(built))
    np.testing.assert_allclose(run(half.model, x=x), run(built, x=x), atol=0.05)


# --- INT8 ---------------------------------------------------------------------------------------


def convolutions() -> Any:
    """Two convolutions, the second one's result added to the first one's."""
    nodes = [
        node("Conv", "x w1 b1", "c1", pads=[1, 1, 1, 1]),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "c2", pads=[1, 1, 1, 1]),
        node("Add", "c2 r1", "a"),
        node("Relu", "a", "y"),
    ]
    weights = {"w1": floats(4, 4, 3, 3), "b1": floats(4), "w2": floats(4, 4, 3, 3)}
    return graph(nodes, (1, 4, 8, 8), **weights)


def test_pairs_stand_where_tensorrt_fuses_them() -> None:
    """On inputs of weighted nodes and on the other branch of an addition, one for each tensor."""
    placement = place(convolutions())
    assert placement.tensors == ("x", "r1")
    assert [each.node.output[0] for each in placement.nodes] == ["c1", "c2"]
    assert [(node.output[0], i) for node, i in placement.residuals] == [("a", 1)]
    assert placement.count == placement.weighted == 2


def test_quantized_graphs_are_what_tensorrts_parser_takes() -> None:
    """8-bit weights with a scale a channel, zero points all zero, biases as they were."""
    built = convolutions()
    placement = place(built)
    quantized = to_int8(built, placement, {"x": 0.03, "r1": 0.1})
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in quantized.graph.initializer}
    weights = [
        node for node in quantized.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in constants
    ]
    assert [constants[node.input[0]].dtype for node in weights] == [np.int8, np.int8]
    assert [constants[node.input[1]].shape for node in weights] == [(4,), (4,)]
    assert all(not constants[node.input[2]].any() for node in quantized.graph.node if "Linear" in node.op_type)
    assert constants["b1"].dtype == np.float32
    assert "w1" not in constants
    kinds = [node.op_type for node in quantized.graph.node]
    assert (kinds.count("QuantizeLinear"), kinds.count("DequantizeLinear")) == (2, 4)


def test_quantized_answers_are_near() -> None:
    """Within a few steps of the original's."""
    built = convolutions()
    x = np.clip(floats(1, 4, 8, 8), -2, 2)
    expected = run(built, x=x)
    largest = float(np.abs(expected).max())
    quantized = to_int8(built, place(built), {"x": 2 / 127, "r1": largest / 127})
    assert np.abs(run(quantized, x=x) - expected).max() < 0.1 * largest


def test_weights_without_a_channel_axis_or_a_constant_stay() -> None:
    """A product of two activations, and one by a transposed left side."""
    nodes = [node("MatMul", "x x", "m"), node("Gemm", "m w", "y", transA=1)]
    assert place(graph(nodes, (4, 4), w=floats(4, 4))).count == 0


@pytest.mark.parametrize("transposed", [0, 1])
def test_channels_of_gemm_follow_its_transposition(transposed: int) -> None:
    """transB swaps them."""
    placement = place(graph([node("Gemm", "x w", "y", transB=transposed)], w=floats(4, 4)))
    assert placement.nodes[0].channel_axis == 1 - transposed


@given(st.integers(0, 2), st.floats(1e-3, 1e3))
def test_weights_are_rounded_to_the_nearest_step(axis: int, size: float) -> None:
    """No error above half a step of its channel, and -128 is not used: the range is symmetric."""
    values = (np.random.default_rng(3).standard_normal((3, 4, 5)) * size).astype(np.float32)
    scale, eight = quantize_weight(values, axis)
    shape = [1, 1, 1]
    shape[axis] = -1
    assert scale.shape == (values.shape[axis],)
    assert int(eight.min()) >= -127
    error = np.abs(eight * scale.reshape(shape) - values)
    assert (error <= scale.reshape(shape) * 0.5001).all()


def test_int8_with_the_rest_in_half_stays_valid() -> None:
    """From operator set 19 on QuantizeLinear takes FP16, and no cast stands between it and its convolution."""
    built = at_least_opset(convolutions(), 19)
    x = np.clip(floats(1, 4, 8, 8), -2, 2)
    expected = run(built, x=x)
    largest = float(np.abs(expected).max())
    half = to_fp16(to_int8(built, place(built), {"x": 2 / 127, "r1": largest / 127}))
    assert np.abs(run(half.model, x=x) - expected).max() < 0.1 * largest
    makers = {name: each.op_type for each in half.model.graph.node for name in each.output}
    convolution = next(each for each in half.model.graph.node if each.op_type == "Conv")
    assert [makers[name] for name in convolution.input[:2]] == ["DequantizeLinear"] * 2


# --- files and the rest -------------------------------------------------------------------------


def test_batch_normalization_goes_into_its_convolution() -> None:
    """Before quantizing: scales of its own would stand between 8-bit nodes."""
    numbers = {name: np.abs(floats(4)) + 0.5 for name in ("scale", "mean", "var")}
    nodes = [node("Conv", "x w", "c"), node("BatchNormalization", "c scale bias mean var", "y")]
    built = graph(nodes, (1, 4, 3, 3), (1, 4, 1, 1), w=floats(4, 4, 3, 3), bias=floats(4), **numbers)
    x = floats(1, 4, 3, 3)
    simple = simplified(copy(built))
    assert [each.op_type for each in simple.graph.node] == ["Conv"]
    np.testing.assert_allclose(run(simple, x=x), run(built, x=x), rtol=1e-4, atol=1e-4)


def test_large_weights_go_into_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """protobuf ends at 2 GiB; the digest covers both files."""
    monkeypatch.setattr("qworker.build.convert._PROTOBUF_LIMIT", 1024)
    built = graph([node("MatMul", "x w", "y")], (1, 64), w=floats(64, 64))
    files = write_model(copy(built), tmp_path / "m.onnx")
    assert [file.name for file in files] == ["m.onnx", "m.onnx.weights"]
    before = source_digest(files[0])
    x = floats(1, 64)
    np.testing.assert_array_equal(run(read_model(files[0]), x=x), run(built, x=x))
    files[1].write_bytes(files[1].read_bytes()[::-1])
    assert source_digest(files[0]) != before
    files[1].unlink()
    with pytest.raises(ModelRefused, match="does not lie beside"):
        read_model(files[0])


def test_sizes_of_one_name_may_differ() -> None:
    """An exporter called them all "?": TensorRT holds sizes of one name equal."""
    built = graph([node("Relu", "x", "y")], ("?", 3, "?", "w"))
    released = release_names(copy(built), parse_profiles(["x=1x3x48x192,4x3x48x192,8x3x48x192"]))
    assert [dim.dim_param for dim in released.graph.input[0].type.tensor_type.shape.dim] == ["", "", "", "w"]
    kept = release_names(copy(built), parse_profiles(["x=1x3x1x5,4x3x4x5,8x3x8x5"]))
    assert [dim.dim_param for dim in kept.graph.input[0].type.tensor_type.shape.dim] == ["?", "", "?", "w"]


REFUSED: Mapping[str, tuple[bytes, str]] = {
    "text": (models.labels(), "string tensor"),
    "double": (models.identity(TensorProto.DOUBLE), "'x' is a float64 tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tensorrt_has_no_place_for_is_named(name: str) -> None:
    """Before its parser, which would not say where."""
    content, words = REFUSED[name]
    with pytest.raises(ModelRefused, match=words):
        check_takeable(onnx.load_model_from_string(content))


def test_a_node_without_a_name_is_told_by_what_it_makes() -> None:
    """Also inside of an If."""
    inner = helper.make_graph(
        [helper.make_node("StringNormalizer", ["s"], ["b"])], "then", [], [value("b", FLOAT, (1,))]
    )
    nodes = [node("If", "c", "y", then_branch=inner, else_branch=inner)]
    built = graph(nodes, c=np.array(True))
    with pytest.raises(ModelRefused, match="node that makes 'b' is a StringNormalizer"):
        check_takeable(built)
