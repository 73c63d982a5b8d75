"""Composition root of the worker: the file that names the adapters and wires them together."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import structlog

from qworker import __version__
from qworker.api import blobs_of, connector_for
from qworker.app_backends import Backends, open_backends
from qworker.broker.reference.session import AioPikaConnector
from qworker.build.rehearse import Rehearsal
from qworker.config import Settings
from qworker.errors import ConfigError
from qworker.telemetry.exposition import Exposition
from qworker.telemetry.http import Canary, HealthServer
from qworker.telemetry.trace import worker_traces
from qworker.wire.topology import Entity, QueueType, lane_topology, static_topology
from qworker.worker.worker import Worker

log = structlog.get_logger(__name__)


CLOSE_PATIENCE = 20.0
GC_THRESHOLDS = 20_000, 20, 50


async def run_worker(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once."""
    backends = await asyncio.to_thread(open_backends, settings)
    connector = connector_for(settings, settings.name)
    blobs = blobs_of(settings, memory=int(settings.blob_memory))
    rehearsal = Rehearsal(Path(settings.store), settings.intra_op_threads, settings.load_timeout)
    rehearse = rehearsal if settings.rehearse_loads else None
    worker = Worker(settings, connector, backends.store, backends.backend, backends.budgets, blobs, rehearse)
    traces = worker.counters.measures.traces = worker_traces(settings.traces, settings.name)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, _stop_once, worker, signum)
    async with AsyncExitStack() as stack:
        if blobs is not None:
            await stack.enter_async_context(blobs)
        if settings.http_port is not None:
            not_ready, state = _health(worker, backends)
            health = HealthServer(
                settings.http_host,
                settings.http_port,
                not_ready,
                state,
                metrics=await asyncio.to_thread(_metrics_page, settings, worker, backends),
                canary=Canary(backends.canary),
            )
            await stack.enter_async_context(health)
            log.info("http.listening", host=settings.http_host, port=health.port)
        log.info("worker.started", name=settings.name, store=settings.store, memory=worker.zone.budget)
        _collect_seldom()
        await worker.run()
        await _close(backends)
        if traces is not None:
            await asyncio.to_thread(traces.close)
    log.info("worker.stopped", name=settings.name)


async def _close(backends: Backends) -> None:
    """Free the device, if it lets us: a driver that hangs gives it back with the process."""
    closing = asyncio.get_running_loop().run_in_executor(None, backends.close)
    done, _ = await asyncio.wait({closing}, timeout=CLOSE_PATIENCE)
    if done:
        closing.result()
    else:
        log.warning("device.close_hangs", seconds=CLOSE_PATIENCE)


def _collect_seldom() -> None:
    """Look for cycles of garbage a thirtieth as often, and never again among what is there by now.

    A job makes some dozen objects and no cycles. Python's own thresholds look at them every 700 objects: that took a
    third of the path of a job. What has cycles here (tracebacks, parsed models) is small, and still found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def loop_factory(wanted: Literal["auto", "asyncio", "uvloop"]) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop, for ``asyncio.Runner``. Raises ConfigError where uvloop is wanted and missing."""
    if wanted == "asyncio":
        return None
    try:
        from uvloop import new_event_loop
    except ImportError as exc:
        if wanted == "auto":
            return None
        raise ConfigError("event_loop is uvloop, which is not installed: pip install 'qworker[fast]'") from exc
    return new_event_loop


def _health(worker: Worker, backends: Backends) -> tuple[Callable[[], str | None], Callable[[], dict[str, Any]]]:
    """Why the worker is not ready, and its state: with what its device has to say."""

    def not_ready() -> str | None:
        return backends.trouble() or worker.not_ready()

    def state() -> dict[str, Any]:
        told = worker.state()
        device = backends.report()
        return {**told, "ready": not_ready() is None, "reason": not_ready(), **({"device": device} if device else {})}

    return not_ready, state


def _metrics_page(
    settings: Settings, worker: Worker, backends: Backends
) -> Callable[[str], Awaitable[tuple[bytes, str]]]:
    """``/metrics``. What is measured of memory is what it has grown by since now. Blocks for a moment."""
    exposition = Exposition(
        worker.counters.measures,
        worker=settings.name,
        version=__version__,
        load_slots=settings.max_concurrent_loads,
        most_models=settings.metrics_models,
    )
    used_at_start = backends.used_bytes()

    async def page(accept: str) -> tuple[bytes, str]:
        used = await asyncio.to_thread(backends.used_bytes)
        grown = {kind: nbytes - used_at_start[kind] for kind, nbytes in used.items()}
        taken = exposition.take(worker.state(), grown, time.monotonic())
        return await asyncio.to_thread(taken.text, accept)

    return page


def _stop_once(worker: Worker, signum: int) -> None:
    worker.stop()
    asyncio.get_running_loop().remove_signal_handler(signum)


async def declare_models(
    broker: str,
    models: Sequence[str],
    queue_type: QueueType = "quorum",
    *,
    username_file: Path | None = None,
    password_file: Path | None = None,
) -> None:
    """Declare the topology and the queues of ``models``, so that jobs for them are kept from now on.

    The files, where there are some, hold the user and the password, in place of those in the URL.
    """
    entities: list[Entity] = list(static_topology(queue_type))
    for model in models:
        entities += lane_topology("jobs", model, queue_type)
    connector = AioPikaConnector(
        broker, name="qworker-register", username_file=username_file, password_file=password_file
    )
    async with await connector.connect() as session:
        await session.declare(*entities)
