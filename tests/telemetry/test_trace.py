"""What tracing costs those who do not want it, and what becomes of bad headers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from qworker.errors import ConfigError, InvalidInput
from qworker.telemetry.trace import Traces, client_traces, traced, worker_traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_nothing_of_opentelemetry_is_imported_unasked() -> None:
    """Neither the worker's modules nor the client's need the extra, or wait for it."""
    code = "import sys, qworker, qworker.cli.main; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert worker_traces("off", "w") is None
    assert client_traces(False) is None


async def test_a_client_without_traces_runs_its_method_itself() -> None:
    """The very coroutine, not one around it."""

    class Plain:
        traces = None

        @traced
        async def call(self, model: str, times: int = 1) -> str:
            return model * times

    work = Plain().call("ab", times=2)
    assert work.__name__ == "call"
    assert await work == "abab"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ConfigError, match=r"qworker\[otel\]"):
        worker_traces("otlp", "w")
    with pytest.raises(ConfigError, match=r"qworker\[otel\]"):
        client_traces(True)


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    """Not at the first job."""
    with pytest.raises(ConfigError, match="cannot be written"):
        worker_traces(f"file:{tmp_path}/no/such/folder", "w")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Traces:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Traces(provider)


@pytest.mark.parametrize("parent", [PARENT, PARENT.encode()])
def test_the_parent_is_the_one_of_the_header(traces: Traces, exporter: InMemorySpanExporter, parent: Any) -> None:
    """As text, or as bytes, as some clients send it; the current span of this process is not in the way."""
    now = time.time()
    job = traces.begin("m", "1", {"traceparent": parent}, now - 2, now - 1)
    assert job is not None
    job.ends(InvalidInput("bad"))
    job.settled()
    reply, span = exporter.get_finished_spans()
    assert (reply.name, span.name) == ("reply", "job")
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert span.start_time == int((now - 2) * 1e9)
    assert not span.status.is_ok


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-zz-1"}, {"traceparent": 7}, {"traceparent": b"\xff\xfe"}])
def test_a_header_that_is_none_starts_a_trace_of_its_own(traces: Traces, headers: dict[str, Any]) -> None:
    """Whatever others write there, the job runs."""
    job = traces.begin("m", "1", headers, None, time.time())
    assert job is not None
    assert job.context.trace_id != 0x0AF7651916CD43DD8448EB211C80319C


def test_a_job_that_is_not_sampled_is_not_traced(traces: Traces) -> None:
    """The parent decides, else the sampler."""
    assert traces.begin("m", "1", {"traceparent": PARENT[:-1] + "0"}, None, time.time()) is None
    none = Traces(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    assert none.begin("m", "1", {}, None, time.time()) is None


def test_a_batch_forgets_jobs_that_are_gone(traces: Traces, exporter: InMemorySpanExporter) -> None:
    """Nobody has to tell that a job is over: what is not referenced any more is no member."""
    job = traces.begin("m", "here", {}, None, time.time())
    traces.begin("m", "gone", {}, None, time.time())
    assert job is not None
    traces.batch("m", time.time(), 0.1, 2, ["here", "gone", "never"])
    [span] = exporter.get_finished_spans()
    assert [link.context for link in span.links] == [job.context]
    assert job.batches == [span.get_span_context()]
