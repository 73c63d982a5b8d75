"""Settings of a worker, from one place, checked once.

Precedence: command-line flags > ``QWORKER_*`` variables > the TOML file (``--config`` or
``QWORKER_CONFIG``) > defaults. ``explain`` tells which of them each value came from.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import psutil
from pydantic import ByteSize, Field, PrivateAttr, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from qworker.errors import ConfigError

ENV_PREFIX = "QWORKER_"
CONFIG_VARIABLE = "QWORKER_CONFIG"
DEFAULT_BROKER = "amqp://guest:guest@127.0.0.1:5672/"

_MIB = 1 << 20
_MIN_DEFAULT_MEMORY = 256 * _MIB


def _half_of_free_memory() -> ByteSize:
    return ByteSize(max(_MIN_DEFAULT_MEMORY, psutil.virtual_memory().available // 2))


def _usable_cpus() -> int:
    """The CPUs this process may run on, which in a container is often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _host_and_pid() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


PositiveSize = Annotated[ByteSize, Field(gt=0)]
Budget = Annotated[ByteSize, Field(ge=_MIB)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """All settings of a worker, checked. Built by ``load_settings``; built directly, it reads nothing else.

    Times are seconds, sizes are bytes (``512MiB``, ``2GB`` or a plain number).
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    # --- where things are ---
    store: Annotated[str, Field(min_length=1)] = "models"
    """Folder or URL of the cold store."""
    broker: SecretStr = SecretStr(DEFAULT_BROKER)
    """``amqp://user:password@host:port/vhost``, or ``amqps://`` for TLS. Read it with ``broker_url``."""
    broker_username_file: Path | None = None
    broker_password_file: Path | None = None
    """Files that hold the credentials (mounted secrets); they win over those in the URL."""
    name: Annotated[str, Field(min_length=1, max_length=100)] = Field(default_factory=_host_and_pid)

    # --- tensors beside their messages ---
    blob_store: str | None = None
    """Absolute folder, or ``s3://bucket/prefix``: tensors that a message does not hold are read from there, and
    results are put there. Off when not set."""
    blob_stores_read: Annotated[tuple[str, ...], NoDecode] = ()
    """More of them, to read inputs from."""
    blob_limit: PositiveSize = ByteSize(8 * _MIB)
    """Bytes of tensors that stay in a message: the largest leave it until no more are left."""
    blob_ttl: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 86_400.0
    """A tensor in the store is removed this long after it was put there last. Longer than jobs may wait."""
    blob_quota: PositiveSize = ByteSize(10 << 30)
    """Bytes that the store may have in all."""
    blob_memory: PositiveSize = ByteSize(1 << 30)
    """Bytes of such tensors in memory at once; no job may have more."""

    # --- the hot zone ---
    backend: Literal["auto", "onnx", "tensorrt"] = "auto"
    """``auto``: TensorRT where there is a GPU, and ONNX for the models without a plan for it, else ONNX."""
    memory: Budget = Field(default_factory=_half_of_free_memory)
    """Budget of all hot models together. Default: half of the memory that is free now; on a GPU, all that is
    free of it less ``device_headroom``, which is also the most that it can be."""
    max_concurrent_loads: Annotated[int, Field(ge=1)] = 2
    min_residency: SecondsOrZero = 5.0
    """A model just loaded stays at least this long, unless one has waited for ``max_cold_wait``."""
    max_cold_wait: SecondsOrZero = 30.0
    thrash_brake: bool = True
    """While models push each other out, hold claims that evict for a moment, ``max_cold_wait`` at most."""
    group_window: SecondsOrZero = 0.0
    """Hold every claim that evicts for so long, so that its jobs come in runs; 0: none."""
    load_headroom: PositiveSize = ByteSize(256 * _MIB)
    """What loads in progress may take together beyond the budget; one that needs more runs alone."""
    load_timeout: Seconds = 300.0
    rehearse_loads: bool = False
    """Load each ONNX build in a child process before its first load here: one that crashes or fails there is refused,
    and this worker lives. For models of strangers; costs half a second and more, once a build."""
    claim_timeout: Seconds = 120.0
    """How long a claim waits for bytes before it gives its lease back."""
    eviction: Literal["gdsf", "rate", "lru", "s3fifo"] = "gdsf"
    history: Annotated[str, Field(min_length=1)] = "auto"
    """File that keeps over restarts what was asked for and what loads cost, with a journal beside it; ``off``: none.
    ``auto``: one for each name, store and broker, in the state folder of the service or the user."""
    fleet_history: bool = True
    """Share the minutes of each model with the other workers, by a stream on the broker that new ones read."""
    warm_start: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Part of the budget that a start fills with what the history says is dearest, in the background; 0: none."""
    preload: Literal["off", "auto"] = "off"
    """``auto``: each day a process of low priority tests on the history whether preloading into free bytes would have
    paid, and writes a plan beside it, which the worker follows if so; needs ``history``. See docs/forecast.md."""
    pin: Annotated[tuple[str, ...], NoDecode] = ()
    """Models that are never evicted once loaded."""
    pin_quota: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Share of the budget that pins by an operator's order may keep."""
    placement: Literal["ready", "random"] = "ready"
    """Which worker takes up a cold model: ``ready``, the one with most room for it and no loads that wait; ``random``,
    the next one in turn."""
    max_replicas: Annotated[int, Field(ge=1)] = 1
    """Workers that may serve one model at once: others join when its backlog grows, and leave when it is gone."""
    replica_backlog: Seconds = 5.0
    """Seconds of work in a model's queue above which it asks for one more replica."""
    replica_linger: SecondsOrZero = 60.0
    """How long a replica stays whose share the others could carry."""

    # --- the GPU ---
    device: Annotated[str, Field(pattern=r"^(all|[0-9]{1,3}|(GPU|MIG)-[0-9A-Za-z/-]+)$")] = "0"
    """Number, or UUID of a GPU or of a MIG slice; ``all``: a worker process for each of them."""
    device_headroom: PositiveSize | None = None
    """Device memory that models do not get. Default: a twentieth of it, at least 512 MiB."""
    host_memory: Budget = Field(default_factory=_half_of_free_memory)
    """Budget of the models that run on ONNX beside a GPU. Default: half of the memory that is free now."""
    lanes: Annotated[int, Field(ge=1, le=64)] = 2
    """Executions at once on the device."""
    arena: Literal["shared", "private"] = "shared"
    """Whether plans share their scratch memory, inputs and outputs, a block for each lane."""
    arena_memory: PositiveSize | None = None
    """Bytes of the shared arena. Default: what the largest plan in the store needs; a quarter of the budget at most."""
    cuda_graphs: bool = False
    """Try CUDA graphs for shapes that come again, and keep those that are faster."""
    trust_lean_runtimes: bool = False
    """Take plans that bring a runtime of their own, which is code that runs on this host."""
    poison_book: Path | None = None
    """File that remembers by fingerprint which inputs broke the device; those that did so twice are refused."""

    # --- running jobs ---
    prefetch: Annotated[int, Field(ge=1, le=1000)] = 8
    """Deliveries in hand per model."""
    threads: Annotated[int, Field(ge=1)] = Field(default_factory=_usable_cpus)
    """Threads that run engines."""
    intra_op_threads: Annotated[int, Field(ge=0)] = 1
    """Threads within one run of one engine; 0: as its card advises, where more were measured to be faster."""
    batch_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Part of one thread's time for jobs of ``qworker.batch`` while online jobs never cease; in gaps they take all
    threads."""
    max_queue_delay: SecondsOrZero = 0.002
    """How long a job may wait for others to share its run, where that is expected to pay."""
    max_attempts: Annotated[int, Field(ge=1, le=20)] = 5
    """Runs of a job whose answer cannot be sent, or which break the device, before it is dead-lettered."""
    max_crashes: Annotated[int, Field(ge=2, le=20)] = 3
    """Workers that one job may end. After the first it runs alone; after the last it is dead-lettered as poison."""
    max_load_crashes: Annotated[int, Field(ge=2, le=20)] = 4
    """Workers in a row that may end while they load one build before its jobs are refused. From the second on its
    loads are put off, and its jobs wait."""
    max_body: PositiveSize = ByteSize(16 * _MIB)
    """Largest message taken or sent. RabbitMQ 4 takes 16 MiB unless it is told otherwise."""
    grace: SecondsOrZero = 30.0
    """Time to finish the jobs in hand when asked to stop."""

    # --- the broker ---
    data_plane: Literal["fast", "aio-pika"] = "fast"
    """``fast`` parses AMQP frames in place; ``aio-pika`` is the reference that it is measured against."""
    event_loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    """``auto`` is uvloop where it is installed (the extra ``[fast]``), else asyncio's own."""
    queue_type: Literal["quorum", "classic"] = "quorum"
    heartbeat: Annotated[int, Field(ge=5, le=60)] = 10
    confirm_timeout: Seconds = 30.0
    """How long a publish waits for the broker's confirm before the session is given up."""
    consumer_timeout: Seconds = 1800.0
    """The broker's own setting of that name, which AMQP does not tell: how long a job may be held. Fewer jobs are taken
    in hand where they would be held for longer."""
    sweep_interval: Annotated[float, Field(ge=0.1, le=3600)] = 3.0

    # --- telemetry ---
    watchdog: SecondsOrZero = 60.0
    """An event loop that stands still for this long ends the process; 0: it does not."""
    http_host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of health and metrics; 0 takes a free one; off when not set."""
    metrics_models: Annotated[int, Field(ge=0, le=1000)] = 20
    """Models that have metrics of their own, the busiest ones; the others are added up as ``other``."""
    traces: Annotated[str, Field(pattern=r"^(off|otlp|file:.+)$")] = "off"
    """Traces of single jobs: ``otlp`` (to where OpenTelemetry's own variables say) or ``file:PATH``, a span a line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"
    """``auto`` is ``console`` on a terminal and ``json`` elsewhere."""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict[str, str])

    @property
    def sources(self) -> dict[str, str]:
        """Setting → where its value came from; what is not in it is a default."""
        return self._sources

    @property
    def broker_url(self) -> str:
        """The broker's URL with its password, for the connector alone."""
        return self.broker.get_secret_value()

    @property
    def history_file(self) -> Path | None:
        """Where the history is kept, or None."""
        if self.history in ("off", "auto"):
            return None if self.history == "off" else self._automatic_history()
        return Path(self.history)

    def _automatic_history(self) -> Path | None:
        """A file of its own for each worker of this host: by its name, less the number of its process."""
        folder = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]  # systemd's
        if not folder:
            home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
            folder = os.path.join(home, "qworker")
        if not os.path.isabs(folder):
            return None  # a process without a home
        where = urlsplit(self.broker_url)
        world = f"{os.path.abspath(self.store)} {where.hostname}:{where.port}{where.path}"
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", self.name.removesuffix(f"-{os.getpid()}"))
        return Path(folder) / f"{name}-{zlib.crc32(world.encode()):08x}.json"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # ``load_settings`` reads and merges, since it has to remember where each value came from.
        return (init_settings,)

    @field_validator("broker", mode="after")
    @classmethod
    def _is_amqp_url(cls, value: SecretStr) -> SecretStr:
        try:
            url = urlsplit(value.get_secret_value())
            usable = url.scheme in ("amqp", "amqps") and bool(url.hostname) and url.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError("expected a URL like amqp://user:password@host:5672/vhost (amqps:// for TLS)")
        return value

    @field_validator(
        "log_level",
        "log_format",
        "eviction",
        "queue_type",
        "backend",
        "data_plane",
        "event_loop",
        "arena",
        mode="before",
    )
    @classmethod
    def _any_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("pin", "blob_stores_read", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @model_validator(mode="after")
    def _credentials_come_in_pairs(self) -> Settings:
        if (self.broker_username_file is None) != (self.broker_password_file is None):
            raise ValueError("expected broker_username_file and broker_password_file together, found only one of them")
        return self


def load_settings(flags: Mapping[str, object] | None = None, config_file: str | Path | None = None) -> Settings:
    """The settings from all sources, checked. Flags that are None count as not given.

    Raises ConfigError that names each wrong setting, what was expected, what was found and where it
    came from.
    """
    merged: dict[str, object] = {}
    sources: dict[str, str] = {}
    for values, source_of in (_from_toml(config_file), _from_environment(), _from_flags(flags or {})):
        for name, value in values.items():
            merged[name] = value
            sources[name] = source_of.format(flag="--" + name.replace("_", "-"), variable=ENV_PREFIX + name.upper())
    try:
        settings = Settings(**merged)  # pyright: ignore[reportArgumentType]  # checked by pydantic right here
    except ValidationError as exc:
        raise ConfigError("\n".join(_describe(exc, merged, sources))) from None  # the original would show values
    settings.sources.update(sources)
    return settings


class Explained(NamedTuple):
    """One setting as ``qworker doctor`` shows it; passwords are masked."""

    name: str
    value: str
    source: str


def explain(settings: Settings) -> list[Explained]:
    """Each setting with its value, secrets masked, and the source that it came from."""
    return [
        Explained(name, _shown(name, getattr(settings, name)), settings.sources.get(name, "default"))
        for name in Settings.model_fields
    ]


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """``QWORKER_*`` variables that set nothing: slips of the pen, or an orchestrator's own.

    They are no error: Kubernetes injects ``QWORKER_PORT`` and the like beside a service named qworker.
    """
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | {CONFIG_VARIABLE}
    return sorted(
        name
        for name in (os.environ if environ is None else environ)
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    )


def redact_url(url: str) -> str:
    """The URL with its secrets masked, fit for logs and messages.

    Masks up to the last ``@``, not as a parser would: a password with a stray ``/`` in it does not
    parse as one, and must not be shown either.
    """
    url = re.sub(r"^([^:/@]*://)?([^:/@]*):.*@", r"\1\2:***@", url, flags=re.DOTALL)
    return re.sub(r"([?&][^=&]*(?:password|secret|token|key)[^=&]*=)[^&]*", r"\1***", url, flags=re.IGNORECASE)


def _from_flags(flags: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    given = {name: value for name, value in flags.items() if value is not None}
    _refuse_unknown(given, "the command line")
    return given, "{flag}"


def _from_environment() -> tuple[Mapping[str, object], str]:
    return EnvSettingsSource(Settings)(), "{variable}"


def _from_toml(config_file: str | Path | None) -> tuple[Mapping[str, object], str]:
    named = config_file if config_file is not None else os.environ.get(CONFIG_VARIABLE) or None
    if named is None:
        return {}, ""
    where = "--config" if config_file is not None else CONFIG_VARIABLE
    path = Path(named)
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}, given by {where}: {exc.strerror}; correct the path or drop it") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}, given by {where}, is not TOML: {exc}") from exc
    _refuse_unknown(values, str(path))
    return values, str(path).replace("{", "{{").replace("}", "}}")


def _refuse_unknown(names: Iterable[str], source: str) -> None:
    problems: list[str] = []
    for name in names:
        if name in Settings.model_fields:
            continue
        near = difflib.get_close_matches(name.replace("-", "_").lower(), Settings.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(Settings.model_fields))}"
        problems.append(f"{name}: no such setting (from {source}); {hint}")
    if problems:
        raise ConfigError("\n".join(problems))


def _describe(error: ValidationError, values: Mapping[str, object], sources: Mapping[str, str]) -> list[str]:
    """One line a wrong setting, in place of pydantic's block."""
    lines: list[str] = []
    for detail in error.errors(include_url=False, include_context=False):
        text = detail["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        if detail["type"].startswith("byte_size"):
            text = "expected a size like 512MiB or 2GB, or a number of bytes"
        if not detail["loc"]:
            lines.append(text)
            continue
        name = str(detail["loc"][0])
        line = f"{name}: {text}, found {_shown(name, values.get(name))!r} (from {sources.get(name, 'default')})"
        if line not in lines:
            lines.append(line)
    return lines


def _shown(name: str, value: object) -> str:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, ByteSize):
        return value.human_readable() if value % 1024 == 0 else str(int(value))
    if isinstance(value, (tuple, list)):
        return ",".join(str(part) for part in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if value is None:
        return "-"
    return redact_url(str(value)) if name in ("broker", "store") else str(value)
