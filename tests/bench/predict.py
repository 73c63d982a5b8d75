"""``predict``: what ``qworker simulate`` says of a trace, against a worker that serves it with real models.

What each model takes and costs is measured first, on workers of the same settings; then a seeded trace is played to one
worker in real time, and to the simulator. Both tell loads and the median wait of the calls that found their model cold.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from array import array
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.models import lay_out
from qworker import Client
from qworker.build.register import register
from qworker.policy.choice import POLICIES
from qworker.simulate.fleet import Fleet
from qworker.simulate.replay import replay
from qworker.simulate.trace import Cost, Trace, make_trace
from qworker.store.local import LocalStore
from tests.bench.drive import run as run_loop
from tests.bench.figures import Measured, Table, rounds
from tests.bench.room import Room
from tests.e2e.fleet import WorkerProcess

REAL = (
    *("basic-pitch", "light-densenet121", "light-inception-v1", "light-resnet50", "magika", "ppocr4-det"),
    *("ppocr4-rec", "romanizer-dec", "silero-vad", "speech-embedding", "tashkeel-bilstm", "tashkeel-rawi"),
)
BUDGET_SHARE = 0.4
AFTERWARDS = "simulated, with the live run's load times"
"""Where the machine was busier than when loads were measured, this tells what of the difference that makes."""
RATE = 3.0
"""Calls a second, all models together."""
PASSES = 3
"""Over all models, to measure what they cost."""
TIMEOUT = 120.0
ALONE = "history = 'off'\nfleet_history = false\nwarm_start = 0\n"
"""Each worker is to know as little as the simulator."""

Inputs = dict[str, dict[str, NDArray[Any]]]


def run(chosen: argparse.Namespace) -> Table:
    table = Table(f"predict: {chosen.minutes:g} minutes of a trace, live and simulated")
    with Room() as room:
        sizes, inputs = _register(room)
        budget = max(int(sum(sizes.values()) * BUDGET_SHARE), *sizes.values())
        for number in rounds(chosen):
            requests = make_requests(number, list(inputs), 60.0 * chosen.minutes)
            costs = _Costs(room, sizes, inputs)
            live, took = _live(room, inputs, requests, budget)
            table.add("live", live)
            table.add("simulated", _simulated(costs, requests, budget))
            table.add(AFTERWARDS, _simulated(costs, requests, budget, took))
    table.ratio("loads_simulated_over_live", "simulated", "live", "loads")
    table.ratio("cold_p50_simulated_over_live", "simulated", "live", "cold_p50_ms")
    table.ratio("loads_simulated_afterwards_over_live", AFTERWARDS, "live", "loads")
    table.ratio("cold_p50_simulated_afterwards_over_live", AFTERWARDS, "live", "cold_p50_ms")
    table.notes.append(f"{len(inputs)} models, {budget >> 20} MiB of {sum(sizes.values()) >> 20} MiB, one worker.")
    return table


def make_requests(seed: int, models: list[str], seconds: float) -> list[tuple[float, str]]:
    """Calls at random times, in short runs of one model, as people work; some models far more often than others."""
    chance = random.Random(f"predict {seed}")
    ranked = chance.sample(models, len(models))
    weights = list(accumulate(1.0 / (rank + 1) for rank in range(len(ranked))))
    out: list[tuple[float, str]] = []
    at = chance.expovariate(RATE / 3.0)
    while at < seconds:
        model, each = chance.choices(ranked, cum_weights=weights)[0], at
        for _ in range(1 + int(chance.expovariate(1 / 2.0))):
            out.append((each, model))
            each += chance.expovariate(1.0)
        at += chance.expovariate(RATE / 3.0)
    return sorted(call for call in out if call[0] < seconds)


def _register(room: Room) -> tuple[dict[str, int], Inputs]:
    store = LocalStore(room.store)
    sizes: dict[str, int] = {}
    inputs: Inputs = {}
    for entry in lay_out(only=REAL):
        sizes[entry.model.id] = register(store, entry.folder, entry.model.id).resident_bytes
        inputs[entry.model.id] = {name: np.asarray(value) for name, value in entry.inputs(0).items()}
    return sizes, inputs


class _Costs:
    """What was measured with one call at a time: of each model, and of the worker's way to a load and out again."""

    def __init__(self, room: Room, sizes: dict[str, int], inputs: Inputs) -> None:
        loads: dict[str, list[float]] = {model: [] for model in inputs}
        runs: dict[str, list[float]] = {model: [] for model in inputs}
        into_free: list[float] = []
        evicting: list[float] = []
        for memory, found in ((2 * sum(sizes.values()), into_free), (max(sizes.values()), evicting)):
            for _ in range(PASSES):
                (worker,) = room.workers(memory=str(memory), min_residency=0, config=_config(room))
                timings = run_loop(_one_by_one(room.url, inputs), uvloop=True)
                for event in worker.events("model.loaded"):
                    loads[event["model"]].append(event["seconds"])
                for model, timing in timings.items():
                    runs[model].append(timing["run"])
                    found.append(timing["queue"] - timing["load"])
                _end(worker)
        self.load_seconds = {model: statistics.median(each) for model, each in loads.items()}
        self.run_seconds = {model: statistics.median(each) for model, each in runs.items()}
        self.claim = max(0.0, statistics.median(into_free))
        self.unload = max(0.0, statistics.median(evicting) - self.claim)
        self.costs = {model: Cost(sizes[model], self.load_seconds[model]) for model in sizes}


async def _one_by_one(url: str, inputs: Inputs) -> dict[str, dict[str, float]]:
    async with Client(url) as client:
        return {
            model: dict((await client.call(model, arrays, timeout=TIMEOUT)).timing) for model, arrays in inputs.items()
        }


def _simulated(
    costs: _Costs, requests: list[tuple[float, str]], budget: int, took: dict[str, float] | None = None
) -> Measured:
    took = {} if took is None else took
    each = {model: Cost(cost.nbytes, took.get(model, cost.load_seconds)) for model, cost in costs.costs.items()}
    made: Trace = make_trace(requests, each)
    runs = array("d", (costs.run_seconds[made.models[which]] for which in made.which))
    trace = Trace(made.times, made.which, made.models, made.costs, runs)
    fleet = Fleet(budget, claim_seconds=costs.claim, unload_seconds=costs.unload)
    outcome = replay(trace, fleet, POLICIES["gdsf"], "gdsf")
    return {
        "loads": float(outcome.loads),
        "cold": float(len(outcome.cold_waits)),
        "cold_p50_ms": outcome.cold_wait(0.5) * 1e3,
        "load_s": outcome.load_seconds,
        "claim_ms": costs.claim * 1e3,
        "unload_ms": costs.unload * 1e3,
    }


def _live(
    room: Room, inputs: Inputs, requests: list[tuple[float, str]], budget: int
) -> tuple[Measured, dict[str, float]]:
    """What came of it, and the mean load seconds of each model."""
    (worker,) = room.workers(memory=str(budget), config=_config(room))
    waits = run_loop(_play(room.url, inputs, requests), uvloop=True)
    loads = worker.events("model.loaded")
    _end(worker)
    took = {
        model: statistics.fmean(event["seconds"] for event in loads if event["model"] == model)
        for model in {event["model"] for event in loads}
    }
    return {
        "loads": float(len(loads)),
        "cold": float(len(waits)),
        "cold_p50_ms": statistics.median(waits) * 1e3,
        "load_s": sum(event["seconds"] for event in loads),
    }, took


async def _play(url: str, inputs: Inputs, requests: list[tuple[float, str]]) -> list[float]:
    """Each call at its time; the queue waits of those that came before their model was hot."""
    waits: list[float] = []
    async with Client(url) as client, asyncio.TaskGroup() as calls:
        began = time.perf_counter()

        async def call(model: str) -> None:
            timing = (await client.call(model, inputs[model], timeout=TIMEOUT)).timing
            if "load" in timing:
                waits.append(timing["queue"])

        for at, model in requests:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            calls.create_task(call(model))
    return waits


def _config(room: Room) -> Path:
    path = room.folder / "alone.toml"
    path.write_text(ALONE)
    return path


def _end(worker: WorkerProcess) -> None:
    worker.terminate()
    worker.wait_exit()
