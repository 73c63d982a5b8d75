"""Keeps a window of calls in flight and tells what they took. Needs psutil alone: peers run it elsewhere.

A client is a process that is started as ``python -m MODULE OPTIONS`` and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil

KILOBYTE = 1000
"""All sizes are of the payload alone."""
FIRST_ANSWER_S = 30.0

Call = Callable[[bytes], Awaitable[object]]


def options(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """What a client is told on its command line."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--kilobytes", type=int, default=1)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--worker", type=lambda text: [int(pid) for pid in text.split(",")], default=[])
    parser.add_argument("--broker", type=int, default=0)
    parser.add_argument("--uvloop", action="store_true")
    return parser.parse_args()


def run(work: Any, *, uvloop: bool) -> Any:
    """``asyncio.run`` on the loop that was asked for."""
    if not uvloop:
        return asyncio.run(work)
    import uvloop as fast_loop

    return fast_loop.run(work)


def payload(kilobytes: int) -> bytes:
    """Bytes that are no text."""
    return os.urandom(kilobytes * KILOBYTE)


async def measure(call: Call, chosen: argparse.Namespace, body: Any = None) -> None:
    """Warm up, then keep ``window`` calls in flight until ``count`` are answered; print the figures.

    ``call`` is given the body and raises when the answer is not the right one.
    """
    body = payload(chosen.kilobytes) if body is None else body
    await _until_answered(call, body)
    await _lanes(call, body, max(20, chosen.count // 10), chosen.window)
    with Meter(chosen) as meter:
        meter.seconds = await _lanes(call, body, chosen.count, chosen.window)
    meter.print()


def measure_blocking(send: Callable[[bytes], Any], wait: Callable[[Any], object], chosen: argparse.Namespace) -> None:
    """``measure`` for libraries that block: ``send`` gives a handle, ``wait`` checks its answer."""
    body = payload(chosen.kilobytes)
    wait(send(body))

    def lanes(count: int) -> list[float]:
        seconds: list[float] = []
        flying: collections.deque[tuple[float, Any]] = collections.deque()
        left = count
        while left or flying:
            while left and len(flying) < chosen.window:
                flying.append((time.perf_counter(), send(body)))
                left -= 1
            started, handle = flying.popleft()
            wait(handle)
            seconds.append(time.perf_counter() - started)
        return seconds

    lanes(max(20, chosen.count // 10))
    with Meter(chosen) as meter:
        meter.seconds = lanes(chosen.count)
    meter.print()


class Meter:
    """Wall and CPU time of the worker, the client and the broker while it is entered."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.seconds: list[float] = []
        self._pids: dict[str, list[int]] = {"worker": chosen.worker, "client": [os.getpid()], "broker": []}
        if chosen.broker:
            self._pids["broker"] = [chosen.broker]

    def __enter__(self) -> Meter:
        self._cpu = {name: cpu_of(pids) for name, pids in self._pids.items()}
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wall = time.perf_counter() - self._started
        self._cpu = {name: cpu_of(pids) - self._cpu[name] for name, pids in self._pids.items()}

    def print(self) -> None:
        count, ordered = len(self.seconds), sorted(self.seconds)
        found = {
            "rate": count / self._wall,
            "p50_ms": ordered[count // 2] * 1e3,
            "p99_ms": ordered[min(count - 1, int(count * 0.99))] * 1e3,
            **{f"{name}_us": cpu / count * 1e6 for name, cpu in self._cpu.items()},
            "load": os.getloadavg()[0],
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def cpu_of(pids: list[int]) -> float:
    """CPU seconds of these processes and of all their children."""
    total = 0.0
    for pid in pids:
        for process in _family(pid):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _family(pid: int) -> Iterator[psutil.Process]:
    process = psutil.Process(pid)
    yield process
    yield from process.children(recursive=True)


async def _until_answered(call: Call, body: Any) -> None:
    deadline = time.perf_counter() + FIRST_ANSWER_S
    while True:
        try:
            async with asyncio.timeout(5):
                await call(body)
            return
        except (TimeoutError, ConnectionError):
            if time.perf_counter() > deadline:
                raise


async def _lanes(call: Call, body: Any, count: int, window: int) -> list[float]:
    seconds: list[float] = []
    left = iter(range(count))

    async def lane() -> None:
        for _ in left:
            started = time.perf_counter()
            await call(body)
            seconds.append(time.perf_counter() - started)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(window):
            lanes.create_task(lane())
    return seconds
