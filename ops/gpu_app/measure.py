"""The backend by itself: cold loads, hot runs, bytes that come back, arenas, graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ops.gpu_app.bare import bare_loop
from ops.gpu_app.plans import Build
from ops.gpu_app.report import Report
from qworker.engine.base import ModelSource
from qworker.engine.tensorrt.backend import Options, TensorRtBackend
from qworker.engine.tensorrt.engine import TensorRtEngine
from qworker.engine.tensorrt.gpu import Gpu
from qworker.engine.tensorrt.ledger import TOLERANCE
from qworker.engine.tensorrt.library import Library
from qworker.wire.datatypes import tensor
from qworker.wire.messages import Tensor

ARENA = 2 << 30
RUNS = 60
EVICTIONS = 10


def measure_all(report: Report, gpu: Gpu, library: Library, builds: Sequence[Build]) -> None:
    """Everything that needs no broker."""
    report.note("engines", [_one(report, gpu, library, build) for build in builds])
    _arenas(report, gpu, library, builds)
    _evictions(report, gpu, library, builds)


def _one(report: Report, gpu: Gpu, library: Library, build: Build) -> dict[str, Any]:
    """Cold load, answers, hot latency against the bare loop, and with graphs."""
    report.say(f"measuring {build.id}")
    inputs = [tensor(name, array) for name, array in build.source.inputs(0).items()]
    facts: dict[str, Any] = {"id": build.id}
    with _backend(gpu, library, Options(arena=ARENA)) as backend:
        started = time.perf_counter()
        loaded = _load(backend, build, warm=False)
        deserialized = time.perf_counter() - started
        backend.warm_up(loaded, None)
        seconds = time.perf_counter() - started
        facts |= {
            "cold_s": round(seconds, 4),
            "deserialize_s": round(deserialized, 4),
            "plan_bytes": build.path.stat().st_size,
            "plan_mb_per_s": round(build.path.stat().st_size / deserialized / 1e6, 1),
        }
        errors = [build.error(k, _answer(loaded, build, k)) for k in range(4)]
        facts["relative_error"] = max(errors)
        report.check(f"answers of {build.id}", all(map(build.good, errors)), f"off by {max(errors):.2e}")
        facts["hot_ms"] = _median_ms(lambda: loaded.run(inputs))
        _unload(backend, loaded)
    with _backend(gpu, library, Options(arena=ARENA, graphs=True, lanes=1)) as backend:
        loaded = _load(backend, build)
        facts["hot_with_graphs_ms"] = _median_ms(lambda: loaded.run(inputs))
        facts["graphs_kept"] = backend.report()["graphs"]
        error = build.error(0, _answer(loaded, build, 0))
        report.check(f"answers of {build.id} with graphs", build.good(error), f"off by {error:.2e}")
        _unload(backend, loaded)
    arrays = build.source.inputs(0)
    facts["bare"] = bare_loop(library.trt, library.logger, build.path.read_bytes(), arrays, gpu.ordinal)
    facts["over_bare_ms"] = round(facts["hot_ms"] - facts["bare"]["with_copies_ms"], 4)
    gpu.trim()
    return facts


def _arenas(report: Report, gpu: Gpu, library: Library, builds: Sequence[Build]) -> None:
    """All engines at once: with one arena, and with memory of their own."""
    used: dict[str, int] = {}
    for kind, arena in (("shared", ARENA), ("private", 0)):
        gpu.trim()
        before = gpu.memory().used
        with _backend(gpu, library, Options(arena=arena)) as backend:
            engines = [_load(backend, build) for build in builds]
            backend.trim()
            used[kind] = gpu.memory().used - before
            statement = backend.statement()
            report.check(
                f"account with {kind} arena", abs(statement.drift) <= 4 * TOLERANCE, f"drift {statement.drift}"
            )
            _unload(backend, *engines)
    report.note("arena", {**used, "engines": len(builds)})
    report.check("one arena takes less than private ones", used["shared"] < used["private"], used)


def _evictions(report: Report, gpu: Gpu, library: Library, builds: Sequence[Build]) -> None:
    """Load and unload the largest: what each eviction gives back, by the driver's word."""
    largest = max(builds, key=lambda build: build.card.resident_bytes)
    taken: list[int] = []
    returned: list[int] = []
    with _backend(gpu, library, Options(arena=ARENA)) as backend:
        _unload(backend, _load(backend, largest))  # loads the kernels, which stay
        for _ in range(EVICTIONS):
            before = gpu.memory().used
            loaded = _load(backend, largest)
            hot = gpu.memory().used
            _unload(backend, loaded)
            taken.append(hot - before)
            returned.append(hot - gpu.memory().used)
    report.note("evictions", {"model": largest.id, "taken": taken, "returned": returned})
    same = all(abs(a - b) <= 4 << 20 for a, b in zip(taken, returned, strict=True))
    report.check("evictions give everything back", same, f"{returned[-1]} of {taken[-1]} bytes in the last one")


@contextmanager
def _backend(gpu: Gpu, library: Library, options: Options) -> Any:
    backend = TensorRtBackend(gpu, library, options)
    backend.open()
    try:
        yield backend
    finally:
        backend.close()


def _load(backend: TensorRtBackend, build: Build, *, warm: bool = True) -> TensorRtEngine:
    loaded = backend.load(ModelSource(build.id, build.card.version, build.path, None))
    if warm:
        backend.warm_up(loaded, None)
        backend.trim()
    return loaded


def _unload(backend: TensorRtBackend, *engines: TensorRtEngine) -> None:
    for each in engines:
        each.close()
    backend.trim()


def _answer(loaded: TensorRtEngine, build: Build, k: int) -> dict[str, Any]:
    inputs: list[Tensor] = [tensor(name, array) for name, array in build.source.inputs(k).items()]
    return {answer.name: answer.array for answer in loaded.run(inputs)}


def _median_ms(call: Callable[[], object]) -> float:
    spent: list[float] = []
    for number in range(RUNS + 10):
        started = time.perf_counter()
        call()
        if number >= 10:
            spent.append(time.perf_counter() - started)
    return round(float(np.median(spent)) * 1000, 4)
