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


Option = bool | int | float | str | None
Shape = tuple[int, ...]


class RangeEntry(BaseModel):
    """Shapes that a plan's profile takes for one input; with ``values``, the values of an input that is a shape."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min: Shape
    opt: Shape
    max: Shape
    values: bool = False


class BatchTime(BaseModel):
    """How long one execution takes at a profile's best or largest shapes: the median, copies not included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Annotated[int, Field(ge=0)]
    at: Literal["opt", "max"]
    ms: Annotated[float, Field(ge=0)]


class GateEntry(BaseModel):
    """What the accuracy gate measured: the converted model against the FP32 original."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: Annotated[int, Field(ge=0)]
    held_out: bool
    """False when the rows were made up, or were calibrated on."""
    top1: Annotated[float, Field(ge=0, le=1)] | None
    """Share of equal top-1 answers; None: no output has classes."""
    max_error: float
    relative_error: float
    """The largest error of an output over that output's largest magnitude in the same row."""
    max_top1_drop: float | None = None
    """What was allowed; None: anything finite."""


class Plan(BaseModel):
    """Facts of a TensorRT plan. Flags are kept by name: their numbers change between versions of TensorRT."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Literal["trt", "rtx"]
    """``rtx``: built with TensorRT-RTX, for tests of the build; TensorRT does not take it."""
    precision: Literal["fp32", "fp16", "int8"]
    library_version: str
    """TensorRT's own four numbers, as in ``11.4.0.106``."""
    cuda_version: str | None = None
    driver_version: str | None = None
    compute_capability: str | None = None
    """Of the device that it was built on, as in ``9.0``; None: built without one."""
    device: str | None = None
    version_compatible: bool = False
    lean_runtime: bool = False
    """The plan brings a runtime of its own: code that runs on the host."""
    hardware_compatibility: str = "NONE"
    flags: tuple[str, ...] = ()
    profiles: tuple[dict[str, RangeEntry], ...] = ()
    weights_bytes: Annotated[int, Field(ge=0)]
    context_bytes: tuple[int, ...] = ()
    """Scratch memory of one execution context, for each profile; empty: not measured."""
    io_bytes: tuple[int, ...] = ()
    """Inputs and outputs at the largest shapes, for each profile."""
    free_memory_delta: int | None = None
    """Free device memory before loading less that after warm-up; None: not measured."""
    batch_ms: tuple[BatchTime, ...] = ()
    source_sha256: Sha256
    """Of the FP32 ONNX model with all its weights."""
    options: dict[str, Option] = {}
    """What the builder was asked for, and how the precision was made."""
    build_seconds: Annotated[float, Field(ge=0)]
    measured: bool
    """False: built without a device; sizes are estimates."""
    gate: GateEntry | None = None


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


class OptimisedEntry(BaseModel):
    """The model as its library had optimised it when it was registered: such a file loads in a part of the time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    """Its name among the card's files."""
    host: str
    """The library, its version and the instructions of the CPU that it is for: others load the model itself."""


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
    backend: Literal["onnx", "tensorrt"]
    files: Annotated[tuple[FileEntry, ...], Field(min_length=1)]
    """The first one is the model file; the others are its external weights, its warm-up sample, and what
    ``optimised`` names."""
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
    job_bytes: Annotated[int, Field(ge=0)] | None = None
    """Of the inputs of a job like the sample; None: not measured."""
    intra_op_threads: Annotated[int, Field(ge=1)] | None = None
    """Threads within a run that were clearly faster than one where the model was registered; None: one."""
    optimised: OptimisedEntry | None = None
    plan: Plan | None = None
    """What only a TensorRT plan has; None for the other backends."""

    @property
    def digest(self) -> str:
        """The digest of the model file: what quarantine and measured sizes are remembered by."""
        return self.files[0].sha256

    @property
    def given_files(self) -> tuple[FileEntry, ...]:
        """What the model's owner gave: without what was made of it here."""
        made = None if self.optimised is None else self.optimised.file
        return tuple(entry for entry in self.files if entry.name != made)

    def signature(self) -> Signature:
        return Signature(tuple(t.spec() for t in self.inputs), tuple(t.spec() for t in self.outputs))
