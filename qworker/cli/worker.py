"""``qworker worker``: serve models until told to stop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, cast

import typer

from qworker.app import loop_factory, run_worker
from qworker.cli.leaving import without_stuck_threads
from qworker.config import Settings, load_settings
from qworker.engine.tensorrt.devices import list_devices
from qworker.errors import DeviceLost, QworkerError
from qworker.supervise import supervise, worker_command
from qworker.telemetry.log import configure_logging

Flag = typer.Option

DEVICE_LOST: Final = 70
"""Exit code: the device is lost to this process, and a new one may do better."""


def register(app: typer.Typer) -> None:
    app.command("worker")(worker)


def worker(
    store: Annotated[str | None, Flag(help="Folder of the cold store.")] = None,
    broker: Annotated[str | None, Flag(help="amqp://user:password@host:port/vhost (amqps:// for TLS).")] = None,
    blob_store: Annotated[str | None, Flag(help="Folder or s3://bucket/prefix for large tensors.")] = None,
    broker_username_file: Annotated[Path | None, Flag(help="File that holds the user name.")] = None,
    broker_password_file: Annotated[Path | None, Flag(help="File that holds the password.")] = None,
    backend: Annotated[str | None, Flag(help="auto, onnx or tensorrt.")] = None,
    device: Annotated[str | None, Flag(help="GPU: number or UUID; all: a worker process for each.")] = None,
    memory: Annotated[str | None, Flag(help="Budget of all hot models together, e.g. 512MiB.")] = None,
    host_memory: Annotated[str | None, Flag(help="Budget of those on ONNX beside a GPU.")] = None,
    lanes: Annotated[int | None, Flag(help="Executions at once on the GPU.")] = None,
    arena: Annotated[str | None, Flag(help="shared or private scratch memory on the GPU.")] = None,
    cuda_graphs: Annotated[bool | None, Flag(help="Try CUDA graphs, keep those that are faster.")] = None,
    name: Annotated[str | None, Flag(help="Name of this worker in logs and dead letters.")] = None,
    max_concurrent_loads: Annotated[int | None, Flag(help="Cold loads at once.")] = None,
    min_residency: Annotated[float | None, Flag(help="Seconds that a model just loaded stays.")] = None,
    max_cold_wait: Annotated[float | None, Flag(help="Seconds after which a cold model outranks the brake.")] = None,
    group_window: Annotated[float | None, Flag(help="Seconds that a claim which evicts is held; 0: none.")] = None,
    claim_timeout: Annotated[float | None, Flag(help="Seconds that a claim waits for bytes.")] = None,
    load_headroom: Annotated[str | None, Flag(help="Bytes that loads may take beyond the budget.")] = None,
    load_timeout: Annotated[float | None, Flag(help="Seconds that a load may take.")] = None,
    eviction: Annotated[str | None, Flag(help="gdsf, rate, lru or s3fifo.")] = None,
    pin: Annotated[list[str] | None, Flag(help="Model that is never evicted. May be given again.")] = None,
    history: Annotated[str | None, Flag(help="File kept over restarts: what was asked for; auto or off.")] = None,
    fleet_history: Annotated[bool | None, Flag(help="Share history with the fleet, by a stream.")] = None,
    warm_start: Annotated[float | None, Flag(help="Part of the budget filled from it at a start; 0: none.")] = None,
    max_replicas: Annotated[int | None, Flag(help="Workers that may serve one model at once.")] = None,
    replica_backlog: Annotated[float | None, Flag(help="Seconds of backlog that ask for a replica.")] = None,
    replica_linger: Annotated[float | None, Flag(help="Seconds that a replica stays unneeded.")] = None,
    prefetch: Annotated[int | None, Flag(help="Jobs in hand per model.")] = None,
    threads: Annotated[int | None, Flag(help="Threads that run engines.")] = None,
    intra_op_threads: Annotated[int | None, Flag(help="Threads within one run; 0: as cards advise.")] = None,
    batch_share: Annotated[float | None, Flag(help="Share of a thread for batch jobs beside online ones.")] = None,
    max_queue_delay: Annotated[float | None, Flag(help="Seconds that a job may wait to share a run.")] = None,
    max_attempts: Annotated[int | None, Flag(help="Runs of a job whose answer cannot be sent.")] = None,
    max_crashes: Annotated[int | None, Flag(help="Workers that a job may end before it counts as poison.")] = None,
    max_load_crashes: Annotated[int | None, Flag(help="Workers that loads of a build may end before refusal.")] = None,
    grace: Annotated[float | None, Flag(help="Seconds to finish jobs in hand at a stop.")] = None,
    queue_type: Annotated[str | None, Flag(help="quorum or classic.")] = None,
    data_plane: Annotated[str | None, Flag(help="fast or aio-pika.")] = None,
    event_loop: Annotated[str | None, Flag(help="auto, asyncio or uvloop.")] = None,
    sweep_interval: Annotated[float | None, Flag(help="Seconds between two sweeps of all queues.")] = None,
    heartbeat: Annotated[int | None, Flag(help="Seconds between AMQP heartbeats.")] = None,
    consumer_timeout: Annotated[float | None, Flag(help="The broker's setting of that name, in seconds.")] = None,
    watchdog: Annotated[float | None, Flag(help="Seconds for which the event loop may stand; 0: any.")] = None,
    http_host: Annotated[str | None, Flag(help="Address of the health port.")] = None,
    http_port: Annotated[int | None, Flag(help="Health port; 0 takes a free one.")] = None,
    metrics_models: Annotated[int | None, Flag(help="Models that have metrics of their own.")] = None,
    traces: Annotated[str | None, Flag(help="off, otlp or file:PATH.")] = None,
    log_level: Annotated[str | None, Flag(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, Flag(help="auto, json or console.")] = None,
    config: Annotated[Path | None, Flag(help="TOML file with settings.")] = None,
) -> None:
    """Serve the models of a store to RabbitMQ: each one only while it is hot, within a memory budget."""
    flags: dict[str, Any] = {key: value for key, value in locals().items() if key != "config" and value is not None}
    try:
        settings = load_settings(flags, config)
        configure_logging(settings.log_level, settings.log_format, settings.name)
        if settings.device == "all" and settings.backend != "onnx":
            raise typer.Exit(_supervise(settings))
        with asyncio.Runner(loop_factory=loop_factory(settings.event_loop)) as runner, without_stuck_threads():
            runner.run(run_worker(settings))
    except QworkerError as error:
        _refuse([error])
    except BaseExceptionGroup as group:
        _end_if_device_lost(group)
        expected, unexpected = group.split(QworkerError)
        if unexpected is not None or expected is None:
            raise  # a fault of ours: the traceback belongs in the log
        _refuse(_leaves(expected))


def _supervise(settings: Settings) -> int:
    """A worker process for each device; the exit code."""
    command = worker_command(sys.argv[1:], settings.name, settings.http_port)
    return asyncio.run(supervise(list_devices(), command))


def _end_if_device_lost(group: BaseExceptionGroup[BaseException]) -> None:
    """End here where the device is what failed: its threads may never come back, and nobody can free anything."""
    lost = group.subgroup(DeviceLost)
    if lost is not None:
        typer.echo(f"qworker worker: {_leaves(lost)[0]}", err=True)
        sys.stderr.flush()
        os._exit(DEVICE_LOST)


def _refuse(errors: Sequence[BaseException]) -> NoReturn:
    for error in errors:
        typer.echo(f"qworker worker: {error}", err=True)
    raise typer.Exit(1)


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(cast("BaseExceptionGroup[Any]", error))
        else:
            found.append(error)
    return found
