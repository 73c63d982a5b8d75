"""``cold``: from publishing a job for a cold model to its reply, against loading the model in process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.models import LaidOut, lay_out
from qworker import Client
from qworker.build.register import register
from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend, host
from qworker.engine.warmup import read_sample, sample_tensors
from qworker.store.local import LocalStore
from tests.bench.drive import run as run_loop
from tests.bench.figures import Measured, Table, rounds
from tests.bench.room import ROOT, Room
from tests.support.models import heavy

REAL = ("magika", "ppocr4-det", "ppocr4-rec")
MADE = {"matrix-30m": 30, "matrix-100m": 100}
OVERHEAD_MS = 30.0
"""What a cold start may take beyond the load itself: hint, lease, two consumers."""


def run(chosen: argparse.Namespace) -> Table:
    """A fresh worker each round, so that every model is cold; the same loads in a fresh process as the floor."""
    table = Table("cold: published to first reply, against read + verify + load + warm-up + run in process")
    with Room() as room:
        inputs = _register(room)
        for _ in rounds(chosen):
            for optimised in (False, True):
                for model, floor in _floor(room.store, list(inputs), optimised=optimised).items():
                    table.add(f"in process{', optimised file' if optimised else ''}, {model}", {"ms": floor})
            (worker,) = room.workers()
            for model, found in run_loop(_call_each(room.url, inputs), uvloop=True).items():
                table.add(f"cold call, {model}", found)
            worker.terminate()
            worker.wait_exit()
    for name, floors in (("p50_over_floor", "in process"), ("p50_over_optimised", "in process, optimised file")):
        table.spread(name, [ratio for model in inputs for ratio in _ratios(table, model, floors)])
    return table


def _ratios(table: Table, model: str, floors: str) -> list[float]:
    pairs = zip(table.rounds[f"cold call, {model}"], table.rounds[f"{floors}, {model}"], strict=True)
    return [cold["ms"] / (floor["ms"] + OVERHEAD_MS) for cold, floor in pairs]


def _register(room: Room) -> dict[str, dict[str, NDArray[Any]]]:
    """Models by size, and inputs for each."""
    store = LocalStore(room.store)
    inputs: dict[str, dict[str, NDArray[Any]]] = {}
    laid_out: list[LaidOut] = lay_out(only=REAL)
    for entry in laid_out:
        register(store, entry.folder, entry.model.id)
        inputs[entry.model.id] = entry.inputs(0)
    for model, megabytes in MADE.items():
        path = room.folder / f"{model}.onnx"
        path.write_bytes(heavy(megabytes))
        card = register(store, path, model)
        inputs[model] = {"x": np.ones((1, int(card.inputs[0].shape[1] or 0)), np.float32)}  # pyright: ignore[reportOptionalSubscript, reportArgumentType]
    return inputs


async def _call_each(url: str, inputs: dict[str, dict[str, NDArray[Any]]]) -> dict[str, Measured]:
    async with Client(url) as client:
        found: dict[str, Measured] = {}
        for model, arrays in inputs.items():
            started = time.perf_counter()
            result = await client.call(model, arrays, timeout=60)
            ms = (time.perf_counter() - started) * 1e3
            found[model] = {"ms": ms, "worker_load_ms": result.timing.get("load", 0.0) * 1e3}
        return found


def _floor(store: Path, models: list[str], *, optimised: bool) -> dict[str, float]:
    """What a load takes in process, of the model itself or of what registration has kept of it."""
    command = [sys.executable, "-m", "tests.bench.cold", str(store), host() if optimised else "", *models]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def _load_each(store: LocalStore, models: list[str]) -> dict[str, float]:
    """Milliseconds of reading, verifying, loading, warming up and running each model once."""
    backend = OnnxBackend()
    found: dict[str, float] = {}
    for model in models:
        started = time.perf_counter()
        card = store.card(model)
        fetched = store.fetch(card)
        source = ModelSource(
            model,
            card.version,
            fetched.path,
            fetched.content,
            card.intra_op_threads,
            optimised=fetched.optimised,
        )
        engine = backend.load(source)
        sample = None if fetched.sample is None else read_sample(fetched.sample)
        backend.warm_up(engine, sample)
        if sample is not None:
            engine.run(sample_tensors(engine.signature, sample))
        found[model] = (time.perf_counter() - started) * 1e3
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_load_each(LocalStore(sys.argv[1], sys.argv[2]), sys.argv[3:])))
