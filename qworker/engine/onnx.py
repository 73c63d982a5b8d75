"""ONNX models on the CPU, by onnxruntime.

What was measured and decided here (onnxruntime 1.32, one thread, 12 real models):

- **No memory arena.** It keeps the largest intermediate results that a session ever needed: a text
  detector of 9 MiB holds 28 MiB more after one picture of 320 x 320, and more after a larger one. Without
  the arena the same memory goes back on ``trim``, and runs take the same time (0 to 2 % longer).
- **Memory patterns stay on**: with neither, runs are up to 8 % slower.
- **The model's bytes are dropped after loading.** The Python wrapper keeps them for a fallback to other
  devices that a CPU session never needs; that doubled the memory of some models.
- **Large models are loaded without their weights, which follow** (``slim``): the library parses a model while it
  holds the interpreter, 20 ms for 30 MB, and nothing else runs in the process meanwhile.
- **No log lines of the library.** Its exceptions carry the same words, and every bad input would write to
  stderr, past our log.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from qworker.engine import memory, warmup
from qworker.engine.base import Engine, ModelSource
from qworker.engine.slim import WEIGHTS, slim
from qworker.errors import InferenceFailed, InvalidInput, LoadFailed, OutOfMemory
from qworker.wire.datatypes import BYTES, bytes_array, datatype_of
from qworker.wire.messages import Tensor
from qworker.wire.signature import Dim, Signature, TensorSpec, check_outputs

# by name: the library has no types worth checking against
ort: Final = import_module("onnxruntime")
ort_errors: Final = import_module("onnxruntime.capi.onnxruntime_pybind11_state")

_DATATYPES: Final = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": BYTES,
}

# pybind registers one class for each status code of the library, with nothing but Exception above them
_STATUS_ERRORS: Final[tuple[type[Exception], ...]] = tuple(
    error for error in vars(ort_errors).values() if isinstance(error, type) and issubclass(error, Exception)
)
_LIBRARY_ERRORS: Final = (*_STATUS_ERRORS, RuntimeError, ValueError, TypeError, MemoryError, SystemError)
_NO_MEMORY: Final = re.compile(r"bad_alloc|[Ff]ailed to allocate memory|bad allocation")
_FATAL_ONLY: Final = 4
_VECTOR_FLAGS: Final = ("avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm", "fphp")

SLIM_FROM_BYTES: Final = 1 << 20
"""Smaller models are parsed in less than a millisecond."""


class OnnxBackend:
    """Makes engines that run in the calling thread (plus ``threads - 1`` of their own each).

    With ``threads=0`` each model has as many as its card advises, which is one for most.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    @property
    def name(self) -> str:
        return "onnx"

    def load(self, source: ModelSource) -> OnnxEngine:
        """Make an engine. Raises LoadFailed with the library's words, or naming what is not supported."""
        model: bytes | str = str(source.path) if source.content is None else source.content
        session = self._load_slim(model, source) if isinstance(model, bytes) else None
        try:
            session = session or self._session(model, self._options(source))
        except (*_LIBRARY_ERRORS, OSError) as exc:
            raise LoadFailed(f"{runtime()} does not load this model: {_words(exc)}") from exc
        session.disable_fallback()
        _drop_model_bytes(session)
        signature = _signature(session)
        del model
        memory.trim()  # parsing leaves up to three times the model's size behind
        return OnnxEngine(session, signature)

    def write_optimised(self, source: ModelSource, target: Path) -> None:
        """Write the model as the library has optimised it for this host. Raises LoadFailed."""
        options = self._options(source)
        options.optimized_model_filepath = str(target)
        try:
            self._session(source.content if source.content is not None else str(source.path), options)
        except (*_LIBRARY_ERRORS, OSError) as exc:
            raise LoadFailed(f"{runtime()} does not write this model in its optimised form: {_words(exc)}") from exc

    def warm_up(self, engine: Engine, sample: Mapping[str, NDArray[Any]] | None) -> bool:
        """Run once on ``sample``, or on made-up inputs where it does not suit. False when neither does."""
        if sample is not None:
            try:
                engine.run(warmup.sample_tensors(engine.signature, sample))
            except (InvalidInput, InferenceFailed):
                pass  # it suited when the model was registered, by another version of the library perhaps
            else:
                return True
        return warmup.made_up_inputs(engine) is not None

    def used_bytes(self) -> int:
        return memory.rss_bytes()

    def trim(self) -> None:
        memory.trim()

    def _load_slim(self, model: bytes, source: ModelSource) -> Any | None:
        """A session of a model whose weights are handed over beside it; see ``slim``. None: load it as it is."""
        if len(model) < SLIM_FROM_BYTES:
            return None
        light = slim(model)
        if light is None:
            return None
        options = self._options(source)
        options.add_external_initializers_from_files_in_memory([WEIGHTS], [model], [len(model)])
        try:
            return self._session(light, options)
        except _LIBRARY_ERRORS:
            return None  # whatever is wrong, the whole model says it in its own words

    def _session(self, model: bytes | str, options: Any) -> Any:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def _options(self, source: ModelSource) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads or source.threads or 1
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.log_severity_level = _FATAL_ONLY
        if source.optimised:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # a spinning pool burns a core for each hot model, also for those that wait
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        return options


class OnnxEngine:
    """One loaded session."""

    def __init__(self, session: Any, signature: Signature) -> None:
        self._session: Any = session
        self._signature = signature
        self._output_names = tuple(spec.name for spec in signature.outputs)

    @property
    def signature(self) -> Signature:
        """As the session tells it, which gives a scalar and an unknown rank the same empty shape: the
        shape is None for both. The card knows better."""
        return self._signature

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[str] = ()) -> list[Tensor]:
        """Run once; the named outputs, or all, in the model's order."""
        session = self._session  # our own reference: a close meanwhile does not take it away
        if session is None:
            raise InferenceFailed("the model was unloaded before this job ran: send it again")
        wanted = self._wanted(outputs)
        feed = {tensor.name: _to_library(tensor) for tensor in inputs}
        try:
            arrays = session.run(wanted, feed)
        except UnicodeDecodeError as exc:
            raise InferenceFailed(f"the model made text that is not UTF-8: {exc.reason}") from exc
        except (ort_errors.InvalidArgument, ValueError) as exc:  # ValueError: an input is missing
            raise InvalidInput(f"the model rejects these inputs: {_without_values(_words(exc))}") from exc
        except _LIBRARY_ERRORS as exc:
            if isinstance(exc, MemoryError) or _NO_MEMORY.search(str(exc)):
                raise OutOfMemory("onnxruntime found no memory to run this job: send less at once") from exc
            raise InferenceFailed(f"the model failed on these inputs: {_without_values(_words(exc))}") from exc
        return [_from_library(name, array) for name, array in zip(wanted, arrays, strict=True)]

    def close(self) -> None:
        """Drop the session. Its memory is free once the last run in progress has ended."""
        self._session = None

    def _wanted(self, outputs: Sequence[str]) -> list[str]:
        if not outputs:
            return list(self._output_names)
        check_outputs(self._signature, outputs)
        return [name for name in self._output_names if name in outputs]


def runtime() -> str:
    """The library and its version, as cards and messages name it."""
    return f"onnxruntime {ort.__version__}"


@cache
def host() -> str:
    """What an optimised model is made for: the library and the CPU's instructions for vectors.

    The library lays weights out for the CPU that it finds itself on: elsewhere the file is of no use.
    """
    flags: set[str] = set()
    with suppress(OSError):  # no such file but on Linux: then the kind of the machine has to do
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = {flag for flag in line.split(":", 1)[1].split() if flag.startswith(_VECTOR_FLAGS)}
                break
    return " ".join((runtime(), platform.machine(), *sorted(flags)))


def _drop_model_bytes(session: Any) -> None:
    if getattr(session, "_model_bytes", None) is not None:
        session._model_bytes = None  # noqa: SLF001


def _signature(session: Any) -> Signature:
    # NodeArgs keep the whole session alive: none may outlive this function
    inputs = tuple(_spec("input", arg) for arg in session.get_inputs())
    outputs = tuple(_spec("output", arg) for arg in session.get_outputs())
    return Signature(inputs, outputs)


def _spec(role: str, arg: Any) -> TensorSpec:
    datatype = _DATATYPES.get(arg.type)
    if datatype is None:
        raise LoadFailed(
            f"{role} {arg.name!r} is a {arg.type}; only tensors of {', '.join(_DATATYPES.values())} can be sent: "
            "export the model with such inputs and outputs"
        )
    shape = tuple(_dim(dim) for dim in arg.shape)
    return TensorSpec(arg.name, datatype, shape or None)


def _dim(dim: object) -> Dim:
    if isinstance(dim, int):
        return dim if dim >= 0 else None
    return dim if isinstance(dim, str) and dim else None


def _to_library(tensor: Tensor) -> NDArray[Any]:
    if tensor.datatype != BYTES:
        return tensor.array
    try:
        texts = [element.decode() for element in tensor.array.reshape(-1).tolist()]
    except UnicodeDecodeError as exc:
        raise InvalidInput(
            f"tensor {tensor.name!r}: expected text as UTF-8, which is all that this model takes; found other bytes "
            f"at position {exc.start}: encode it as UTF-8"
        ) from exc
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array.reshape(tensor.array.shape)


def _from_library(name: str, array: object) -> Tensor:
    if not isinstance(array, np.ndarray):
        raise InferenceFailed(f"output {name!r} is a {type(array).__name__}, not a tensor: it cannot be sent")
    result = cast("NDArray[Any]", array)
    if result.dtype == object:
        return Tensor(name, BYTES, bytes_array((text.encode() for text in result.reshape(-1).tolist()), result.shape))
    return Tensor(name, datatype_of(result.dtype), np.asarray(result, order="C"))


def _without_values(text: str) -> str:
    """``text`` without the numbers and quotations in what an operator says while it runs: it quotes its inputs, and
    these words travel and are logged. What is said of shapes before a run begins stays."""
    said, found, detail = text.partition("Status Message:")
    if not found:
        return text
    detail = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", detail)
    return said + found + re.sub(r"-?\d[\d.]*(?:e[+-]?\d+)?", "#", detail)


def _words(exc: BaseException) -> str:
    """The library's message on one line, without its prefix and the source paths of its build."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : ", "", str(exc) or type(exc).__name__)
    text = re.sub(r"/onnxruntime_src/\S+\s+", "", text)
    line = " ".join(text.split())
    return line if len(line) <= 500 else f"{line[:500]}..."
