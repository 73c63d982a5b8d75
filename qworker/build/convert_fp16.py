"""FP16: the same graph with half-precision tensors inside, and inputs and outputs as they were.

Decided node by node from ONNX's own operator schemas, with casts where the two precisions meet. A node
stays in FP32 when

- its operator has no FP16 form, or runs other graphs (If, Loop, Scan: their bodies stay as they are);
- it sums or exponentiates over many values, where 11 bits are known to be too few;
- it is on the way to a logarithm: a pitch detector was off by 25 % of its output's scale with its spectrum
  in FP16, and is by 0.3 % with the spectrum in FP32 and the network behind it in FP16;
- a tensor of it was seen beyond a quarter of FP16's range on the calibration rows, or a constant of it has
  no FP16 value (an epsilon of 1e-12 would become 0).

A common converter changes types by name instead; of 20 real models it broke 9 (those with Cast nodes) and
made one that answers 1.0 for 0.0. Nothing here depends on the model but its schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np

from qworker.build.convert import all_nodes, element_types, of_spectra, onnx, opset_of, subgraphs

helper: Final = import_module("onnx.helper")
numpy_helper: Final = import_module("onnx.numpy_helper")
defs: Final = import_module("onnx.defs")

SAFE_RANGE: Final = 65504 / 4
"""Other inputs than the calibration rows may be somewhat larger."""

FLOAT: Final = 1
HALF: Final = 10
_LARGEST: Final = 65504.0
_SMALLEST: Final = 6e-8
_CLAMPS: Final = frozenset({"Clip", "Max", "Min"})
"""A bound beyond FP16's range can be its largest value instead."""
_KEEP: Final = frozenset(
    {
        *("CumSum", "Exp", "Log", "LpNormalization", "MeanVarianceNormalization", "Pow", "Range"),
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum"),
        *("ReduceSumSquare", "InstanceNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization"),
        *("ConstantOfShape", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
        *("Bernoulli", "Multinomial", "DynamicQuantizeLinear", "DFT", "STFT", "MelWeightMatrix", "BlackmanWindow"),
        *("HannWindow", "HammingWindow", "NonMaxSuppression"),
    }
)


@dataclass(frozen=True, slots=True)
class HalfModel:
    """``halved`` of ``floating`` nodes with FP32 tensors run in FP16 now."""

    model: Any
    halved: int
    floating: int


def to_fp16(model: Any, too_large: frozenset[str] = frozenset()) -> HalfModel:
    """Convert; ``model`` itself is changed. ``too_large``: tensors seen beyond ``SAFE_RANGE``."""
    _hoist_constants(model.graph)
    types = element_types(model)
    rules = _Rules(model, types, too_large)
    plans = [rules.of(node) for node in model.graph.node]
    _Rewrite(model.graph, types).apply(plans)
    del model.graph.value_info[:]
    floating = sum(plan.floating for plan in plans)
    return HalfModel(model, sum(plan.half for plan in plans), floating)


def rounded(model: Any) -> Any:
    """The same answers as the model would give with FP16 arithmetic, from FP32 nodes and explicit roundings.

    For onnxruntime on the CPU: it computes FP16 nodes in FP32 and takes out the casts that it has put between
    them, so that nothing would be rounded and nothing overflow. Casts that lose something it leaves where the
    model has them. A model whose inputs or outputs are FP16 is given back as it is.
    """
    if any(each.type.tensor_type.elem_type == HALF for each in (*model.graph.input, *model.graph.output)):
        return model
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _hoist_constants(wide.graph)
    types = element_types(wide)
    nodes: list[Any] = []
    for node in wide.graph.node:
        nodes.append(node)
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == HALF:
                attribute.i = FLOAT
        for i, name in enumerate(node.output):
            if types.get(name) == HALF:
                node.output[i] = f"{name}/made"
                nodes.append(helper.make_node("Cast", [f"{name}/made"], [f"{name}/rounded"], to=HALF))
                nodes.append(helper.make_node("Cast", [f"{name}/rounded"], [name], to=FLOAT))
    kept = onnx.GraphProto()
    kept.node.extend(nodes)
    for tensor in wide.graph.initializer:
        values = numpy_helper.to_array(tensor) if tensor.data_type == HALF else None
        kept.initializer.append(
            tensor if values is None else numpy_helper.from_array(values.astype(np.float32), tensor.name)
        )
    for field in ("node", "initializer"):
        wide.graph.ClearField(field)
        getattr(wide.graph, field).extend(getattr(kept, field))
    return wide


@dataclass(frozen=True, slots=True)
class _NodePlan:
    """What becomes of one node: which of its inputs and outputs turn into FP16."""

    half: bool
    floating: bool
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


class _Rules:
    """Which nodes run in FP16."""

    def __init__(self, model: Any, types: dict[str, int], too_large: frozenset[str]) -> None:
        self._types = types
        self._too_large = too_large
        self._opset = opset_of(model)
        self._spectra = of_spectra(model.graph)
        self._constants = {
            tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT
        }

    def of(self, node: Any) -> _NodePlan:
        inputs = [i for i, name in enumerate(node.input) if self._types.get(name) == FLOAT]
        outputs = [i for i, name in enumerate(node.output) if self._types.get(name) == FLOAT]
        if not inputs and not outputs:
            return _NodePlan(half=False, floating=False)
        kept = _NodePlan(half=False, floating=True)
        if node.domain not in {"", "ai.onnx"} or subgraphs(node) or node.op_type in _KEEP:
            return kept
        if any(name in self._too_large for name in (*node.input, *node.output)):
            return kept
        if any(name in self._spectra for name in node.output):
            return kept
        if node.op_type == "Cast":  # to FP32: to FP16 instead, whatever it comes from
            return _NodePlan(True, True, (), (0,)) if outputs else kept
        schema = self._schema(node.op_type)
        if schema is None:
            return kept
        halves = _half_types(schema)
        inputs = [i for i in inputs if _type_name(schema.inputs, i) in halves]
        if not inputs or not all(_type_name(schema.outputs, i) in halves for i in outputs):
            return kept
        # an output follows the input of the same type variable; without one, attributes decide, and we do not
        bound = {_type_name(schema.inputs, i) for i in inputs}
        if not all(_type_name(schema.outputs, i) in bound for i in outputs):
            return kept
        if any(self._has_no_half(node, node.input[i]) for i in inputs):
            return kept
        return _NodePlan(True, True, tuple(inputs), tuple(outputs))

    def _schema(self, operator: str) -> Any:
        try:
            return defs.get_schema(operator, self._opset, "")
        except defs.SchemaError:
            return None

    def _has_no_half(self, node: Any, name: str) -> bool:
        tensor = self._constants.get(name)
        if tensor is None:
            return False
        values = np.abs(numpy_helper.to_array(tensor))
        if values.size == 0:
            return False
        if float(values.max()) > _LARGEST and node.op_type not in _CLAMPS:
            return True
        return values.size == 1 and 0 < float(values.max()) < _SMALLEST


def _half_types(schema: Any) -> frozenset[str]:
    return frozenset(
        constraint.type_param_str
        for constraint in schema.type_constraints
        if {"tensor(float)", "tensor(float16)"} <= set(constraint.allowed_type_strs)
    )


def _type_name(formal: Sequence[Any], index: int) -> str:
    """The type variable of a parameter; the last one may stand for many."""
    return str(formal[min(index, len(formal) - 1)].type_str) if formal else ""


class _Rewrite:
    """Puts the decisions into a graph.

    A tensor that is made in FP16 keeps its name, unless it is an output of the graph or seen by an inner
    graph: then a cast back to FP32 has the name, right behind its maker.
    """

    def __init__(self, graph: Any, types: dict[str, int]) -> None:
        self._graph = graph
        self._types = types
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._taken = {name for node in all_nodes(graph) for name in (*node.input, *node.output)}
        self._must_stay = {value.name for value in graph.output} | _captured(graph)
        self._half: dict[str, str] = {}  # tensor → name of its FP16 form
        self._float: dict[str, str] = {}  # tensor made in FP16 → name of its FP32 form
        self._nodes: list[Any] = []

    def apply(self, plans: Sequence[_NodePlan]) -> None:
        for node, plan in zip(list(self._graph.node), plans, strict=True):
            for i, name in enumerate(node.input):
                if self._types.get(name) == FLOAT and node.op_type != "Cast":  # it takes either
                    node.input[i] = self._as_half(name) if i in plan.inputs else self._as_float(name)
            if node.op_type == "Cast" and plan.half:
                next(each for each in node.attribute if each.name == "to").i = HALF
            self._nodes.append(node)
            for i in plan.outputs:
                node.output[i] = self._made_in_half(node.output[i])
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        self._drop_unused_constants()

    def _as_half(self, name: str) -> str:
        if name not in self._half:
            self._half[name] = self._free_name(f"{name}_fp16")
            constant = self._constants.get(name)
            if constant is None:
                self._cast(name, self._half[name], HALF)
            else:
                values = np.clip(numpy_helper.to_array(constant), -_LARGEST, _LARGEST).astype(np.float16)
                self._graph.initializer.append(numpy_helper.from_array(values, self._half[name]))
        return self._half[name]

    def _as_float(self, name: str) -> str:
        if self._half.get(name) != name:  # not made in FP16, or cast back under its own name
            return name
        if name not in self._float:
            self._float[name] = self._free_name(f"{name}_fp32")
            self._cast(name, self._float[name], FLOAT)
        return self._float[name]

    def _made_in_half(self, name: str) -> str:
        if name not in self._must_stay:
            self._half[name] = name
            return name
        self._half[name] = self._free_name(f"{name}_fp16")
        self._cast(self._half[name], name, FLOAT)
        return self._half[name]

    def _cast(self, source: str, target: str, element_type: int) -> None:
        self._nodes.append(helper.make_node("Cast", [source], [target], name=f"cast/{target}", to=element_type))

    def _free_name(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _drop_unused_constants(self) -> None:
        used = {name for node in all_nodes(self._graph) for name in node.input} | {o.name for o in self._graph.output}
        kept = [tensor for tensor in self._graph.initializer if tensor.name in used]
        del self._graph.initializer[:]
        self._graph.initializer.extend(kept)


def _captured(graph: Any) -> set[str]:
    """Names that inner graphs may take from this one."""
    inner = [each for node in graph.node for each in subgraphs(node)]
    names = {name for each in inner for node in all_nodes(each) for name in node.input}
    return names | {value.name for each in inner for value in each.output}


def _hoist_constants(graph: Any) -> None:
    """Make initializers of Constant nodes: only those can have two precisions."""
    kept: list[Any] = []
    for node in graph.node:
        tensor = _constant(node) if node.op_type == "Constant" and node.domain in {"", "ai.onnx"} else None
        if tensor is None:
            kept.append(node)
        else:
            graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(kept)


def _constant(node: Any) -> Any:
    attribute = node.attribute[0]
    make: Callable[[], Any] | None = {
        "value": lambda: numpy_helper.to_array(attribute.t),
        "value_float": lambda: np.float32(attribute.f),
        "value_floats": lambda: np.array(attribute.floats, np.float32),
        "value_int": lambda: np.int64(attribute.i),
        "value_ints": lambda: np.array(attribute.ints, np.int64),
    }.get(attribute.name)
    return None if make is None else numpy_helper.from_array(np.asarray(make()), node.output[0])
