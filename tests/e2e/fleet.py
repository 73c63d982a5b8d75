"""Real ``qworker worker`` processes on a broker, and what must hold of them when a test ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pika
from pika.exceptions import ChannelClosedByBroker

from qworker.broker.child import spawn, stop_child
from qworker.store.local import LocalStore
from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from qworker.cli.main import main; main()"]
START_SECONDS = 40.0
STOP_SECONDS = 40.0
QUICK = {"sweep_interval": 0.5, "min_residency": 0.2, "max_cold_wait": 5, "grace": 20, "threads": 2}
QUICK |= {"history": "off", "warm_start": 0}  # what one test loads is no business of the next one
"""Settings that make tests quick; ``start`` takes others."""

_FAULTS = ("Traceback", "was never retrieved", "was never awaited", "Unhandled")


class WorkerProcess:
    """One worker with its log and its pages."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, name: str) -> None:
        self.process = process
        self.log = log
        self.name = name
        self.port = 0

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    # --- its log ---

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def events(self, event: str | None = None, **fields: object) -> list[dict[str, Any]]:
        """The log's lines, or those of one event with these fields."""
        lines = [json.loads(line) for line in self.text().splitlines() if line.startswith("{") and line.endswith("}")]
        return [
            line
            for line in lines
            if (event is None or line.get("event") == event) and all(line.get(k) == v for k, v in fields.items())
        ]

    def wait_event(self, event: str, timeout: float = START_SECONDS, **fields: object) -> dict[str, Any]:
        def seen() -> dict[str, Any] | None:
            found = self.events(event, **fields)
            assert found or self.alive, f"{self.name} ended before {event}:\n{self.text()[-3000:]}"
            return found[-1] if found else None

        return wait_until_sync(seen, timeout, what=f"{event} {fields} in the log of {self.name}")

    # --- its pages ---

    def page(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def state(self) -> dict[str, Any]:
        return self.page("/state")[1]

    def row(self, model: str) -> dict[str, Any] | None:
        return next((row for row in self.state()["models"] if row["model"] == model), None)

    def is_hot(self, model: str) -> bool:
        row = self.row(model)
        return row is not None and row["state"] == "hot"

    def step(self, model: str) -> str | None:
        """Where its claim on ``model`` stands."""
        return self.state()["claims"].get(model)

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        self.port = self.wait_event("http.listening", timeout)["port"]
        wait_until_sync(self._is_ready, timeout, what=f"{self.name} is ready: {self.text()[-2000:]}")

    def _is_ready(self) -> bool:
        assert self.alive, f"{self.name} ended:\n{self.text()[-3000:]}"
        return self.page("/readyz")[0] == 200

    # --- what is done to it ---

    def kill(self) -> None:
        """SIGKILL, also of one that is stopped."""
        self.process.kill()
        self.process.wait(10)

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def terminate(self) -> None:
        self.process.terminate()

    def wait_exit(self, timeout: float = STOP_SECONDS) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end in {timeout:g} s:\n{self.text()[-3000:]}") from None


class Fleet:
    """Workers on one virtual host and one store. ``finish`` stops them and looks at what is left."""

    def __init__(self, url: str, store: Path, folder: Path) -> None:
        self.url = url
        self.store = store
        self.workers: list[WorkerProcess] = []
        self.environment: dict[str, str] = {}  # more of it, for all that are started from now on
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, count: int = 1, *, wait: bool = True, memory: str = "512MiB", **settings: object) -> None:
        """Start ``count`` more workers; the flags are named as the settings are."""
        fresh = [self._spawn(memory, settings) for _ in range(count)]
        self.workers += fresh
        if wait:
            for worker in fresh:
                worker.wait_ready()

    def holder(self, model: str, timeout: float = 20.0) -> WorkerProcess:
        """The worker on which ``model`` is hot, once there is one."""
        return wait_until_sync(
            lambda: next((w for w in self.live() if w.port and w.is_hot(model)), None), timeout, what=f"{model} is hot"
        )

    def claimer(self, model: str, *steps: str, timeout: float = 20.0) -> WorkerProcess:
        """The worker whose claim on ``model`` is in one of ``steps``, once there is one."""
        return wait_until_sync(
            lambda: next((w for w in self.live() if w.step(model) in steps), None),
            timeout,
            what=f"a claim on {model} in {steps}",
        )

    def other(self, worker: WorkerProcess) -> WorkerProcess:
        return next(each for each in self.live() if each is not worker)

    def live(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.alive]

    def counter(self, name: str) -> int:
        return sum(worker.state()["counters"][name] for worker in self.live())

    def finish(self, *, left: int | None = 0, errors_allowed: Iterable[str] = ()) -> None:
        """Stop all, and check: they end well, hold no byte, leave no consumer and nothing unsettled.

        ``left`` jobs are still to be done (None: any number).
        Every one who is told to stop must say what became of its ledger.
        """
        live = self.live()
        for worker in live:
            worker.terminate()
        for worker in live:
            assert worker.wait_exit() == 0, f"{worker.name} ended badly:\n{worker.text()[-4000:]}"
            assert [line["held"] for line in worker.events("worker.drained")] == [0], worker.text()[-4000:]
        allowed = set(errors_allowed)
        for worker in self.workers:
            for sign in _FAULTS:
                assert sign not in worker.text(), f"{worker.name} has {sign} in its log:\n{worker.text()[-4000:]}"
            bad = [e for e in worker.events() if e["level"] in ("error", "critical") and e["event"] not in allowed]
            assert not bad, f"{worker.name} logged errors that the test does not expect: {bad}"
        # With no worker left, whatever was delivered and not settled is back in its queue.
        wait_until_sync(
            lambda: self._at_rest(left), what=f"{left} jobs left and no consumer, but: {depths(self.url, self.store)}"
        )

    def stop(self) -> None:
        """End whatever still runs, without looking."""
        for worker in self.live():
            worker.resume()
            stop_child(worker.process, 3.0)

    def _at_rest(self, left: int | None) -> bool:
        found = depths(self.url, self.store)
        return left in (None, sum(ready for ready, _ in found.values())) and not any(
            count for _, count in found.values()
        )

    def _spawn(self, memory: str, settings: dict[str, object]) -> WorkerProcess:
        name = f"worker-{len(list(self._folder.glob('*.log')))}"
        flags = {"store": self.store, "broker": self.url, "memory": memory, "name": name, "http_port": 0}
        flags |= {"log_format": "json", "heartbeat": 5, **QUICK, **settings}
        command = [*COMMAND, "worker"]
        for flag, setting in flags.items():
            command += [f"--{flag.replace('_', '-')}", str(setting)]
        environment = {key: text for key, text in os.environ.items() if not key.startswith("QWORKER_")}
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            more = {"PYTHONPATH": str(ROOT)} | self.environment
            process = spawn(command, environment=environment | more, output=output)
        return WorkerProcess(process, log, name)


def depths(url: str, store: Path) -> dict[str, tuple[int, int]]:
    """Ready messages and consumers of every lane queue there is, and of the unroutable jobs."""
    queues = ["qworker.unroutable"]
    queues += [f"qworker.{lane}.{model}" for model in LocalStore(store).models() for lane in ("jobs", "batch")]
    return queue_depths(url, queues)


def queue_depths(url: str, queues: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Ready messages and consumers of those queues that exist."""
    found: dict[str, tuple[int, int]] = {}
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        channel = connection.channel()
        for queue in queues:
            try:
                ok = channel.queue_declare(queue, passive=True).method
                found[queue] = (ok.message_count, ok.consumer_count)
            except ChannelClosedByBroker:
                channel = connection.channel()
    finally:
        connection.close()
    return found
