"""What a benchmark runs in: a private broker, a store of its own, workers, and clients as child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from qworker.broker.node import PrivateNode
from qworker.build.register import register
from qworker.store.card import Card
from qworker.store.local import LocalStore
from tests.bench.drive import KILOBYTE
from tests.bench.product_call import model_of
from tests.e2e.fleet import Fleet, WorkerProcess
from tests.support.models import identity

ROOT = Path(__file__).resolve().parents[2]
AS_DELIVERED: dict[str, object] = {
    "sweep_interval": 3,
    "min_residency": 5,
    "max_cold_wait": 30,
    "heartbeat": 10,
    "prefetch": 8,
}
"""The product's own defaults, where the fleet of the tests has quicker ones."""


class Room:
    """Entered, it has a broker and a store with the identity model; left, nothing of it remains."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._fleets = 0

    def __enter__(self) -> Room:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="qworker-bench-")))
        self.node = PrivateNode(self.folder / "node")
        self.node.start()
        self._stack.callback(self.node.stop)
        self.url = self.node.url_of("/")
        self.store = self.folder / "store"
        LocalStore(self.store)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def broker_pid(self) -> int:
        return self.node.pid

    def register(self, model: str, path: Path) -> Card:
        """Register as an operator does: probed, measured and verified."""
        return register(LocalStore(self.store), path, model)

    def register_identity(self, kilobytes: int, model: str | None = None) -> Card:
        """y = x, of float rows of that size."""
        path = self.folder / "identity.onnx"
        path.write_bytes(identity(shape=("n", kilobytes * KILOBYTE // 4)))
        return self.register(model or model_of(kilobytes), path)

    def workers(self, count: int = 1, **settings: object) -> list[WorkerProcess]:
        """Start workers with the product's defaults, save for ``settings``; they end with the room."""
        self._fleets += 1
        fleet = Fleet(str(settings.pop("broker", self.url)), self.store, self.folder / f"fleet-{self._fleets}")
        self._stack.callback(fleet.stop)
        fleet.start(count, **{"memory": "2GiB", **AS_DELIVERED, **settings})
        return fleet.workers

    def spawn(
        self, command: Sequence[str], *, ready: str | None = None, environment: dict[str, str] | None = None
    ) -> int:
        """Start a worker that is not ours; its process id. Waits for the line ``ready`` of its output, if any."""
        log = self.folder / f"other-{len(list(self.folder.glob('other-*')))}.log"
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            stdout=subprocess.PIPE if ready else log.open("wb"),
            stderr=log.open("ab"),
        )
        self._stack.callback(_end, child)
        if ready:
            assert child.stdout is not None
            line = child.stdout.readline().decode().strip()
            if line != ready:
                raise SystemExit(f"expected {ready!r} of {command}, found {line!r}: {log.read_text()[-2000:]}")
        return child.pid

    def client(
        self,
        module: str,
        worker: Sequence[int],
        *,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        seconds: float = 120.0,
        **flags: object,
    ) -> dict[str, float]:
        """Run a client to its end; its figures (see ``drive``)."""
        command = [python, "-W", "ignore", "-m", module, "--url", self.url, "--broker", str(self.broker_pid)]
        if worker:
            command += ["--worker", ",".join(map(str, worker))]
        for flag, value in flags.items():
            if value is True:
                command.append(f"--{flag}")
            elif value is not False:
                command += [f"--{flag}", str(value)]
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            capture_output=True,
            timeout=seconds,
            check=False,
        )
        lines = [line for line in ended.stdout.decode().splitlines() if line.startswith("{")]
        if ended.returncode or not lines:
            raise RuntimeError(f"{module} failed: {ended.stderr.decode()[-2000:]}")
        found: dict[str, Any] = json.loads(lines[-1])
        return found


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
