"""INT8 by explicit quantization: QuantizeLinear and DequantizeLinear where TensorRT fuses them.

- Only operators with weights that TensorRT runs in 8 bits: Conv, ConvTranspose, Gemm, MatMul.
- A pair on the *input* of each, one for each tensor however many read it; never on its output, which would
  force a rounding between a convolution and what TensorRT would fuse behind it.
- Where a convolution is added to something, a pair on that other branch too, so that the addition fuses.
- Weights: 8 bits from the start, one scale for each output channel. Biases stay floats: an INT32 bias with
  a DequantizeLinear of its own is what TensorRT's parser refuses.
- Nothing on the way to a logarithm: 8 bits hold 42 dB, and a spectrum has more.
- Symmetric, zero points all zero: it refuses others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qworker.build.convert import all_nodes, element_types, of_spectra, onnx
from qworker.build.convert_fp16 import FLOAT

helper: Final = import_module("onnx.helper")
numpy_helper: Final = import_module("onnx.numpy_helper")


OPSET: Final = 13
"""The first operator set with one scale a channel."""


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A node that runs in 8 bits: its weight, and the axis of the weight's output channels."""

    node: Any
    weight: str
    channel_axis: int


@dataclass(frozen=True, slots=True)
class Placement:
    """``tensors`` get a pair each; ``count`` of ``weighted`` nodes with weights will run in 8 bits."""

    tensors: tuple[str, ...]
    nodes: tuple[_Quantized, ...]
    residuals: tuple[tuple[Any, int], ...]
    weighted: int

    @property
    def count(self) -> int:
        return len(self.nodes)


def place(model: Any) -> Placement:
    """Where the pairs go. Nodes inside of If and Loop stay as they are."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type == FLOAT}
    types = element_types(model)
    spectra = of_spectra(model.graph)
    nodes = [node for node in model.graph.node if node.output[0] not in spectra]
    found = [each for node in nodes if (each := _quantizable(node, weights, types)) is not None]
    residuals = _residuals(model.graph, found, weights)
    tensors = [each.node.input[0] for each in found] + [node.input[i] for node, i in residuals]
    weighted = sum(node.op_type in _WEIGHT_INPUT for node in all_nodes(model.graph))
    return Placement(tuple(dict.fromkeys(tensors)), tuple(found), tuple(residuals), weighted)


def to_int8(model: Any, placement: Placement, scales: Mapping[str, float]) -> Any:
    """Put the pairs in; ``model`` itself is changed (it is the one that was placed)."""
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    pairs: dict[str, list[Any]] = {}
    new: dict[str, str] = {}
    for name in placement.tensors:
        new[name], pairs[name] = _pair(graph, name, scales[name])
    for each in placement.nodes:
        each.node.input[0] = new[each.node.input[0]]
        each.node.input[1] = _weight(graph, pairs, weights[each.weight], each.channel_axis)
    for node, i in placement.residuals:
        node.input[i] = new[node.input[i]]
    _insert(graph, pairs)
    used = {name for node in all_nodes(graph) for name in node.input} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    del graph.value_info[:]
    return model


# --- where --------------------------------------------------------------------------------------

_WEIGHT_INPUT: Final = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1, "MatMul": -1}
"""Operator → the axis of its weight's output channels, Gemm as it is without transB."""


def _quantizable(node: Any, weights: Mapping[str, Any], types: Mapping[str, int]) -> _Quantized | None:
    if node.op_type not in _WEIGHT_INPUT or node.domain not in {"", "ai.onnx"} or len(node.input) < 2:
        return None
    activation, weight = node.input[0], node.input[1]
    if weight not in weights or activation in weights or types.get(activation) != FLOAT:
        return None
    attributes = {each.name: each for each in node.attribute}
    dims = weights[weight].dims
    axis = _WEIGHT_INPUT[node.op_type]
    if node.op_type == "Gemm":
        if attributes.get("transA") is not None and attributes["transA"].i:
            return None
        axis = 0 if attributes.get("transB") is not None and attributes["transB"].i else 1
    if node.op_type == "ConvTranspose" and attributes.get("group") is not None and attributes["group"].i > 1:
        return None  # its channels lie in two axes of the weight
    if len(dims) < 2:
        return None
    return _Quantized(node, weight, axis % len(dims))


def _residuals(graph: Any, found: Sequence[_Quantized], weights: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """Additions of a convolution's result (which nobody else reads) to something: (node, the other input)."""
    readers: dict[str, int] = {value.name: 1 for value in graph.output}
    for node in all_nodes(graph):
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    alone = {each.node.output[0] for each in found if each.node.op_type == "Conv" and readers[each.node.output[0]] == 1}
    constants = set(weights) | {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    chosen: list[tuple[Any, int]] = []
    for node in graph.node:
        if node.op_type == "Add" and node.domain in {"", "ai.onnx"}:
            other = next((i for i in (1, 0) if node.input[1 - i] in alone), None)
            if other is not None and node.input[other] not in constants and node.input[0] != node.input[1]:
                chosen.append((node, other))
    return chosen


# --- what ---------------------------------------------------------------------------------------


def _pair(graph: Any, name: str, scale: float) -> tuple[str, list[Any]]:
    """Quantize and dequantize a tensor: the new tensor's name, and the nodes."""
    base = f"{name}_int8"
    graph.initializer.append(numpy_helper.from_array(np.float32(scale), f"{base}_scale"))
    graph.initializer.append(numpy_helper.from_array(np.int8(0), f"{base}_zero"))
    constants = [f"{base}_scale", f"{base}_zero"]
    quantize = helper.make_node("QuantizeLinear", [name, *constants], [base], name=f"quantize/{name}")
    dequantize = helper.make_node("DequantizeLinear", [base, *constants], [f"{base}_back"], name=f"dequantize/{name}")
    return f"{base}_back", [quantize, dequantize]


def _weight(graph: Any, pairs: dict[str, list[Any]], weight: Any, axis: int) -> str:
    """Store a weight in 8 bits, once however many read it; the name of its float form."""
    base = f"{weight.name}_int8_axis{axis}"
    if base not in pairs:
        values: NDArray[np.float32] = numpy_helper.to_array(weight)
        scale, eight = quantize_weight(values, axis)
        for array, name in ((eight, base), (scale, f"{base}_scale"), (np.zeros(scale.shape, np.int8), f"{base}_zero")):
            graph.initializer.append(numpy_helper.from_array(array, name))
        inputs = [base, f"{base}_scale", f"{base}_zero"]
        pairs[base] = [
            helper.make_node("DequantizeLinear", inputs, [f"{base}_back"], name=f"dequantize/{weight.name}", axis=axis)
        ]
    return f"{base}_back"


def quantize_weight(values: NDArray[np.float32], axis: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """One scale for each index of ``axis``, and the values in 8 bits."""
    others = tuple(i for i in range(values.ndim) if i != axis)
    limit = np.abs(values).max(axis=others, keepdims=True)
    scale = np.maximum(limit / 127.0, 1e-8).astype(np.float32)
    return scale.reshape(-1), np.clip(np.rint(values / scale), -127, 127).astype(np.int8)


def _insert(graph: Any, pairs: Mapping[str, Sequence[Any]]) -> None:
    """Each pair right behind the maker of its tensor; those of inputs and weights in front."""
    left = dict(pairs)
    made = {name for node in graph.node for name in node.output}
    ordered: list[Any] = []
    for name in pairs:
        if name not in made:
            ordered.extend(left.pop(name))
    for node in graph.node:
        ordered.append(node)
        for name in node.output:
            ordered.extend(left.pop(name, ()))
    kept = onnx.GraphProto()
    kept.node.extend(ordered)
    del graph.node[:]
    graph.node.extend(kept.node)
