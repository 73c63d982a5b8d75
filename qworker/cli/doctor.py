"""``qworker doctor``: what is right and wrong here, and what to do about it."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

import psutil
import typer
from rich.console import Console
from rich.table import Table

from qworker.api import connector_for
from qworker.broker.base import Delivery, Properties, Session
from qworker.config import Explained, Settings, explain, load_settings, redact_url, unknown_variables
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable, ConfigError, QworkerError, StoreError
from qworker.store.local import LocalStore
from qworker.wire.topology import Queue, static_topology

Status = Literal["ok", "warn", "fail"]

_PACKAGES = ("qworker", "aio-pika", "aiormq", "msgspec", "numpy", "onnxruntime", "pydantic")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_ROUND_TRIP_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``advice`` says what to do where the status is not ok."""

    check: str
    status: Status
    found: str
    advice: str = ""


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to the command line."""
    app.command("doctor")(doctor)


def doctor(
    store: Annotated[str | None, typer.Option(help="The cold store [QWORKER_STORE]")] = None,
    broker: Annotated[str | None, typer.Option(help="amqp(s)://user:password@host:port/vhost [QWORKER_BROKER]")] = None,
    memory: Annotated[str | None, typer.Option(help="The budget of a worker, e.g. 512MiB [QWORKER_MEMORY]")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with settings [QWORKER_CONFIG]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check versions, settings, broker, store, device and memory; say what to do about each finding.

    Declares qworker's exchanges and shared queues, which workers declare anyway. Exit code 1 when
    something would keep a worker from running.
    """
    findings = [*check_versions()]
    settings: Settings | None = None
    try:
        settings = load_settings({"store": store, "broker": broker, "memory": memory}, config)
    except ConfigError as exc:
        findings += [
            Finding("settings", "fail", line, "correct it where it came from") for line in str(exc).split("\n")
        ]
    else:
        findings += [*check_variables(unknown_variables()), *asyncio.run(check_broker(settings))]
        findings += [*check_store(settings.store), *check_device()]
        findings.append(check_memory(int(settings.memory), psutil.virtual_memory().available, memory_limit()))
    shown = explain(settings) if settings is not None else []
    if as_json:
        _print_json(findings, shown)
    else:
        _print_tables(findings, shown)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


# --- the process ----------------------------------------------------------------------------------


def check_versions() -> Iterator[Finding]:
    """The interpreter and the packages that a worker runs on."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    found: list[str] = []
    missing: list[str] = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    yield Finding("packages", "ok", ", ".join(found))
    if missing:
        yield Finding("packages", "warn", f"not installed: {', '.join(missing)}", "pip install qworker")


def check_variables(unknown: list[str]) -> Iterator[Finding]:
    """``QWORKER_*`` variables that set nothing."""
    if unknown:
        yield Finding(
            "settings",
            "warn",
            f"variables that set nothing: {', '.join(unknown)}",
            "correct the name, or ignore this where an orchestrator sets them",
        )


def check_memory(budget: int, available: int, limit: int) -> Finding:
    """The budget against what the machine, or the container, has."""
    found = f"budget {_mib(budget)}, available now {_mib(available)}, limit {_mib(limit)}"
    if budget > limit:
        return Finding(
            "memory", "fail", found, "lower --memory: the process would be killed before the budget is reached"
        )
    if budget > available:
        return Finding(
            "memory", "warn", found, "lower --memory, or stop what else uses memory before the hot zone fills"
        )
    return Finding("memory", "ok", found)


def memory_limit() -> int:
    """The machine's memory, or the container's where that is less."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total


def check_device() -> Iterator[Finding]:
    """Whether a GPU and its libraries are here. Nothing is imported: that alone can take seconds."""
    present = [name for name in ("tensorrt", "cuda", "pynvml") if find_spec(name) is not None]
    card = any(Path("/dev").glob("nvidia[0-9]*"))
    if card and {"tensorrt", "cuda"} <= set(present):
        text = f"a GPU, and {', '.join(present)}; workers run the plans that it takes, and ONNX models on the CPU"
    elif card:
        text = "a GPU, but not qworker[gpu]; models run on the CPU"
    else:
        text = "no GPU; models run on the CPU"
    yield Finding("device", "ok", text)


# --- the store ------------------------------------------------------------------------------------


def check_store(place: str) -> Iterator[Finding]:
    """Whether models can be read from the store, and registered into it."""
    root = Path(place)
    if not root.is_dir():
        yield Finding(
            "store",
            "fail",
            f"{redact_url(place)} is not a folder",
            "correct --store, or register a first model: qworker models register model.onnx --store ...",
        )
        return
    try:
        models = LocalStore(root).models()
    except StoreError as exc:
        yield Finding("store", "fail", str(exc), "give this user read permission")
        return
    if models:
        yield Finding("store", "ok", f"{root}: {len(models)} model{'s' if len(models) > 1 else ''}")
    else:
        yield Finding("store", "warn", f"{root} has no models", "qworker models register model.onnx --store ...")
    try:
        with TemporaryFile(dir=root):
            pass
    except OSError as exc:
        yield Finding(
            "store",
            "warn",
            f"{root} cannot be written ({exc.strerror})",
            "nothing, where models are registered from elsewhere; a worker only reads",
        )
    else:
        yield Finding("store", "ok", f"{root} can be written")


# --- the broker -----------------------------------------------------------------------------------


async def check_broker(settings: Settings) -> list[Finding]:
    """Whether the broker is there, lets us in, and lets us declare, publish and consume."""
    shown = redact_url(settings.broker_url)
    started = time.perf_counter()
    try:
        session = await connector_for(settings, name="qworker-doctor").connect()
    except BrokerUnavailable as exc:
        return [Finding("broker", "fail", f"{shown}: {exc}", "start RabbitMQ (qworker broker), or correct --broker")]
    except QworkerError as exc:  # refused, or a credential file that cannot be read
        return [Finding("broker", "fail", f"{shown}: {exc}", "correct user, password or virtual host")]
    try:
        milliseconds = (time.perf_counter() - started) * 1000
        findings = [Finding("broker", "ok", f"{shown}: connected in {milliseconds:.0f} ms")]
        if session.blocked:
            findings.append(
                Finding("broker", "fail", "it takes no messages now", "free memory or disk on the broker (alarm)")
            )
        findings.append(await _check_topology(session, settings))
        findings.append(await _check_round_trip(session))
        return findings
    finally:
        await session.__aexit__(None, None, None)


async def _check_topology(session: Session, settings: Settings) -> Finding:
    try:
        await session.declare(*static_topology(settings.queue_type))
    except BrokerRefused as exc:
        return Finding("permissions", "fail", str(exc), "grant this user configure, write and read on ^qworker\\.")
    except BrokerUnavailable as exc:
        return Finding("broker", "fail", str(exc), "run this again; look into the broker's log if it stays so")
    except BrokerError as exc:
        return Finding("topology", "fail", str(exc), "use the same queue type everywhere, or another virtual host")
    return Finding("permissions", "ok", "may configure, and bind, qworker's exchanges and queues")


async def _check_round_trip(session: Session) -> Finding:
    """Publish to a queue of our own and consume it: what a reply needs."""
    queue = f"qworker.doctor.{uuid.uuid4().hex}"
    arrived: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()

    def take(delivery: Delivery) -> None:
        if not arrived.done():
            arrived.set_result(delivery)

    try:
        await session.declare(Queue(queue, durable=False, exclusive=True, auto_delete=True))
        consumer = await session.consume(queue, take, prefetch=1)
        started = time.perf_counter()
        async with asyncio.timeout(_ROUND_TRIP_LIMIT):
            await session.publish("", queue, b"", Properties())
            await (await arrived).ack()
        milliseconds = (time.perf_counter() - started) * 1000
        await consumer.close()
    except TimeoutError:
        return Finding(
            "round trip", "fail", f"no message came back within {_ROUND_TRIP_LIMIT:g} s", "look for an alarm in its log"
        )
    except BrokerError as exc:
        return Finding("round trip", "fail", str(exc), "grant write on the default exchange and read on ^qworker\\.")
    return Finding("round trip", "ok", f"a message came back in {milliseconds:.1f} ms")


# --- what is shown --------------------------------------------------------------------------------


def _print_json(findings: list[Finding], settings: list[Explained]) -> None:
    told: dict[str, Any] = {
        "ok": all(finding.status != "fail" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "settings": [row._asdict() for row in settings],
    }
    sys.stdout.write(json.dumps(told) + "\n")


def _print_tables(findings: list[Finding], settings: list[Explained]) -> None:
    console = Console(highlight=False, markup=False)
    table = Table("", "check", "found", "what to do", box=None)
    for finding in findings:
        table.add_row(finding.status, finding.check, finding.found, finding.advice)
    console.print(table)
    if settings:
        console.print()
        table = Table("setting", "value", "from", box=None)
        for row in settings:
            table.add_row(*row)
        console.print(table)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"
