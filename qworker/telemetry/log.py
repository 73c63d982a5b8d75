"""Structured logs: events named ``noun.verb`` (``events`` lists them) with key-values, never prose and never payloads.

JSON in production, readable on a terminal. Each line tells the worker, and the trace of the job where there is one.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import structlog

LogFormat = Literal["auto", "json", "console"]

BURST: Final = 50
"""Lines of one event about one model within ``WINDOW`` seconds; what is beyond is counted, and left out."""
WINDOW: Final = 10.0
_MOST_KEYS: Final = 10_000


def configure_logging(level: str, log_format: LogFormat, worker: str | None = None) -> None:
    """Send all logs, our own and the libraries', to standard error in one format. ``worker`` is on each line."""
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if worker is not None:
        shared.insert(0, _on_each_line(worker))
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[Repeats(), *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The AMQP libraries log whole message bodies of returned messages: payloads do not belong in a log.
    for name in ("aiormq", "aio_pika"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


class Repeats:
    """A processor that lets ``BURST`` lines of one event and model through in ``WINDOW`` seconds.

    The first line of the next window says how many were left out. Errors always pass. Any thread may call.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[object, object], tuple[float, int]] = {}  # window's start, lines in it

    def __call__(self, _logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if method in ("error", "critical", "exception"):
            return event
        key, now = (event.get("event"), event.get("model")), self._clock()
        with self._lock:
            began, lines = self._seen.get(key, (now, 0))
            if now - began >= WINDOW:
                if lines > BURST:
                    event["left_out"] = lines - BURST
                began, lines = now, 0
            if len(self._seen) >= _MOST_KEYS:
                self._seen.clear()
            self._seen[key] = (began, lines + 1)
        if lines >= BURST:
            raise structlog.DropEvent
        return event


def trace_of(headers: Mapping[str, Any]) -> dict[str, str]:
    """The trace id of a job's W3C ``traceparent`` header, as a field of a log line; nothing where there is none."""
    parent = headers.get("traceparent")
    if isinstance(parent, bytes):
        parent = parent.decode("ascii", "replace")
    if not isinstance(parent, str) or len(parent) < 55 or parent[2] != "-" or parent[35] != "-":
        return {}
    return {"trace_id": parent[3:35]}


def _on_each_line(worker: str) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("worker", worker)
        return event

    return add
