"""The whole way: a broker, one worker with memory for a part of the models, and calls whose answers are known."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ops.demo_app.traffic import SKEW
from ops.gpu_app.plans import Build
from ops.gpu_app.report import Report
from qworker import Client
from qworker.app import declare_models
from qworker.broker.child import spawn, stop_child
from qworker.broker.node import PrivateNode

AT_ONCE = 8
SHARE = 0.45
"""Of all models' bytes, what the worker may hold: so models must leave."""


def serve(
    report: Report, builds: Sequence[Build], store: Path, folder: Path, jobs: int, more: Mapping[str, str]
) -> None:
    """Serve ``jobs`` calls and look at the answers, the evictions and the account."""
    budget = int(sum(build.card.resident_bytes for build in builds) * SHARE)
    budget = max(budget, int(max(build.card.resident_bytes for build in builds) * 1.5))
    log = folder / "worker.log"
    with PrivateNode(folder / "broker") as node:
        asyncio.run(declare_models(node.url, [build.id for build in builds]))
        worker = _start(node.url, store, budget, log, more)
        try:
            port = _wait_for(log, worker, "http.listening")["port"]
            report.say(f"serving {jobs} calls within {budget / (1 << 20):.0f} MiB")
            figures = asyncio.run(_call_all(node.url, builds, jobs))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=10) as answer:
                state = json.load(answer)
        finally:
            stop_child(worker, 30.0)
    unloads = [line["bytes_returned"] for line in _events(log, "model.unloaded")]
    report.note("service", {**figures, "budget": budget, "state": state, "bytes_returned": unloads})
    report.check("all answers are right", figures["wrong"] == 0, f"{figures['wrong']} of {jobs} are not")
    report.check("models had to leave", state["counters"]["evictions"] >= 3, state["counters"]["evictions"])
    report.check("each eviction gave bytes back", all(each > 0 for each in unloads), unloads[:10])
    drift = state["device"]["memory"]["drift"]
    report.check("the account is right after all that", abs(drift) <= 64 << 20, f"drift {drift}")
    report.check("the worker ended well", worker.returncode == 0, worker.returncode)


def _start(url: str, store: Path, budget: int, log: Path, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "qworker", "worker", "--backend", "tensorrt", "--store", str(store)]
    command += ["--broker", url, "--memory", str(budget), "--http-port", "0", "--log-format", "json"]
    command += ["--min-residency", "0.2", "--max-cold-wait", "5", "--sweep-interval", "0.5"]
    with log.open("wb") as output:
        return spawn(command, environment={**os.environ, **more}, output=output)


async def _call_all(url: str, builds: Sequence[Build], jobs: int) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    weights = 1 / np.arange(1, len(builds) + 1) ** SKEW
    picks = [*range(len(builds)), *rng.choice(len(builds), max(0, jobs - len(builds)), p=weights / weights.sum())][
        :jobs
    ]
    rng.shuffle(picks)
    gate = asyncio.Semaphore(AT_ONCE)
    hot: dict[str, list[float]] = {}
    cold: dict[str, list[float]] = {}
    wrong: list[str] = []
    async with Client(url) as client, asyncio.TaskGroup() as tasks:

        async def one(build: Build, k: int) -> None:
            async with gate:
                started = time.perf_counter()
                result = await client.call(build.id, build.source.inputs(k), timeout=120)
                milliseconds = (time.perf_counter() - started) * 1000
            outputs = {output.name: output.array for output in result.outputs}
            error = build.error(k, outputs)
            if not build.good(error):
                wrong.append(f"{build.id} {k}: off by {error:.2e}")
            (cold if "load" in result.timing else hot).setdefault(build.id, []).append(milliseconds)

        for place, pick in enumerate(picks):
            tasks.create_task(one(builds[int(pick)], place % 4))
    return {
        "calls": jobs,
        "wrong": len(wrong),
        "wrong_calls": wrong[:10],
        "hot_ms": {model: _spread(times) for model, times in hot.items()},
        "cold_ms": {model: _spread(times) for model, times in cold.items()},
    }


def _spread(times: Sequence[float]) -> dict[str, float]:
    p50, p95 = np.percentile(times, [50, 95])
    return {"count": len(times), "p50": round(float(p50), 3), "p95": round(float(p95), 3)}


def _wait_for(log: Path, worker: subprocess.Popen[bytes], event: str) -> dict[str, Any]:
    deadline = time.monotonic() + 90
    while not (found := _events(log, event)):
        if worker.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the worker did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)
    return found[-1]


def _events(log: Path, event: str) -> list[dict[str, Any]]:
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith("{") and line.endswith("}")
    ]
    return [told for line in lines if (told := json.loads(line)).get("event") == event]
