"""The engine card: the measured facts of one model version, kept beside its bytes.

The card is written last when a model is published and read first when it is loaded: what has no card
does not exist, and what does not match its card is not loaded.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from qworker.wire.rows import RowAxes
from qworker.wire.signature import Signature, TensorSpec

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileEntry(BaseModel):
    """One file of the model, by a plain name inside its own folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][^/\\\x00-\x1f\x7f]{0,254}$")]
    """Exporters name external weights after tensors (``onnx::MatMul_12``): any plain name will do."""
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


class BatchingEntry(BaseModel):
    """Rows of several jobs may share a run: they gave the same answers alone and together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: Annotated[dict[str, Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """The axis of each input that counts rows. An input that is not named has none: jobs share a run only
    where they have it equal."""
    outputs: Annotated[dict[str, Annotated[int, Field(ge=0)]], Field(min_length=1)]
    max_rows: Annotated[int, Field(ge=1)]
    """The fewest rows with nearly the best rate; 1: rows together are no faster, so every job runs by itself."""
    tolerance: Annotated[float, Field(ge=0)]
    """What was allowed between a row alone and among others, over the largest magnitude in the row's output."""
    max_error: Annotated[float, Field(ge=0)]
    """What was found."""

    def axes(self) -> RowAxes:
        return RowAxes(self.inputs, self.outputs)


class RunTime(BaseModel):
    """How long a run takes: the fastest of several, since a machine's noise only adds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: Annotated[int, Field(ge=1)]
    """Of a model that is not batched: 1, a job like its sample."""
    seconds: Annotated[float, Field(ge=0)]


class Card(BaseModel):
    """Facts of one model version for one backend. Bytes and seconds are measured by the probe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    model: str
    version: str
    backend: Literal["onnx"]
    files: Annotated[tuple[FileEntry, ...], Field(min_length=1)]
    """The first one is the model file; the others are its external weights and its warm-up sample."""
    sample: str | None = None
    """Name of the ``.npz`` among ``files`` that warm-up runs on."""
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    resident_bytes: Annotated[int, Field(gt=0)]
    """What the warm model adds to a process while it runs a job like its warm-up: what a ledger holds for it.
    Measured in a process of its own; between jobs it is less by the memory of intermediate results."""
    peak_bytes: Annotated[int, Field(ge=0)] | None = None
    """The most that it added for a moment while it was read, parsed and warmed up; None: not measured."""
    load_seconds: Annotated[float, Field(ge=0)]
    """From verified bytes to warm."""
    warmed: bool
    """False when no made-up input suited the model: then the first job pays for the warm-up."""
    runtime: str
    """The library that measured it, e.g. ``onnxruntime 1.32.0``."""
    created: datetime
    batching: BatchingEntry | None = None
    """None: every job runs by itself, for the reason in ``unbatched``; without one it was never looked at."""
    unbatched: str | None = None
    run_times: tuple[RunTime, ...] = ()
    """Measured with one thread, by growing rows; empty: not measured."""
    intra_op_threads: Annotated[int, Field(ge=1)] | None = None
    """Threads within a run that were clearly faster than one where the model was registered; None: one."""

    @property
    def digest(self) -> str:
        """The digest of the model file: what quarantine and measured sizes are remembered by."""
        return self.files[0].sha256

    def signature(self) -> Signature:
        return Signature(tuple(t.spec() for t in self.inputs), tuple(t.spec() for t in self.outputs))
