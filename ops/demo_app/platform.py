"""What the demo runs on: a store of registered models, a private broker, workers. All of it is its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ops.models import ROOT, LaidOut
from qworker.broker.child import spawn, stop_child
from qworker.store.card import Card
from qworker.store.local import LocalStore

QWORKER = str(ROOT / ".venv" / "bin" / "qworker")
REGISTERING_AT_ONCE = 2
START_SECONDS = 90.0
STOP_SECONDS = 45.0


class DemoError(Exception):
    """The demo cannot go on; the message says why and where to look."""


@dataclass(slots=True)
class Child:
    """A process of ours with its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise DemoError when it has ended."""
        code = self.process.poll()
        if code is not None:
            raise DemoError(f"{self.name} ended with {code}; its last lines:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


@dataclass(slots=True)
class WorkerProcess(Child):
    port: int = 0

    @property
    def state_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/state"


@dataclass(slots=True)
class Platform:
    """Starts and stops the parts, all below ``folder``; the kernel ends them with the demo, however that ends."""

    folder: Path
    broker_url: str = ""
    broker: Child | None = None
    workers: list[WorkerProcess] = field(default_factory=list[WorkerProcess])

    @property
    def store(self) -> Path:
        return self.folder / "store"

    # --- store ---

    async def register(self, models: Sequence[LaidOut], advance: Callable[[], object]) -> None:
        """Register all models through the command line; each is probed in a process of its own."""
        self.store.mkdir(parents=True, exist_ok=True)
        async with asyncio.TaskGroup() as tasks:
            for share in range(REGISTERING_AT_ONCE):
                tasks.create_task(self._register(models[share::REGISTERING_AT_ONCE], advance))

    async def register_as(self, entry: LaidOut) -> None:
        """Register one model under the id that ``entry`` gives it, with its queue."""
        await self._register([entry], lambda: None, "--id", entry.model.id, "--broker", self.broker_url)

    async def _register(self, models: Sequence[LaidOut], advance: Callable[[], object], *flags: str) -> None:
        if not models:
            return
        folders = (str(entry.folder) for entry in models)
        process = await asyncio.create_subprocess_exec(
            *(QWORKER, "models", "register", "--store", str(self.store), *flags, *folders),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        told: list[str] = []
        try:
            async for line in process.stdout:
                told.append(line.decode(errors="replace").rstrip())
                if "loading it in a process of its own" in told[-1]:
                    advance()
            code = await process.wait()
        finally:
            if process.returncode is None:  # we were cancelled: leave nobody behind
                process.kill()
                await process.wait()
        if code:
            raise DemoError("'qworker models register' refused a model:\n" + "\n".join(told))

    def cards(self) -> dict[str, Card]:
        """The cards of the registered models."""
        store = LocalStore(self.store)
        return {model: store.card(model) for model in store.models()}

    # --- processes ---

    async def start_broker(self) -> None:
        told = self.folder / "broker.json"
        told.unlink(missing_ok=True)
        self.broker = self._start("broker", [sys.executable, "-m", "ops.demo_app.broker", str(self.folder)])
        deadline = time.monotonic() + START_SECONDS
        while not told.exists():
            self.broker.check()
            if time.monotonic() > deadline:
                raise DemoError(f"the broker did not start within {START_SECONDS:g} s:\n{self.broker.tail()}")
            await asyncio.sleep(0.05)
        self.broker_url = json.loads(told.read_text(encoding="utf-8"))["url"]

    async def start_workers(self, count: int, memory: int) -> None:
        for number in range(count):
            port = _free_port()
            command = [QWORKER, "worker", "--store", str(self.store), "--broker", self.broker_url]
            command += ["--memory", str(memory), "--http-port", str(port), "--log-format", "json"]
            command += ["--name", f"worker-{number + 1}"]
            child = self._start(f"worker-{number + 1}", command)
            self.workers.append(WorkerProcess(child.name, child.process, child.log, port))
        async with aiohttp.ClientSession() as http:
            for worker in self.workers:
                await _until_ready(http, worker)

    def stop(self) -> list[str]:
        """Stop workers, then the broker; returns what did not end well. Stopping twice does nothing."""
        complaints: list[str] = []
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGTERM)
        for worker in self.workers:
            # Not stop_child alone: it would send SIGTERM again, and the second one means "now".
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(STOP_SECONDS)
            stop_child(worker.process, 0)
            if worker.process.returncode:
                complaints.append(f"{worker.name} ended with {worker.process.returncode}:\n{worker.tail()}")
        if self.broker is not None:
            stop_child(self.broker.process, STOP_SECONDS)
        return complaints

    def _start(self, name: str, command: Sequence[str]) -> Child:
        log = self.folder / f"{name}.log"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        with log.open("wb") as output:
            process = spawn(command, environment=environment, output=output)
        return Child(name, process, log)


async def _until_ready(http: aiohttp.ClientSession, worker: WorkerProcess) -> None:
    deadline = time.monotonic() + START_SECONDS
    reason = "no answer yet"
    while time.monotonic() < deadline:
        worker.check()
        try:
            async with http.get(f"http://127.0.0.1:{worker.port}/readyz") as response:
                if response.status == 200:
                    return
                reason = await response.text()
        except aiohttp.ClientError as exc:
            reason = str(exc)
        await asyncio.sleep(0.05)
    raise DemoError(f"{worker.name} was not ready within {START_SECONDS:g} s ({reason}):\n{worker.tail()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
