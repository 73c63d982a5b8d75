"""``scale``: what thousands of registered models cost that nobody calls, and how soon a stranded job is found."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from qworker import Client
from qworker.app import declare_models
from qworker.broker.fast.session import FastConnector
from qworker.wire.topology import lane_queue
from tests.bench.counting_proxy import CountingProxy
from tests.bench.figures import Measured, Table, rounds
from tests.bench.room import Room
from tests.e2e.fleet import WorkerProcess
from tests.e2e.models import inputs_of, put, rolling
from tests.support.models import identity
from tests.support.waiting import wait_until_sync

SETTLE_SECONDS = 12.0
"""The election of a sweeper, and its first look at everything."""
IDLE_SECONDS = 45.0
WORKERS = 2


def run(chosen: argparse.Namespace) -> Table:
    """Each size has a broker and a store of its own; registration has declared the queues, as it does."""
    table = Table(f"scale: registered models that nobody calls, {WORKERS} workers")
    for models in chosen.models:
        with Room() as room:
            names = _register(room.store, models)
            asyncio.run(declare_models(room.url, names, _queue_type(models)))
            for number in itertools.islice(rounds(chosen), 3):
                table.add(f"{models} models", _round(room, models, names, stranded=number == 0))
        for name, figure in (("ready_s", "ready_s"), ("idle_ops_per_s", "idle_ops_per_s"), ("rss_mib", "rss_mib")):
            table.spread(f"{name}_{models}", [found[figure] for found in table.rounds[f"{models} models"]])
        found_s = [found["stranded_s"] for found in table.rounds[f"{models} models"] if "stranded_s" in found]
        table.spread(f"stranded_found_s_{models}", found_s)
    return table


def _queue_type(models: int) -> str:
    return "quorum" if models <= 2000 else "classic"


def _register(store: Path, models: int) -> list[str]:
    """Tiny models, put there without a probe each; and one that runs for as long as it is told to."""
    put(store, "roll", rolling())
    names = [f"model-{number:05d}" for number in range(models)]
    content = identity()
    for name in names:
        put(store, name, content)
    return [*names, "roll"]


def _round(room: Room, models: int, names: list[str], *, stranded: bool) -> Measured:
    with CountingProxy(room.url) as proxy:
        started = time.perf_counter()
        workers = room.workers(WORKERS, broker=proxy.url, queue_type=_queue_type(models))
        ready = time.perf_counter() - started
        time.sleep(SETTLE_SECONDS)
        before, since = proxy.total(), time.perf_counter()
        cpu = _cpu(workers)
        time.sleep(IDLE_SECONDS)
        seconds = time.perf_counter() - since
        found: Measured = {
            "ready_s": ready,
            "idle_ops_per_s": (proxy.total() - before) / seconds,
            "idle_worker_cpu_percent": (_cpu(workers) - cpu) / seconds * 100,
            "rss_mib": max(psutil.Process(w.process.pid).memory_info().rss for w in workers) / (1 << 20),
            "look_at_all_s": asyncio.run(_look_at_all(room.url, names)),
        }
        if stranded:
            found["stranded_s"] = asyncio.run(_stranded(room.url, workers))
        for worker in workers:
            if worker.alive:
                worker.terminate()
                worker.wait_exit()
    return found


def _cpu(workers: list[WorkerProcess]) -> float:
    return sum(sum(psutil.Process(worker.process.pid).cpu_times()[:2]) for worker in workers)


async def _look_at_all(url: str, names: list[str]) -> float:
    async with await FastConnector(url).connect() as session:
        started = time.perf_counter()
        await session.depths([lane_queue("jobs", name) for name in names])
        return time.perf_counter() - started


async def _stranded(url: str, workers: list[WorkerProcess]) -> float:
    """Seconds from the SIGKILL of a worker with a job in hand to the wake that the sweep gives its model."""
    async with Client(url) as client, asyncio.TaskGroup() as tasks:
        call = tasks.create_task(client.call("roll", inputs_of("roll", 1, 3.0), timeout=90))

        def busy() -> WorkerProcess | None:
            for worker in workers:
                row = worker.row("roll")
                if row is not None and row["in_hand"]:
                    return worker
            return None

        holder = await asyncio.to_thread(wait_until_sync, busy, 30.0, what="the job runs")
        holder.kill()
        killed = datetime.now(UTC)
        await call
        other = next(worker for worker in workers if worker is not holder)
        wake = datetime.fromisoformat(other.wait_event("sweeper.wake", model="roll")["timestamp"])
        return (wake - killed).total_seconds()
