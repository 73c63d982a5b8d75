"""The engine card: the measured facts of one model version, kept beside its bytes.

The card is written last when a model is published and read first when it is loaded: what has no card
does not exist, and what does not match its card is not loaded.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from qworker.wire.signature import Signature, TensorSpec

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileEntry(BaseModel):
    """One file of the model, by a plain name inside its own folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,254}$")]
    sha256: Sha256
    nbytes: Annotated[int, Field(ge=0)]


class TensorEntry(BaseModel):
    """A tensor of the signature."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    datatype: str
    shape: tuple[int | str | None, ...] | None

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.datatype, self.shape)


class Card(BaseModel):
    """Facts of one model version for one backend. Bytes and seconds are measured by the probe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    model: str
    version: str
    backend: Literal["onnx"]
    files: tuple[FileEntry, ...]
    """The first one is the model file; the others are its external weights and its warm-up sample."""
    sample: str | None = None
    """Name of the ``.npz`` among ``files`` that warm-up runs on."""
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    resident_bytes: Annotated[int, Field(gt=0)]
    """What the loaded and warm model adds to a process, measured in a process of its own."""
    load_seconds: Annotated[float, Field(ge=0)]
    warmed: bool
    """False when no made-up input suited the model: then the first job pays for the warm-up."""
    runtime: str
    """The library that measured it, e.g. ``onnxruntime 1.32.0``."""
    created: datetime

    def signature(self) -> Signature:
        return Signature(tuple(t.spec() for t in self.inputs), tuple(t.spec() for t in self.outputs))
