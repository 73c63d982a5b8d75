"""``--device all``: one worker process for each device, started again when it ends badly.

A CUDA error that breaks a context breaks it for the whole process; so each device has a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STEADY: Final = 60.0
"""Seconds that a worker must have lived for its next failure to count as the first."""
MOST_FAILURES: Final = 8
"""In a row, of one device: then all stop, since something is wrong that no new process mends."""

Command = Callable[[int, str], Sequence[str]]
"""Place and device → the arguments of its worker."""


class Supervisor:
    """Runs one process a device until told to stop. Owned here: the processes."""

    def __init__(self, devices: Sequence[str], command: Command) -> None:
        self._devices = devices
        self._command = command
        self._stopping = asyncio.Event()
        self._signals = 0
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> int:
        """The exit code: 0 when all have stopped as they were told."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.stop)
        log.info("supervisor.started", devices=list(self._devices))
        async with asyncio.TaskGroup() as tasks:
            lives = [tasks.create_task(self._keep(i, device)) for i, device in enumerate(self._devices)]
        return max((life.result() for life in lives), default=0)

    def stop(self) -> None:
        """Tell all to stop; the second time, end them at once."""
        self._signals += 1
        self._stopping.set()
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM if self._signals == 1 else signal.SIGKILL)

    async def _keep(self, place: int, device: str) -> int:
        """Keep one worker alive; its last exit code, or 1 when it cannot be kept alive."""
        failures = 0
        while True:
            started = time.monotonic()
            process = await asyncio.create_subprocess_exec(*self._command(place, device))
            self._processes[device] = process
            if self._stopping.is_set():  # it was told to stop while it was being started
                process.send_signal(signal.SIGTERM)
            code = await process.wait()
            if self._stopping.is_set() or code == 0:
                return abs(code)
            failures = 1 if time.monotonic() - started >= STEADY else failures + 1
            log.error("worker.ended", device=device, code=code, failures=failures)
            if failures >= MOST_FAILURES:
                self.stop()
                return 1
            await self._pause(min(FIRST_PAUSE * 2 ** (failures - 1), LONGEST_PAUSE))
            if self._stopping.is_set():
                return 0

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


def worker_command(arguments: Sequence[str], name: str, http_port: int | None) -> Command:
    """``arguments`` of ours for a worker of one device: of two equal options the last one counts."""

    def command(place: int, device: str) -> Sequence[str]:
        more = ["--device", device, "--name", f"{name}-{place}"]
        if http_port:
            more += ["--http-port", str(http_port + place)]
        return [sys.executable, "-m", "qworker", *arguments, *more]

    return command


async def supervise(devices: Sequence[str], command: Command) -> int:
    """Run workers on ``devices`` until told to stop; the exit code.

    They share a book of the inputs that broke a device, unless one is set: it outlives each of them.
    """
    with tempfile.TemporaryDirectory(prefix="qworker-") as folder:
        os.environ.setdefault("QWORKER_POISON_BOOK", str(Path(folder) / "poison.jsonl"))
        return await Supervisor(devices, command).run()
