# ruff: noqa: T201  # a script that talks to a terminal
"""Echo RPC over RabbitMQ: our session on both ends against plain aio-pika on both ends.

    .venv/bin/python tests/bench/rpc_echo.py [--rounds N] [--size BYTES] [--uvloop] [--json]

Both variants run in turn in each round, on one private node and one quorum queue, with a worker process
each. The aio-pika worker acks each job and does not wait for a confirm of its reply; ours confirms the
reply before it acks, as the product does. The figures that count are the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aio_pika
import psutil

from qworker.broker.base import Delivery, Properties, Session
from qworker.broker.fast.session import FastConnector
from qworker.broker.node import PrivateNode
from qworker.broker.reference.session import AioPikaConnector
from qworker.wire.topology import Queue

QUEUE = "bench.echo"
PREFETCH = 128
CONNECTORS = {"fast": FastConnector, "reference": AioPikaConnector}
Call = Callable[[bytes], Awaitable[bytes]]


# --- workers ---


async def serve_by_session(url: str, variant: str) -> None:
    async with await CONNECTORS[variant](url).connect() as session, asyncio.TaskGroup() as jobs:

        async def echo(delivery: Delivery) -> None:
            properties = delivery.properties
            reply = Properties(correlation_id=properties.correlation_id)
            await session.publish("", properties.reply_to or "", delivery.body, reply)
            await delivery.ack()

        await session.consume(QUEUE, lambda delivery: _start(jobs, echo(delivery)), prefetch=PREFETCH)
        print("ready", flush=True)
        await session.wait_closed()


def _start(jobs: asyncio.TaskGroup, job: Coroutine[Any, Any, None]) -> None:
    jobs.create_task(job)


async def serve_by_aio_pika(url: str) -> None:
    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=False)
    await channel.set_qos(prefetch_count=PREFETCH)
    queue = await channel.get_queue(QUEUE, ensure=False)

    async def echo(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        reply = aio_pika.Message(message.body, correlation_id=message.correlation_id)
        await channel.default_exchange.publish(reply, message.reply_to or "", mandatory=False)
        await message.ack()

    await queue.consume(echo)
    print("ready", flush=True)
    await asyncio.Event().wait()


# --- clients ---


async def client_by_session(stack: AsyncExitStack, url: str, variant: str) -> Call:
    session: Session = await stack.enter_async_context(await CONNECTORS[variant](url).connect())
    waiting: dict[str, asyncio.Future[bytes]] = {}
    loop = asyncio.get_running_loop()

    def on_reply(body: bytes, properties: Properties) -> None:
        waiting.pop(properties.correlation_id or "").set_result(body)

    rpc = await session.open_rpc(on_reply)
    numbers = iter(range(1 << 60))

    async def call(body: bytes) -> bytes:
        name = str(next(numbers))
        reply = waiting[name] = loop.create_future()
        await rpc.publish("", QUEUE, body, Properties(correlation_id=name, persistent=True))
        return await reply

    return call


async def client_by_aio_pika(stack: AsyncExitStack, url: str) -> Call:
    connection = await stack.enter_async_context(await aio_pika.connect(url))
    channel = await connection.channel()
    replies = await channel.get_queue("amq.rabbitmq.reply-to", ensure=False)
    waiting: dict[str, asyncio.Future[bytes]] = {}
    loop = asyncio.get_running_loop()

    def on_reply(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        waiting.pop(message.correlation_id or "").set_result(message.body)

    await replies.consume(on_reply, no_ack=True)
    numbers = iter(range(1 << 60))

    async def call(body: bytes) -> bytes:
        name = str(next(numbers))
        reply = waiting[name] = loop.create_future()
        message = aio_pika.Message(
            body,
            correlation_id=name,
            reply_to="amq.rabbitmq.reply-to",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        await channel.default_exchange.publish(message, QUEUE, mandatory=False)
        return await reply

    return call


# --- the runs ---


@dataclass(frozen=True)
class Run:
    rate: float
    p50_ms: float
    p99_ms: float
    worker_us: float
    client_us: float


async def run_calls(call: Call, body: bytes, count: int, window: int) -> list[float]:
    """Seconds of each call, with ``window`` in flight."""
    seconds: list[float] = []
    left = iter(range(count))

    async def lane() -> None:
        for _ in left:
            start = time.perf_counter()
            if await call(body) != body:
                raise SystemExit("a reply is not the request")
            seconds.append(time.perf_counter() - start)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(window):
            lanes.create_task(lane())
    return seconds


async def measure(variant: str, url: str, worker: psutil.Process, body: bytes, count: int, window: int) -> Run:
    async with AsyncExitStack() as stack:
        call = await (
            client_by_aio_pika(stack, url) if variant == "aio-pika" else client_by_session(stack, url, variant)
        )
        await run_calls(call, body, max(20, count // 20), window)
        before, client_before = worker.cpu_times(), time.process_time()
        start = time.perf_counter()
        seconds = sorted(await run_calls(call, body, count, window))
        wall = time.perf_counter() - start
        after, client = worker.cpu_times(), time.process_time() - client_before
    cpu = after.user + after.system - before.user - before.system
    return Run(
        rate=count / wall,
        p50_ms=seconds[count // 2] * 1e3,
        p99_ms=seconds[int(count * 0.99)] * 1e3,
        worker_us=cpu / count * 1e6,
        client_us=client / count * 1e6,
    )


def one_measure(variant: str, url: str, options: argparse.Namespace, window: int, count: int) -> Run:
    command = [sys.executable, __file__, "--worker", variant, "--url", url]
    if options.uvloop:
        command.append("--uvloop")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n", "the worker did not start"
            work = measure(variant, url, psutil.Process(child.pid), os.urandom(options.size), count, window)
            return run_loop(work, options.uvloop)
        finally:
            child.kill()


def run_loop(work: Coroutine[Any, Any, Any], uvloop: bool) -> Any:
    if uvloop:
        import uvloop as fast_loop

        return fast_loop.run(work)
    return asyncio.run(work)


async def declare(url: str) -> None:
    async with await FastConnector(url).connect() as session:
        await session.declare(Queue(QUEUE, arguments={"x-queue-type": "quorum"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=6000)
    parser.add_argument("--windows", type=lambda text: [int(each) for each in text.split(",")], default=[64, 1])
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["aio-pika", "fast"])
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker")
    parser.add_argument("--url")
    options = parser.parse_args()
    if options.worker:
        serve = (
            serve_by_aio_pika(options.url)
            if options.worker == "aio-pika"
            else serve_by_session(options.url, options.worker)
        )
        run_loop(serve, options.uvloop)
        return
    runs: dict[tuple[int, str], list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        node = PrivateNode(Path(folder))
        node.start()
        try:
            url = node.url_of("/")
            asyncio.run(declare(url))
            for _ in range(options.rounds):
                for window in options.windows:
                    for variant in options.variants:
                        count = options.calls // (1 if variant == "fast" else 4) // (1 if window > 1 else 8)
                        runs.setdefault((window, variant), []).append(one_measure(variant, url, options, window, count))
        finally:
            node.stop()
    report(options, runs)


def report(options: argparse.Namespace, runs: dict[tuple[int, str], list[Run]]) -> None:
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{options.size} B echo, quorum queue, medians (min-max) of {options.rounds} interleaved rounds, {load}")
    ratios: dict[str, float] = {}
    for (window, variant), found in runs.items():
        median = partial(_median, found)
        rates = [run.rate for run in found]
        print(
            f"window {window:4d} {variant:10s} {median('rate'):8.0f} msg/s ({min(rates):.0f}-{max(rates):.0f})  "
            f"p50 {median('p50_ms'):7.2f} ms  p99 {median('p99_ms'):7.2f} ms  worker {median('worker_us'):6.0f} us  "
            f"client {median('client_us'):6.0f} us"
        )
        if variant != options.variants[0]:
            base = runs[window, options.variants[0]]
            for name, field in (("throughput", "rate"), ("worker_cpu", "worker_us"), ("p50", "p50_ms")):
                pairs = [
                    getattr(ours, field) / max(1e-9, getattr(theirs, field))
                    for ours, theirs in zip(found, base, strict=True)
                ]
                ratios[f"{variant}_{name}_ratio_window{window}"] = round(statistics.median(pairs), 3)
    for name, ratio in ratios.items():
        print(f"{name:40s} {ratio}")
    if options.json:
        print(json.dumps(ratios))


def _median(found: list[Run], field: str) -> float:
    return statistics.median(getattr(run, field) for run in found)


if __name__ == "__main__":
    main()
