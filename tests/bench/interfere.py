"""``interfere``: the latency of a hot model while others are loaded, against its latency when none is."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import numpy as np

from qworker import Client
from tests.bench.drive import KILOBYTE
from tests.bench.drive import run as run_loop
from tests.bench.figures import Measured, Table, rounds
from tests.bench.product_call import model_of
from tests.bench.room import Room
from tests.support.models import heavy

CALLS_PER_SECOND = 100
SECONDS = 10.0
COLD = ("cold-a", "cold-b")
COLD_MIB = 30


def run(chosen: argparse.Namespace) -> Table:
    """Steady calls of a hot model; every other stretch two models that do not fit together are loaded in turn."""
    table = Table(f"interfere: {CALLS_PER_SECOND} calls a second of a hot 1 KB model, with and without cold loads")
    with Room() as room:
        hot, widest = room.register_identity(1).resident_bytes, 0
        for model in COLD:
            path = room.folder / f"{model}.onnx"
            path.write_bytes(heavy(COLD_MIB))
            widest = max(widest, room.register(model, path).resident_bytes)
        room.workers(memory=str(hot + widest + widest // 2), min_residency=0, pin=model_of(1))
        for _ in rounds(chosen):
            run_loop(_alternate(room.url, table), uvloop=True)
    table.ratio("p99_ratio", "with cold loads", "alone", "p99_ms")
    table.ratio("p50_ratio", "with cold loads", "alone", "p50_ms")
    return table


async def _alternate(url: str, table: Table) -> None:
    async with Client(url) as client:
        await steadily(client, 1.0)
        table.add("alone", await steadily(client, SECONDS))
        async with _loading(client) as loads:
            found = await steadily(client, SECONDS)
        table.add("with cold loads", {**found, "loads_a_second": len(loads) / SECONDS})


async def steadily(client: Client, seconds: float) -> Measured:
    """Calls at fixed moments, whether or not the earlier ones are answered."""
    x = np.ones((1, KILOBYTE // 4), np.float32)
    taken: list[float] = []

    async def call() -> None:
        started = time.perf_counter()
        await client.call(model_of(1), {"x": x}, timeout=30)
        taken.append(time.perf_counter() - started)

    loop = asyncio.get_running_loop()
    first = loop.time()
    async with asyncio.TaskGroup() as calls:
        for number in range(int(seconds * CALLS_PER_SECOND)):
            await asyncio.sleep(max(0.0, first + number / CALLS_PER_SECOND - loop.time()))
            calls.create_task(call())
    taken.sort()
    return {"p50_ms": taken[len(taken) // 2] * 1e3, "p99_ms": taken[int(len(taken) * 0.99)] * 1e3}


@asynccontextmanager
async def _loading(client: Client) -> AsyncGenerator[list[str]]:
    """Calls two models in turn of which only one fits, so that each call is a cold load."""
    loaded: list[str] = []
    side = int((COLD_MIB * (1 << 20) / 4) ** 0.5)
    x = np.ones((1, side), np.float32)

    async def load() -> None:
        while True:
            for model in COLD:
                await client.call(model, {"x": x}, timeout=60)
                loaded.append(model)

    async with asyncio.TaskGroup() as tasks:
        loads = tasks.create_task(load())
        try:
            yield loaded
        finally:
            loads.cancel()
