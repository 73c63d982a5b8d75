"""Measuring a model in a process of its own, so that a crash or a memory hog ends nobody else.

The child is ``python -m qworker.build.probe``: a request as JSON on stdin, an answer as JSON on what was
stdout (the library may print to the new one).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from qworker.build.together import look
from qworker.engine import memory
from qworker.engine.base import Engine, ModelSource
from qworker.engine.warmup import made_up_inputs, read_sample, sample_tensors, write_sample
from qworker.errors import InferenceFailed, InvalidInput, LoadFailed, ModelRefused
from qworker.store.card import BatchingEntry, RunTime
from qworker.wire.messages import Tensor
from qworker.wire.signature import Signature, TensorSpec

_LOADS: Final = 3
_ENOUGH_SECONDS: Final = 10.0
"""Further loads, which only sharpen ``load_seconds``, are left out once this much time has gone by."""
_FLOOR_BYTES: Final = 64 << 10
"""What a session takes when the measurement is lost in the noise of single pages."""
_STDERR_LINES: Final = 3


@dataclass(frozen=True, slots=True)
class Request:
    """``self_contained``: load from the bytes, as a worker will. ``warmup``: where to write the made-up
    inputs that suited, when there is no ``sample``. ``optimised``: where to leave the model as the library has
    optimised it, if that loads faster; None: do not try. ``tolerance``: between a row alone and among others, in
    place of the one for each datatype."""

    path: str
    self_contained: bool
    warmup: str
    optimised: str | None = None
    sample: str | None = None
    threads: int = 1
    dynamic_quantization: bool = False
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Probed:
    """Measured facts; see the card's fields of the same names."""

    signature: Signature
    resident_bytes: int
    peak_bytes: int
    load_seconds: float
    warmed: bool
    runtime: str
    batching: BatchingEntry | None
    unbatched: str | None
    run_times: tuple[RunTime, ...]
    job_bytes: int | None
    intra_op_threads: int | None
    optimised: str | None
    """The host that the optimised model is for; None: there is none."""


def probe(request: Request, *, timeout: float) -> Probed:
    """Load, run and measure a model in a child process.

    Raises ModelRefused with the reason: it does not load, has inputs or outputs that cannot be sent, ends
    the process, or takes longer than ``timeout`` seconds.
    """
    command = [sys.executable, "-P", "-m", "qworker.build.probe"]  # -P: nothing of the current folder is imported
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    try:
        child = subprocess.run(
            command,
            input=json.dumps(asdict(request)),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ModelRefused(
            f"the model did not load and run within {timeout:g} s: give it a sample of the size it is used with, "
            "or more time"
        ) from exc
    if child.returncode < 0:
        raise ModelRefused(_ended_by(-child.returncode, child.stderr))
    answer = _answer(child.stdout)
    if answer is None:
        raise ModelRefused(f"the probe ended with status {child.returncode}: {last_lines(child.stderr)}")
    if "refused" in answer:
        raise ModelRefused(str(answer["refused"]))
    return _probed(answer)


# --- the parent's side --------------------------------------------------------------------------


def _ended_by(number: int, stderr: str) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return (
            "the process that loaded the model was killed (SIGKILL), as the system does when memory runs out: "
            "register it on a machine, or in a container, with more memory"
        )
    return f"onnxruntime crashed on this model ({name}), {last_lines(stderr)}: it cannot be served"


def last_lines(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    return " / ".join(lines[-_STDERR_LINES:]) or "without a word"


def _answer(stdout: str) -> Mapping[str, Any] | None:
    try:
        answer: object = json.loads(stdout)
    except ValueError:
        return None
    return cast("Mapping[str, Any]", answer) if isinstance(answer, dict) else None


def _probed(answer: Mapping[str, Any]) -> Probed:
    def specs(entries: list[list[Any]]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, datatype, None if shape is None else tuple(shape)) for name, datatype, shape in entries
        )

    measured = {name: value for name, value in answer.items() if name not in {"inputs", "outputs"}}
    batching = measured.pop("batching")
    return Probed(
        Signature(specs(answer["inputs"]), specs(answer["outputs"])),
        batching=None if batching is None else BatchingEntry(**batching),
        run_times=tuple(RunTime(rows=rows, seconds=seconds) for rows, seconds in measured.pop("run_times")),
        **measured,
    )


# --- the child's side ---------------------------------------------------------------------------


def main() -> None:
    """The child: one request from stdin, one answer to what was stdout."""
    be_first_to_die()
    request = Request(**json.loads(sys.stdin.read()))
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            json.dump(_measure(request), answer)
        except (LoadFailed, InvalidInput, InferenceFailed) as exc:
            json.dump({"refused": str(exc)}, answer)
        except OSError as exc:
            json.dump({"refused": f"the probe could not read or write its files: {exc}. Make room, or mend it"}, answer)
        except MemoryError:
            json.dump({"refused": "the model needs more memory than this process may have: raise its limit"}, answer)


def _measure(request: Request) -> dict[str, Any]:
    from qworker.build.optimise import optimise
    from qworker.engine.onnx import OnnxBackend, host, runtime  # in the child only: a crash must not be ours

    backend = OnnxBackend(request.threads)
    _settle_library(backend)
    base = memory.rss_bytes()
    memory.reset_peak()
    engine = backend.load(_source(request))
    peak = memory.peak_bytes() - base
    tensors = _warm_up_inputs(engine, request)
    target = request.optimised
    ready = target is not None and optimise(backend, _source(request), Path(target), engine, tensors)
    if ready:  # all else is measured of what a worker will load
        engine.close()
        backend.trim()
        request = replace(request, path=str(target))
        base = memory.rss_bytes()
        engine = backend.load(_source(request))
    backend.trim()  # guesses that did not suit may have taken a lot: a worker does not repeat them
    memory.reset_peak()
    if tensors is not None:
        engine.run(tensors)
    resident = max(memory.peak_bytes(), memory.rss_bytes())
    together = look(
        engine,
        tensors,
        resident - base,
        dynamic_quantization=request.dynamic_quantization,
        tolerance=request.tolerance,
    )
    resident = max(resident, together.peak_bytes)
    threads = together.threads(engine, lambda: OnnxBackend(_cpus()).load(_source(request)), _cpus())
    signature = engine.signature
    engine.close()
    del engine
    return {
        "inputs": [[spec.name, spec.datatype, spec.shape] for spec in signature.inputs],
        "outputs": [[spec.name, spec.datatype, spec.shape] for spec in signature.outputs],
        "resident_bytes": max(resident - base, _FLOOR_BYTES),
        "peak_bytes": max(peak, resident - base, _FLOOR_BYTES),
        "load_seconds": round(_load_seconds(backend, request, tensors), 4),
        "warmed": tensors is not None,
        "runtime": runtime(),
        "batching": None if together.batching is None else together.batching.model_dump(),
        "unbatched": together.unbatched,
        "run_times": together.run_times,
        "job_bytes": None if tensors is None else sum(tensor.array.nbytes for tensor in tensors),
        "intra_op_threads": threads,
        "optimised": host() if ready else None,
    }


def _warm_up_inputs(engine: Engine, request: Request) -> list[Tensor] | None:
    if request.sample is not None:
        try:
            tensors = sample_tensors(engine.signature, read_sample(Path(request.sample)))
            engine.run(tensors)
        except (InvalidInput, InferenceFailed) as exc:
            raise InvalidInput(f"the sample does not suit the model: {exc}") from exc
        return tensors
    tensors = made_up_inputs(engine)
    if tensors is not None:
        write_sample(Path(request.warmup), tensors)
    return tensors


def _load_seconds(backend: Any, request: Request, tensors: list[Tensor] | None) -> float:
    """The median of up to three loads and first runs from verified bytes, as a worker does them."""
    started = time.monotonic()
    seconds: list[float] = []
    while len(seconds) < _LOADS:
        source = _source(request)
        before = time.perf_counter()
        engine = backend.load(source)
        if tensors is not None:
            engine.run(tensors)
        seconds.append(time.perf_counter() - before)
        engine.close()
        if time.monotonic() - started > _ENOUGH_SECONDS:
            break
    return statistics.median(seconds)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _source(request: Request) -> ModelSource:
    path = Path(request.path)
    optimised = request.path == request.optimised
    return ModelSource("probe", "1", path, path.read_bytes() if request.self_contained else None, optimised=optimised)


def _settle_library(backend: Any) -> None:
    """Make the library's own first-session memory part of the baseline: it is not the model's."""
    import onnx.helper as oh

    value = [oh.make_tensor_value_info(name, 1, [1, 1]) for name in ("x", "y")]
    graph = oh.make_graph([oh.make_node("MatMul", ["x", "x"], ["y"])], "settle", value[:1], value[1:])
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 13)], ir_version=8)
    engine = backend.load(ModelSource("settle", "1", Path("settle"), model.SerializeToString()))
    made_up_inputs(engine)
    engine.close()
    backend.trim()


def be_first_to_die() -> None:
    """With the parent, so that nothing still loads for minutes after it; and before it, when memory runs out."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
