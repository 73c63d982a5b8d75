"""Reading and writing ONNX for TensorRT: what a model declares, what TensorRT cannot take, one file or two.

Precision lives in the ONNX since TensorRT 11 (its flags for FP16 and INT8 are gone), so that converting is
work on graphs and needs no GPU: ``convert_fp16`` and ``convert_int8``.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from qworker.build.inspect import inspect
from qworker.build.profiles import Range
from qworker.errors import ModelRefused
from qworker.wire.names import shown
from qworker.wire.signature import Dim, TensorSpec

onnx: Final = import_module("onnx")
shape_inference: Final = import_module("onnx.shape_inference")
version_converter: Final = import_module("onnx.version_converter")
checker: Final = import_module("onnx.checker")
ort: Final = import_module("onnxruntime")
ort_errors: Final = import_module("onnxruntime.capi.onnxruntime_pybind11_state")

SESSION_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(each for each in vars(ort_errors).values() if isinstance(each, type) and issubclass(each, Exception)),
    RuntimeError,
    ValueError,
    TypeError,
)
"""What onnxruntime raises; pybind registers a class for each of its status codes."""

_PROTOBUF_LIMIT: Final = 3 << 29
"""Above 1.5 GiB the weights go into a file of their own: protobuf ends at 2 GiB."""
_LARGE: Final = 64 << 10
"""Initializers above it are left out while types are inferred: their values tell nothing."""
_FATAL_ONLY: Final = 4

_DATATYPES: Final = {
    "FLOAT": "FP32",
    "FLOAT16": "FP16",
    "DOUBLE": "FP64",
    "BFLOAT16": "BF16",
    "BOOL": "BOOL",
    "STRING": "BYTES",
    **{name: name for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")},
}


def read_model(path: Path) -> Any:
    """The model with all its weights in memory. Raises ModelRefused when it is none, or weights are missing."""
    inspected = inspect(path)
    for name in inspected.external:
        if not (path.parent / name).is_file():
            raise ModelRefused(f"the model keeps weights in {name!r}, which does not lie beside {path}: copy it there")
    return without_weights_as_inputs(onnx.load(str(path), format="protobuf"))


def source_digest(path: Path) -> str:
    """The sha256 of a model with all its files, in the order of their names."""
    digest = hashlib.sha256(_file_digest(path))
    for name in inspect(path).external:
        digest.update(name.encode() + _file_digest(path.parent / name))
    return digest.hexdigest()


def write_model(model: Any, path: Path) -> list[Path]:
    """Write a model; its files, the model itself first. Large weights go into ``<name>.weights``."""
    if model.ByteSize() < _PROTOBUF_LIMIT:
        path.write_bytes(model.SerializeToString())
        return [path]
    beside = path.with_name(f"{path.name}.weights")
    beside.unlink(missing_ok=True)
    onnx.save(model, str(path), save_as_external_data=True, location=beside.name, convert_attribute=False)
    return [path, beside]


def inputs_of(model: Any) -> tuple[TensorSpec, ...]:
    """The inputs that a caller must give."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(_spec(value) for value in model.graph.input if value.name not in weights)


def outputs_of(model: Any) -> tuple[TensorSpec, ...]:
    return tuple(_spec(value) for value in model.graph.output)


def without_weights_as_inputs(model: Any) -> Any:
    """The same model, weights no longer listed as inputs: old exporters did that, and then nothing folds."""
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in weights]
    if len(kept) != len(model.graph.input):
        model.ir_version = max(model.ir_version, 4)
        del model.graph.input[:]
        model.graph.input.extend(kept)
    return model


def check_takeable(model: Any) -> None:
    """Raise ModelRefused naming the first node or tensor that TensorRT has no place for.

    Its parser says the rest, but not always where: strings, sequences and classic machine learning come
    back from it without a name.
    """
    for role, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            kind = _untakeable(value.type)
            if kind is not None:
                raise ModelRefused(_cannot(f"its {role} {shown(value.name)} is {kind}"))
    own = {(function.domain, function.name) for function in model.functions}
    for node in all_nodes(model.graph):
        domain = "" if node.domain == "ai.onnx" else node.domain
        if domain and (domain, node.op_type) not in own and not domain.startswith("trt"):
            raise ModelRefused(_cannot(f"node {node_words(node)} is a {node.op_type} of {domain}"))
        if not domain and (node.op_type.startswith(("Sequence", "Optional", "String")) or node.op_type in _NOT_TAKEN):
            raise ModelRefused(_cannot(f"node {node_words(node)} is a {node.op_type}"))


def opset_of(model: Any) -> int:
    """The version of the default operator set that the model uses."""
    return next((int(each.version) for each in model.opset_import if each.domain in {"", "ai.onnx"}), 1)


def at_least_opset(model: Any, wanted: int) -> Any:
    """The model in operator set ``wanted`` or newer. Raises ModelRefused when it cannot be converted."""
    if opset_of(model) >= wanted:
        return model
    try:
        return version_converter.convert_version(model, wanted)
    except (RuntimeError, ValueError, checker.ValidationError) as exc:
        raise ModelRefused(
            f"the model uses operator set {opset_of(model)}; {wanted} is needed, and it cannot be converted "
            f"({_one_line(exc)}): export it again with opset {wanted} or newer"
        ) from exc


def element_types(model: Any) -> dict[str, int]:
    """Tensor name → element type (``onnx.TensorProto`` numbers), of all tensors of the main graph."""
    bare = onnx.ModelProto()
    bare.CopyFrom(_without_large_weights(model))
    try:
        bare = shape_inference.infer_shapes(bare, check_type=False, strict_mode=False, data_prop=False)
    except (shape_inference.InferenceError, RuntimeError) as exc:
        raise ModelRefused(f"the types of the model's tensors cannot be inferred ({_one_line(exc)})") from exc
    types = {tensor.name: int(tensor.data_type) for tensor in bare.graph.initializer}
    for value in (*bare.graph.value_info, *bare.graph.input, *bare.graph.output):
        if value.type.WhichOneof("value") == "tensor_type":
            types[value.name] = int(value.type.tensor_type.elem_type)
    return types


def simplified(model: Any) -> Any:
    """The model with constants folded and batch normalization inside its convolutions, by onnxruntime.

    Only rewrites that stay within ONNX's own operators.
    """
    with tempfile.TemporaryDirectory(prefix="qworker-") as folder:
        files = write_model(model, Path(folder) / "before.onnx")
        after = Path(folder) / "after.onnx"
        options = session_options("ORT_ENABLE_BASIC")
        options.optimized_model_filepath = str(after)
        if len(files) > 1:
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", "after.onnx.weights"
            )
        open_session(files[0], options)
        return without_weights_as_inputs(onnx.load(str(after), format="protobuf"))


def release_names(model: Any, profiles: Sequence[Mapping[str, Range]]) -> Any:
    """Drop the names of sizes that a profile gives different values: TensorRT holds sizes of one name equal.

    Exporters write one name ("?") for all sizes that they do not know. ``model`` itself is changed.
    """
    sizes: dict[str, set[tuple[int, ...]]] = {}
    for profile in profiles:
        for value in model.graph.input:
            bounds = profile.get(value.name)
            if bounds is not None and not bounds.values:
                for dim, *triple in zip(
                    value.type.tensor_type.shape.dim, bounds.min, bounds.opt, bounds.max, strict=True
                ):
                    sizes.setdefault(dim.dim_param, set()).add(tuple(triple))
        unequal = {name for name, seen in sizes.items() if len(seen) > 1}
        for value in model.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in unequal:
                    dim.ClearField("dim_param")
        sizes.clear()
    return model


def session_options(level: str = "ORT_ENABLE_ALL") -> Any:
    """Options of a session that is for computing on the side: quiet, without an arena, one thread."""
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = _FATAL_ONLY
    options.enable_cpu_mem_arena = False
    options.intra_op_num_threads = 1
    return options


def open_session(path: Path, options: Any) -> Any:
    """A session of a model file. Raises ModelRefused with onnxruntime's words."""
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except SESSION_ERRORS as exc:
        raise ModelRefused(f"onnxruntime does not load {path.name}: {_one_line(exc)}") from exc


def all_nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph and of the graphs within it."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


def subgraphs(node: Any) -> list[Any]:
    """The graphs that a node (If, Loop, Scan) runs."""
    single = [each.g for each in node.attribute if each.type == onnx.AttributeProto.GRAPH]
    return [*single, *(graph for each in node.attribute for graph in each.graphs)]


def of_spectra(graph: Any) -> set[str]:
    """Tensors that become a logarithm's argument, back to the last layer of a network or the model's input.

    Mostly these are spectra, whose quiet parts lie below FP16's noise when they are computed in it: magnitudes
    of complex numbers count too, with or without a logarithm.
    """
    maker = {name: node for node in graph.node for name in node.output}
    todo = [node.input[0] for node in graph.node if node.op_type == "Log" or _is_magnitude(node, maker)]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        node = maker.get(name)
        if node is None or name in found or node.op_type in _LEARNED:
            continue
        found.add(name)
        if node.op_type not in _PROBABILITIES:
            todo.extend(node.input)
    return found


def _is_magnitude(node: Any, maker: Mapping[str, Any]) -> bool:
    """The root of a sum of two squares, as of a complex number; not that of a variance and an epsilon."""
    total = maker.get(node.input[0]) if node.op_type == "Sqrt" else None
    if total is None or total.op_type != "Add":
        return False
    return all(name in maker and maker[name].op_type in {"Mul", "Pow"} for name in total.input)


def node_words(node: Any) -> str:
    """A node as a message names it: exporters leave some without a name."""
    return shown(node.name) if node.name else f"that makes {shown(node.output[0]) if node.output else 'nothing'}"


# --- inside -------------------------------------------------------------------------------------

_LEARNED: Final = frozenset({"BatchNormalization", "Elu", "GRU", "Gelu", "LSTM", "LeakyRelu", "PRelu", "RNN", "Relu"})
_PROBABILITIES: Final = frozenset({"HardSigmoid", "Sigmoid", "Softmax", "Tanh"})
_NOT_TAKEN: Final = frozenset({"RegexFullMatch", "TfIdfVectorizer", "SplitToSequence", "ConcatFromSequence"})


def _cannot(what: str) -> str:
    return f"TensorRT cannot take this model: {what}. Serve it with the ONNX backend, or export it without"


def _untakeable(value_type: Any) -> str | None:
    kind = value_type.WhichOneof("value")
    if kind != "tensor_type":
        return f"a {str(kind or 'value without a type').removesuffix('_type')}"
    return {
        onnx.TensorProto.STRING: "a string tensor",
        onnx.TensorProto.DOUBLE: "a float64 tensor",
        onnx.TensorProto.COMPLEX64: "a complex tensor",
        onnx.TensorProto.COMPLEX128: "a complex tensor",
    }.get(value_type.tensor_type.elem_type)


def _spec(value: Any) -> TensorSpec:
    tensor = value.type.tensor_type
    name = str(onnx.TensorProto.DataType.Name(tensor.elem_type))
    shape = tuple(_dim(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
    return TensorSpec(str(value.name), _DATATYPES.get(name, name), shape)


def _dim(dim: Any) -> Dim:
    if dim.WhichOneof("value") == "dim_value":
        return int(dim.dim_value) if dim.dim_value >= 0 else None  # -1 is what one exporter writes for "any"
    return str(dim.dim_param) or None


def _without_large_weights(model: Any) -> Any:
    bare = onnx.ModelProto()
    bare.ir_version = model.ir_version
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    graph = bare.graph
    graph.name = model.graph.name
    for field in ("node", "input", "output", "sparse_initializer"):
        getattr(graph, field).extend(getattr(model.graph, field))
    for tensor in model.graph.initializer:
        if tensor.ByteSize() < _LARGE:
            graph.initializer.append(tensor)
        else:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return bare


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _one_line(exc: BaseException) -> str:
    line = " ".join(str(exc).split())
    return line if len(line) <= 300 else f"{line[:300]}..."
