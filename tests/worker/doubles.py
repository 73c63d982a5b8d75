"""A backend that the tests hold in their hands, and a network cable that they can pull."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from numpy.typing import NDArray

from qworker.broker.base import Connector
from qworker.config import Settings
from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend
from qworker.errors import InferenceFailed
from qworker.store.local import LocalStore
from qworker.wire.messages import Tensor
from qworker.wire.signature import Signature, TensorSpec
from qworker.worker.worker import Worker
from tests.support import leaks
from tests.support.waiting import wait_until

MIB = 1 << 20
GATE_SECONDS = 20.0


class Gate:
    """Open by default; whoever passes while it is shut waits, and ``passing`` tells how many do."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.passing = 0

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def go_through(self) -> None:
        self.passing += 1
        assert self._open.wait(GATE_SECONDS), "the test never opened the gate"
        self.passing -= 1


class EngineDouble:
    """y = x."""

    signature = Signature((TensorSpec("x", "FP32", (None, 3)),), (TensorSpec("y", "FP32", (None, 3)),))

    def __init__(self, backend: BackendDouble, model: str) -> None:
        self.model = model
        self.closed = False
        self._backend = backend

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[str] = ()) -> list[Tensor]:
        self._backend.running.go_through()
        if self.closed:
            raise InferenceFailed("closed")
        return [Tensor("y", "FP32", inputs[0].array)]

    def close(self) -> None:
        self._backend.closing.go_through()
        if not self.closed:
            self.closed = True
            self._backend.used -= self._backend.engine_bytes


class BackendDouble:
    """Engines of ``engine_bytes`` each, which load, run and close when the test lets them.

    ``load_seconds`` is what a load takes at least: where keys are compared, noise must not decide.
    ``load_error`` and ``warm_up_error`` are raised by the stages they name.
    """

    name = "double"

    def __init__(self) -> None:
        self.loading, self.running, self.closing = Gate(), Gate(), Gate()
        self.engines: list[EngineDouble] = []
        self.engine_bytes = 0
        self.used = 0
        self.load_seconds = 0.0
        self.load_error: Exception | None = None
        self.warm_up_error: Exception | None = None

    def load(self, source: ModelSource) -> EngineDouble:
        self.loading.go_through()
        time.sleep(self.load_seconds)
        if self.load_error is not None:
            raise self.load_error
        engine = EngineDouble(self, source.model)
        self.engines.append(engine)
        self.used += self.engine_bytes
        return engine

    def warm_up(self, engine: Any, sample: Mapping[str, NDArray[Any]] | None) -> bool:
        if self.warm_up_error is not None:
            raise self.warm_up_error
        return True

    def used_bytes(self) -> int:
        return self.used

    def trim(self) -> None: ...

    def open_all(self) -> None:
        for gate in (self.loading, self.running, self.closing):
            gate.open()


class Cable:
    """Stands between a worker and its broker. ``cut`` breaks the connections that run through it.

    ``mute`` keeps what the broker says on the ``n``-th connection of the present session from arriving: the
    first one consumes, the second one publishes. ``choke`` keeps what we say from leaving. ``break_in_silence``
    ends our side of all, and the broker is told nothing: it keeps the connections until it misses heartbeats.
    """

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._pairs: list[_Pair] = []
        self._ghosts: list[_Pair] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._plugged = asyncio.Event()
        self._plugged.set()

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self._pairs += self._ghosts
        self.cut()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    @property
    def url(self) -> str:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return self._target._replace(netloc=f"guest:guest@127.0.0.1:{port}").geturl()

    def cut(self) -> None:
        for pair in self._pairs:
            pair.release()
            pair.ours.transport.abort()
            pair.theirs.transport.abort()
        self._pairs.clear()

    def break_in_silence(self) -> None:
        for pair in self._pairs:
            pair.haunted = True
            pair.release()
            pair.ours.transport.abort()
        self._ghosts += self._pairs
        self._pairs.clear()

    def unplug(self) -> None:
        """Cut, and let no new connection through until ``plug``."""
        self._plugged.clear()
        self.cut()

    def plug(self) -> None:
        self._plugged.set()

    def mute(self, number: int) -> None:
        self._pairs[number].audible.clear()

    def choke(self, number: int) -> None:
        self._pairs[number].speaking.clear()

    def let_speak(self, number: int) -> None:
        self._pairs[number].speaking.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not self._plugged.is_set():
            writer.transport.abort()
            return
        assert self._target.hostname is not None
        far_reader, far_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        pair = _Pair(writer, far_writer)
        self._pairs.append(pair)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pipe(reader, far_writer, pair.speaking, pair))
            group.create_task(_pipe(far_reader, writer, pair.audible, pair))


class _Pair:
    """The two ends of one connection."""

    def __init__(self, ours: asyncio.StreamWriter, theirs: asyncio.StreamWriter) -> None:
        self.ours, self.theirs = ours, theirs
        self.audible, self.speaking = asyncio.Event(), asyncio.Event()
        self.haunted = False
        self.release()

    def release(self) -> None:
        self.audible.set()
        self.speaking.set()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, let: asyncio.Event, pair: _Pair) -> None:
    try:
        while chunk := await reader.read(65536):
            await let.wait()
            if pair.haunted:
                continue
            writer.write(chunk)
            await writer.drain()
    except OSError:
        pass
    finally:
        if not pair.haunted or writer is pair.ours:
            writer.transport.abort()


@asynccontextmanager
async def run_worker(
    connect: Callable[..., Connector],
    url: str,
    store: Path,
    backend: BackendDouble | None = None,
    *,
    leaves_bytes: bool = False,
    **settings: Any,
) -> AsyncIterator[Worker]:
    """A worker in this process, ready; stopped at the end, with nothing in its ledger."""
    quick: dict[str, Any] = {"sweep_interval": 0.3, "min_residency": 0, "max_cold_wait": 30, "memory": 64 * MIB}
    quick |= {"history": "off", "fleet_history": False}  # what one test loads is no business of the next one
    chosen = Settings(store=str(store), name="in-process", **{**quick, **settings})
    connector = connect(url, heartbeat=5, confirm_timeout=chosen.confirm_timeout)
    worker = Worker(chosen, connector, LocalStore(store), backend or OnnxBackend())
    if not leaves_bytes:
        leaks.register_ledger(lambda: worker.zone.held, "the worker")
    async with asyncio.TaskGroup() as tasks:
        life = tasks.create_task(worker.run())
        try:
            await wait_until(lambda: worker.not_ready() is None or life.done(), what="the worker is ready")
            yield worker
        finally:
            if backend is not None and not leaves_bytes:
                backend.open_all()
            worker.stop()


class Running(Protocol):
    """Starts a worker: ``run_worker`` on one of the broker implementations."""

    def __call__(
        self, url: str, store: Path, backend: BackendDouble | None = None, **more: Any
    ) -> AbstractAsyncContextManager[Worker]: ...


def step(worker: Worker, model: str) -> str | None:
    """Where the worker's claim on ``model`` stands."""
    return worker.state()["claims"].get(model)


def is_hot(worker: Worker, model: str) -> bool:
    return step(worker, model) == "serve"
