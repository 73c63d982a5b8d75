"""One trace of a job over two processes: a caller here, a worker with a file of spans."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from qworker import Client
from qworker.errors import InvalidInput
from qworker.store.card import BatchingEntry
from qworker.store.local import LocalStore
from tests.e2e.fleet import Fleet

Span = dict[str, Any]


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    provider = TracerProvider(shutdown_on_exit=False)
    yield provider
    provider.shutdown()


@pytest.fixture
def mine(provider: TracerProvider) -> InMemorySpanExporter:
    """What this process has traced."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def spans_of(path: Path) -> list[Span]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def bare(number: str) -> str:
    return number.removeprefix("0x")


def test_one_trace_from_the_call_to_the_reply(
    fleet: Fleet, provider: TracerProvider, mine: InMemorySpanExporter, tmp_path: Path
) -> None:
    """A cold call: queue, load, wait, run and reply lie within the job, and the job within the call's trace."""
    path = tmp_path / "spans.jsonl"
    fleet.start(1, traces=f"file:{path}", log_format="json", log_level="info")

    async def calls() -> None:
        async with Client(fleet.url, traces=provider) as client:
            await client.call("echo", {"x": np.ones((2, 3), np.float32)})
            with pytest.raises(InvalidInput):
                await client.call("echo", {"y": np.ones((2, 3), np.float32)})
            await client.publish("echo", {"x": np.ones((2, 3), np.float32)})

    asyncio.run(calls())
    good, bad, published = mine.get_finished_spans()
    assert [span.name for span in (good, bad, published)] == ["call", "call", "publish"]
    [worker] = fleet.workers
    failed = worker.wait_event("job.failed")
    fleet.finish()
    spans = spans_of(path)

    def job_of(call: Any) -> Span:
        found = [s for s in spans if s["name"] == "job" and bare(s["parent_id"]) == f"{call.context.span_id:016x}"]
        assert len(found) == 1, spans
        assert bare(found[0]["context"]["trace_id"]) == f"{call.context.trace_id:032x}"
        return found[0]

    job = job_of(good)
    parts = {s["name"]: s for s in spans if s["parent_id"] == job["context"]["span_id"]}
    assert set(parts) == {"queue", "load", "wait", "run", "reply"}
    for part in parts.values():
        assert job["start_time"] <= part["start_time"] <= part["end_time"] <= job["end_time"]
    assert parts["queue"]["start_time"] <= parts["load"]["start_time"]
    assert parts["load"]["end_time"] <= parts["run"]["start_time"] <= parts["reply"]["start_time"]
    assert job["kind"] == "SpanKind.CONSUMER"
    assert job["attributes"]["qworker.model"] == "echo"
    assert job["resource"]["attributes"]["service.instance.id"] == worker.name

    assert job_of(bad)["status"] == {"status_code": "ERROR", "description": "invalid_input"}
    assert failed["trace_id"] == f"{bad.context.trace_id:032x}", "the log's lines tell the trace"
    assert job_of(published)["status"]["status_code"] == "UNSET"


def test_jobs_that_share_a_run_are_linked_to_it(
    fleet: Fleet, provider: TracerProvider, mine: InMemorySpanExporter, tmp_path: Path
) -> None:
    """The batch has a trace of its own, with a link to each member; each member's run links to the batch."""
    path = tmp_path / "spans.jsonl"
    allow_batches(fleet.store)
    fleet.start(1, traces=f"file:{path}", max_queue_delay=0.5, threads=1)

    async def calls() -> None:
        async with Client(fleet.url, traces=provider) as client:
            inputs = {"x": np.ones((1, 3), np.float32)}
            await client.call("echo", inputs)
            for _ in range(20):  # until some of them met
                await asyncio.gather(*(client.call("echo", inputs) for _ in range(16)))
                if fleet.counter("jobs_together"):
                    return

    asyncio.run(calls())
    fleet.finish()
    spans = spans_of(path)
    batches = [span for span in spans if span["name"] == "batch"]
    assert batches, "no jobs shared a run"
    jobs = {span["context"]["span_id"]: span for span in spans if span["name"] == "job"}
    runs = {span["parent_id"]: span for span in spans if span["name"] == "run"}
    for batch in batches:
        assert batch["parent_id"] is None
        members = [link["context"]["span_id"] for link in batch["links"]]
        assert len(members) == batch["attributes"]["qworker.jobs"] > 1
        for member in members:
            assert jobs[member]["context"]["trace_id"] != batch["context"]["trace_id"]
            links = [link["context"]["span_id"] for link in runs[member]["links"]]
            assert batch["context"]["span_id"] in links
    assert len(mine.get_finished_spans()) == len(jobs)


def allow_batches(store: Path) -> None:
    """Say in the card of ``echo`` that its rows may share a run, as registration would."""
    local = LocalStore(store)
    card = local.card("echo")
    path = local.version_folder("echo", card.version) / "card.json"
    verified = BatchingEntry(inputs={"x": 0}, outputs={"y": 0}, max_rows=16, tolerance=0.0, max_error=0.0)
    aside = path.with_suffix(".new")
    aside.write_text(card.model_copy(update={"batching": verified}).model_dump_json())
    aside.replace(path)
