"""Where a chaos run takes place: a private broker, a store, and real workers that are replaced when they die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from qworker.broker.node import PrivateNode
from qworker.config import Settings
from tests.chaos import models
from tests.chaos.shim import Shim, make_shim
from tests.e2e.fleet import Fleet, WorkerProcess
from tests.support.rabbitmq import rabbitmq_root
from tests.support.waiting import wait_until_sync

SAMPLE_SECONDS = 1.0
LEAVE_SECONDS = 60.0
WARM_SECONDS = 20.0
"""A worker's memory is compared with what it had after so long: libraries and pools are in place by then."""


@dataclass(slots=True)
class Life:
    """One worker process from the outside: what became of it, and its memory over time."""

    worker: WorkerProcess
    started: float
    ended_by_us: bool = False
    sizes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Seconds since the start, and RSS less the bytes that hot models hold."""

    def growth(self) -> int | None:
        """Bytes that it has grown by since it was warm; None for a short life."""
        warm = [size for at, size in self.sizes if at >= WARM_SECONDS]
        if len(warm) < 2 * 10:
            return None
        tenth = max(5, len(warm) // 10)
        return _middle(warm[-tenth:]) - _middle(warm[:tenth])


class Stage:
    """``open`` starts the broker, ``start`` the workers; after ``close`` all of it is gone."""

    def __init__(self, folder: Path, plane: str, *, mounts: bool, names: Sequence[str] = models.ALL) -> None:
        self.folder = folder
        self.plane = plane
        self.mounts = mounts
        self.lives: list[Life] = []
        self.crashes: list[str] = []
        self.names = tuple(names)
        self.store = folder / "store"
        self.node = PrivateNode(folder / "rabbitmq", root=rabbitmq_root())
        self.shim: Shim | None = None
        self.small_disk = False
        self._settings: dict[str, object] = {}
        self._told = threading.Event()
        self._lock = threading.RLock()
        self._watch = threading.Thread(target=self._keep_watch, daemon=True, name="watch")
        self._wanted = 0
        self._restoring = True

    # --- life ---

    def open(self) -> None:
        """Start the broker and fill the store."""
        self.node.start()
        self.store.mkdir(parents=True)
        if self.mounts:
            self.small_disk = _mount(self.store, models.STORE_BYTES)
        models.fill(self.store, self.names)
        self.shim = make_shim(self.folder, self.store)
        self.fleet = Fleet(self.url, self.store, self.folder / "workers")
        if self.shim is not None:
            self.fleet.environment |= self.shim.environment

    def close(self) -> None:
        """End and remove all of it, without looking."""
        self._told.set()
        if self._watch.is_alive():
            self._watch.join(10)
        for life in self.lives:
            if life.worker.alive:
                life.worker.kill()
        self.node.stop()
        if self.small_disk:
            subprocess.run(["umount", "-l", self.store], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return self.node.url

    def client_settings(self) -> Settings:
        plane: Any = self.plane
        return Settings(broker=self.url, data_plane=plane, confirm_timeout=10, heartbeat=10)

    # --- workers ---

    def start(self, count: int, **settings: object) -> None:
        """Start ``count`` workers, and from now on another one whenever one is gone."""
        self._settings = {"data_plane": self.plane, "memory": models.BUDGET, **settings}
        self._wanted = count
        for _ in range(count):
            self._one_more()
        for life in self.lives:
            try:
                life.worker.wait_ready(90)
            except OSError as error:  # it ended between two looks at it
                raise AssertionError(f"{life.worker.name} ended: {life.worker.text()[-3000:]}") from error
        self._watch.start()

    def kill(self, draw: float, *, serving: bool = False) -> str:
        """SIGKILL one of those that run (or, asked to, of those that have a model hot), and start another."""
        if serving:
            wait_until_sync(self.serving, 60, what="a worker serves")
        with self._lock:
            life = self._one_of(self.serving() if serving else [], draw)
            life.ended_by_us = True
            life.worker.kill()
            self._one_more()
        return life.worker.name

    def terminate(self, draw: float) -> str:
        with self._lock:
            life = self.pick(draw)
            life.ended_by_us = True
            life.worker.terminate()
            self._one_more()
        self._leave(life)
        return life.worker.name

    def _leave(self, life: Life) -> int:
        """Wait for the end of one that was told to stop; the bytes that its ledger still held then."""
        try:
            code: int | str = life.worker.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            code = f"nothing: killed after {LEAVE_SECONDS:g} s"
            life.worker.kill()
        drained = [line["held"] for line in life.worker.events("worker.drained")]
        # Python itself takes some of a second to start: who has not begun has nothing to give back, and just ends.
        unborn = code == -signal.SIGTERM and not life.worker.events("worker.started")
        if not unborn and (code != 0 or len(drained) != 1):
            self._crashed(life, f"told to stop, it ended with {code}, and said of its ledger: {drained}")
        return sum(drained)

    def pick(self, draw: float) -> Life:
        """One of those that run."""
        return self._one_of([], draw)

    def serving(self) -> list[Life]:
        """Workers with a model that is hot."""
        found: list[Life] = []
        for life in self._standing():
            with suppress(OSError, ValueError):
                if _listens(life.worker) and any(row["state"] == "hot" for row in life.worker.state()["models"]):
                    found.append(life)
        return found

    def _one_of(self, lives: list[Life], draw: float) -> Life:
        lives = lives or self._standing()
        return lives[min(len(lives) - 1, int(draw * len(lives)))]

    def _standing(self) -> list[Life]:
        return [life for life in self.lives if life.worker.alive and not life.ended_by_us]

    def live(self) -> list[WorkerProcess]:
        return [life.worker for life in self.lives if life.worker.alive]

    def states(self) -> list[dict[str, Any]]:
        """What the workers that answer say of themselves."""
        found: list[dict[str, Any]] = []
        for worker in self.live():
            with suppress(OSError, ValueError):
                if _listens(worker):
                    found.append(worker.state())
        return found

    def stop_workers(self) -> int:
        """Stop them in order; bytes that their ledgers still hold."""
        self._restoring = False
        self._told.set()
        self._watch.join(10)
        live = [life for life in self.lives if life.worker.alive]
        for life in live:
            life.ended_by_us = True
            life.worker.resume()
            life.worker.terminate()
        return sum(self._leave(life) for life in live)

    def log_faults(self) -> list[str]:
        """Signs of a bug in the logs of all workers that there were."""
        found: list[str] = []
        for life in self.lives:
            text = life.worker.text()
            for sign in ("Traceback", "was never retrieved", "was never awaited", "Unhandled"):
                if sign in text:
                    at = text.index(sign)
                    found.append(f"{life.worker.name}: {text[max(0, at - 600) : at + 3000]}")
                    break
        return found

    def count_events(self, event: str, **fields: object) -> int:
        return sum(len(life.worker.events(event, **fields)) for life in self.lives)

    def growth(self) -> int:
        """The most that a worker with a life of some length has grown by, in bytes."""
        return max([0, *(g for life in self.lives if (g := life.growth()) is not None)])

    # --- inside ---

    def _one_more(self) -> None:
        before = len(self.fleet.workers)
        self.fleet.start(1, wait=False, **self._settings)
        self.lives += [Life(worker, time.monotonic()) for worker in self.fleet.workers[before:]]

    def _keep_watch(self) -> None:
        """Replace who ended unasked (and remember that), and take everybody's size."""
        while not self._told.wait(SAMPLE_SECONDS):
            with self._lock:
                for life in list(self.lives):
                    if not life.worker.alive and not life.ended_by_us and self._restoring:
                        life.ended_by_us = True
                        self._crashed(life, f"it ended by itself with {life.worker.process.returncode}")
                        self._one_more()
            for life in list(self.lives):
                if life.worker.alive:
                    self._weigh(life)

    def _weigh(self, life: Life) -> None:
        with suppress(OSError, ValueError, psutil.Error):
            rss = psutil.Process(life.worker.process.pid).memory_info().rss
            if psutil.Process(life.worker.process.pid).status() != psutil.STATUS_STOPPED and _listens(life.worker):
                # Small models say that they take 16 MiB, and take next to nothing.
                rows = life.worker.state()["models"]
                real = sum(0 if row["model"] in models.SMALL else row["nbytes"] for row in rows)
                life.sizes.append((time.monotonic() - life.started, rss - real))

    def _crashed(self, life: Life, how: str) -> None:
        self.crashes.append(f"{life.worker.name}: {how}\n{life.worker.text()[-3000:]}")


def _listens(worker: WorkerProcess) -> bool:
    """Whether its port is known by now."""
    if not worker.port:
        found = worker.events("http.listening")
        worker.port = found[0]["port"] if found else 0
    return bool(worker.port)


def _mount(folder: Path, nbytes: int) -> bool:
    """A disk of that size in memory, in a mount namespace of our own (see ops/chaos)."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _middle(sizes: list[int]) -> int:
    return sorted(sizes)[len(sizes) // 2]


def fill_disk(folder: Path) -> Path:
    """Write a file until there is no room for one more byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x")
    assert os.statvfs(folder).f_bavail == 0, "the disk is not full"
    return filler
