"""What an ONNX file says of itself that onnxruntime does not tell: its external weights, and which of its
tensors declare no rank (a session shows them like scalars)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from qworker.errors import ModelRefused

onnx: Final = import_module("onnx")
protobuf: Final = import_module("google.protobuf.message")

_MERGE: Final = "onnx.save(onnx.load(PATH), NEW, save_as_external_data=True, all_tensors_to_one_file=True)"


@dataclass(frozen=True, slots=True)
class Inspected:
    """``external``: names of the files beside the model that hold weights. ``rankless``: tensors.
    ``dynamic_quantization``: a scale is taken over whole tensors at run time."""

    external: tuple[str, ...]
    rankless: frozenset[str]
    dynamic_quantization: bool = False


def inspect(path: Path) -> Inspected:
    """Read the structure of a model. Raises ModelRefused when the file is no ONNX model."""
    model = _read(path)
    external = sorted({_location(tensor) for tensor in _tensors(model) if _is_external(tensor)})
    for name in external:
        _check_location(name)
    values = [*model.graph.input, *model.graph.output]
    rankless = {
        value.name
        for value in values
        if value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.HasField("shape")
    }
    dynamic = any(node.op_type.startswith("DynamicQuantize") for node in _nodes(model))
    return Inspected(tuple(external), frozenset(rankless), dynamic)


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size == 0:
            raise ModelRefused(f"{path} is empty: export the model again")
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except OSError as exc:
        raise ModelRefused(f"{path} cannot be read: {exc.strerror or exc}: check the path and its rights") from exc
    except (protobuf.DecodeError, ValueError) as exc:
        raise ModelRefused(_no_model(path)) from exc
    if not model.HasField("graph"):
        raise ModelRefused(_no_model(path))
    return model


def _no_model(path: Path) -> str:
    with path.open("rb") as file:
        kind = _kind(file.read(64))
    return f"{path} is not an ONNX model ({kind}): export it again, or copy it again if it was cut off"


def _kind(start: bytes) -> str:
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page"
    if text.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, run `git lfs pull`"
    if start.startswith(b"PK\x03\x04"):
        return "it is a zip archive or a PyTorch file"
    if start[4:8] == b"ORTM":
        return "it is in onnxruntime's own format, which other versions cannot read"
    if start[:1] == b"\x08":  # the field of every ONNX file that comes first, its IR version
        return "it starts like one, and is cut off or damaged"
    return f"it starts with {start[:8]!r}"


def _tensors(model: Any) -> Iterator[Any]:
    for owner in (model.graph, *model.functions):
        for graph in _graphs(owner):
            yield from getattr(graph, "initializer", ())  # a function has none of its own
            for sparse in getattr(graph, "sparse_initializer", ()):
                yield from (sparse.values, sparse.indices)
    for node in _nodes(model):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)


def _nodes(model: Any) -> Iterator[Any]:
    for owner in (model.graph, *model.functions):
        for graph in _graphs(owner):
            yield from graph.node


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph, or a function, and the graphs in its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _graphs(inner)


def _is_external(tensor: Any) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _location(tensor: Any) -> str:
    return next((str(entry.value) for entry in tensor.external_data if entry.key == "location"), "")


def _check_location(name: str) -> None:
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ModelRefused(
            f"the model keeps weights in {name!r}; they must lie beside it under a plain name: "
            f"put them into one file with {_MERGE}"
        )
