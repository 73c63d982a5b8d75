"""Traces of single jobs by OpenTelemetry: the extra ``otel``, and the setting ``traces``.

One trace from the caller's ``call`` or ``publish`` over ``job`` here, with its ``queue``, ``load`` (if it waited for
one), ``wait``, ``run`` and ``reply``. A run that several jobs share is a ``batch``, with links to them and back.
The context travels in the W3C header ``traceparent`` of the AMQP message. Spans are made after the fact, from times
that are taken anyway; a job that nobody traces costs a look at None.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

from qworker.errors import ConfigError, QworkerError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, SpanContext, TracerProvider

OFF: Final = "off"
OTLP: Final = "otlp"
FILE: Final = "file:"
SERVICE: Final = "qworker"

P = ParamSpec("P")
T = TypeVar("T")


class Traces:
    """The traces of a worker's jobs. Owned here, on the event loop: the jobs in hand that are traced."""

    def __init__(self, provider: TracerProvider, close: Callable[[], None] = lambda: None) -> None:
        self._tracer = provider.get_tracer(SERVICE)
        self._jobs: WeakValueDictionary[str, JobTrace] = WeakValueDictionary()
        self.close = close
        """Export what is left. Blocks."""

    def begin(
        self, model: str, job_id: str, headers: Mapping[str, Any], published: float | None, received: float
    ) -> JobTrace | None:
        """The trace of a job that has just come; None where nobody wants one. Times are unix seconds."""
        from opentelemetry.trace import SpanKind

        since = received if published is None else min(published, received)
        span = self._tracer.start_span(
            "job", _context_of(headers), SpanKind.CONSUMER, {"qworker.model": model}, start_time=_ns(since)
        )
        if not span.is_recording():
            return None
        trace = JobTrace(self, span, since, received)
        trace.known_as(job_id)
        return trace

    def batch(self, model: str, ended: float, seconds: float, rows: int, job_ids: Sequence[str]) -> None:
        """Jobs have shared a run. Before their ``ran``."""
        from opentelemetry.trace import Link

        members = [trace for job_id in job_ids if (trace := self._jobs.get(job_id)) is not None]
        if not members:
            return
        span = self._tracer.start_span(
            "batch",
            _no_parent(),
            attributes={"qworker.model": model, "qworker.rows": rows, "qworker.jobs": len(job_ids)},
            links=[Link(trace.context) for trace in members],
            start_time=_ns(ended - seconds),
        )
        span.end(_ns(ended))
        for trace in members:
            trace.batches.append(span.get_span_context())

    # --- for JobTrace ----------------------------------------------------------------------------

    def name(self, job_id: str, trace: JobTrace) -> None:
        self._jobs[job_id] = trace

    def child(self, parent: Span, name: str, start: float, end: float, links: Sequence[SpanContext] = ()) -> None:
        from opentelemetry.trace import Link, set_span_in_context

        span = self._tracer.start_span(
            name, set_span_in_context(parent), links=[Link(context) for context in links], start_time=_ns(start)
        )
        span.end(_ns(max(start, end)))


class JobTrace:
    """One job's, from its coming to its settling."""

    __slots__ = ("__weakref__", "_done_at", "_received", "_since", "_span", "_traces", "batches")

    def __init__(self, traces: Traces, span: Span, since: float, received: float) -> None:
        self._traces = traces
        self._span = span
        self._since = since
        self._received = received
        self._done_at = received
        self.batches: list[SpanContext] = []

    @property
    def context(self) -> SpanContext:
        return self._span.get_span_context()

    def known_as(self, job_id: str) -> None:
        """``job_id``: what ``Traces.batch`` will call it."""
        if job_id:
            self._span.set_attribute("messaging.message.id", job_id)
            self._traces.name(job_id, self)

    def ran(self, wait: float, run: float, hot_since: float, load_seconds: float | None) -> None:
        """The job has just run. ``load_seconds``: of the load that it waited for, which ended at ``hot_since``."""
        now, child = time.time(), self._traces.child
        child(self._span, "queue", self._since, self._received)
        if load_seconds is not None:
            child(self._span, "load", max(self._since, hot_since - load_seconds), hot_since)
        child(self._span, "wait", now - run - wait, now - run)
        child(self._span, "run", now - run, now, self.batches)
        self._done_at = now

    def ends(self, verdict: object) -> None:
        """The answer is on its way."""
        self._done_at = time.time()
        if isinstance(verdict, QworkerError):
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, verdict.code))
            self._span.set_attribute("error.type", verdict.code)

    def settled(self) -> None:
        """The delivery is out of our hands."""
        now = time.time()
        self._traces.child(self._span, "reply", self._done_at, now)
        self._span.end(_ns(now))


class ClientTraces:
    """The traces of a caller's calls, children of whatever span is the current one."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer(SERVICE)

    async def around(self, name: str, model: str, work: Awaitable[T]) -> T:
        """``work`` in a span of its own."""
        from opentelemetry.trace import SpanKind

        with self._tracer.start_as_current_span(name, kind=SpanKind.PRODUCER, attributes={"qworker.model": model}):
            return await work

    def inject(self, headers: MutableMapping[str, Any]) -> None:
        """Put the current span's context into a message's headers."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)


class _Traced(Protocol):
    traces: ClientTraces | None


S = TypeVar("S", bound=_Traced)


def traced(
    method: Callable[Concatenate[S, str, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, str, P], Coroutine[Any, Any, T]]:
    """Run a client's method, whose first argument is the model, in a span of its name, where the client has traces."""
    name = method.__name__

    @wraps(method)
    def run(self: S, model: str, *args: P.args, **more: P.kwargs) -> Coroutine[Any, Any, T]:
        work = method(self, model, *args, **more)
        return work if self.traces is None else self.traces.around(name, model, work)

    return run


def client_traces(wanted: TracerProvider | bool) -> ClientTraces | None:
    """``True`` is the provider that the program has set. Raises ConfigError where OpenTelemetry is missing."""
    if wanted is False:
        return None
    if wanted is not True:
        return ClientTraces(wanted)
    try:
        from opentelemetry.trace import get_tracer_provider
    except ImportError as exc:
        raise ConfigError(_MISSING) from exc
    return ClientTraces(get_tracer_provider())


def worker_traces(wanted: str, worker: str) -> Traces | None:
    """What the setting ``traces`` asks for. Sampling, endpoint and the like come from OpenTelemetry's own variables.

    Raises ConfigError where a package is missing or the file cannot be written.
    """
    if wanted == OFF:
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(wanted)
    except ImportError as exc:
        raise ConfigError(_MISSING) from exc
    provider = TracerProvider(
        resource=Resource.create({"service.name": SERVICE, "service.instance.id": worker}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider, provider.shutdown)


_MISSING: Final = "traces need OpenTelemetry, which is not installed: pip install 'qworker[otel]'"


def _exporter(wanted: str) -> SpanExporter:
    if wanted == OTLP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    path = Path(wanted.removeprefix(FILE))
    try:
        out = path.open("a", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"traces: {path} cannot be written ({exc.strerror})") from exc
    return ConsoleSpanExporter(out=out, formatter=lambda span: json.dumps(json.loads(span.to_json())) + "\n")


def _context_of(headers: Mapping[str, Any]) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: _text(headers[name]) for name in ("traceparent", "tracestate") if name in headers}
    return TraceContextTextMapPropagator().extract(carrier, _no_parent())


def _no_parent() -> Context:
    from opentelemetry.context import Context

    return Context()


def _text(value: object) -> str:
    """Some clients send text as bytes."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
