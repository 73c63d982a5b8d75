"""A job's tensors as they are written on a command line or in files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import typer

from qworker.errors import InvalidInput
from qworker.wire.codec import decode_job
from qworker.wire.datatypes import BYTES, DATATYPES, tensor
from qworker.wire.messages import JSON, Tensor


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks of a model; from a JSON body also what else is written there."""

    inputs: Mapping[str, Tensor]
    version: str | None = None
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_asked(model: str, literals: Sequence[str], npz: Path | None, body: str | None) -> Asked:
    """The job that all of these together describe. Raises typer.BadParameter (exit code 2)."""
    asked = Asked({}) if body is None else _from_json(model, body)
    inputs = dict(asked.inputs)
    for source in (_from_npz(npz), map(_from_literal, literals)):
        for found in source:
            if found.name in inputs:
                raise typer.BadParameter(f"input {found.name!r} is given twice: give it once")
            inputs[found.name] = found
    return Asked(inputs, asked.version, asked.outputs, asked.parameters)


def _from_literal(text: str) -> Tensor:
    """``NAME[:DATATYPE]=JSON`` or ``NAME[:DATATYPE]=@FILE.npy``."""
    left, equals, right = text.partition("=")
    # A name may hold colons itself (``serving_default_x:0``): only a datatype is split off.
    name, _, datatype = left.rpartition(":")
    if datatype not in DATATYPES or not name:
        name, datatype = left, None
    if not equals or not name:
        raise typer.BadParameter(f"expected NAME=VALUE or NAME:DATATYPE=VALUE; found {text[:80]!r}")
    if right.startswith("@"):
        return _tensor(name, _load(Path(right[1:])), datatype)
    try:
        value = json.loads(right)
    except ValueError as exc:
        raise typer.BadParameter(
            f"input {name!r}: expected JSON ([[1, 2]], 0.5, '\"text\"') or @FILE.npy; found {right[:80]!r} ({exc})"
        ) from exc
    return _from_lists(name, value, datatype)


def _from_lists(name: str, value: Any, datatype: str | None) -> Tensor:
    """JSON has one kind of number; without a datatype, whole ones become INT64 and others FP32."""
    found = _tensor(name, value, None)
    if datatype is None:
        return _tensor(name, value, "FP32") if found.datatype == "FP64" else found
    return _tensor(name, value, datatype)


def _tensor(name: str, value: Any, datatype: str | None) -> Tensor:
    try:
        return tensor(name, value, datatype)
    except InvalidInput as exc:
        raise typer.BadParameter(str(exc)) from exc


def _load(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as exc:
        raise typer.BadParameter(f"cannot read {path} as numpy wrote it: {exc}") from exc


def _from_npz(path: Path | None) -> Iterator[Tensor]:
    if path is None:
        return
    archive = _load(path)
    if isinstance(archive, np.ndarray):
        raise typer.BadParameter(f"{path} holds one array without a name: use `-i NAME=@{path}`")
    with archive:
        for name in archive.files:
            try:
                array = archive[name]
            except ValueError as exc:
                raise typer.BadParameter(f"{path}, array {name!r}: {exc}") from exc
            yield _tensor(name, array, None)


def _from_json(model: str, source: str) -> Asked:
    """An Open Inference body (``{"inputs": [{"name": ...}]}``), or simply ``{NAME: nested lists}``."""
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        body: object = json.loads(text)
    except (OSError, ValueError) as exc:
        raise typer.BadParameter(f"cannot read {'standard input' if source == '-' else source} as JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise typer.BadParameter(f"expected a JSON object; found {type(body).__name__}")
    tensors = cast("dict[str, Any]", body)  # JSON has no other keys
    if not isinstance(tensors.get("inputs"), list):
        return Asked({name: _from_lists(name, value, None) for name, value in tensors.items()})
    try:
        job = decode_job(text, JSON, model=model, job_id="-")
    except InvalidInput as exc:
        raise typer.BadParameter(str(exc)) from exc
    return Asked({t.name: t for t in job.inputs}, job.version, job.outputs, job.parameters)


def save_npz(path: Path, outputs: Sequence[Tensor]) -> None:
    """Write the outputs as ``path``. Raises typer.BadParameter for what numpy would spoil."""
    arrays: dict[str, Any] = {}
    for output in outputs:
        array = output.array
        if output.datatype == BYTES:
            # numpy's byte strings drop trailing zeros, silently.
            if any(element.endswith(b"\0") for element in array.reshape(-1).tolist()):
                raise typer.BadParameter(f"output {output.name!r} holds bytes that .npz cannot keep: use --json")
            array = array.astype(np.bytes_)
        arrays[output.name] = array
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
