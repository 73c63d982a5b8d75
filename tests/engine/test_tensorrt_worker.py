"""Whole workers on the fake driver and TensorRT's double, behind a real broker."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qworker.cli.worker import DEVICE_LOST
from qworker.wire.topology import lane_queue
from tests.e2e.caller import JSON, Caller
from tests.e2e.fleet import Fleet, WorkerProcess, queue_depths
from tests.e2e.models import put
from tests.support.fakegpu import environment
from tests.support.fakegpu.store import put_plan
from tests.support.models import identity, labels
from tests.support.waiting import wait_until_sync

pytestmark = pytest.mark.e2e

MIB = 1 << 20
PLANS = ("p0", "p1", "p2")
POISON = 13.0


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models with plans of 40 MiB, one that some inputs break the device with, and one of text without."""
    root = tmp_path_factory.mktemp("plans") / "store"
    for name in PLANS:
        put(root, name, identity())
        put_plan(root, name, weights=40 * MIB, scratch=4 * MIB)
    put(root, "fragile", identity())
    put_plan(root, "fragile", build={"breaks_on": POISON, "dims": (1, 1, 64)})
    put(root, "words", labels())
    return root


@pytest.fixture
def fleet(amqp_url: str, plans: Path, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(amqp_url, plans, tmp_path / "workers")
    fleet.environment = {k: v for k, v in environment().items() if k in {"LD_LIBRARY_PATH", "PYTHONPATH"}}
    yield fleet
    fleet.stop()


@pytest.fixture
def caller(amqp_url: str) -> Iterator[Caller]:
    with Caller(amqp_url) as caller:
        yield caller


def ask(caller: Caller, model: str, values: list[float], timeout: float = 60.0) -> None:
    """One job for each value; each comes back as it was sent."""
    jobs = {caller.job(model, {"x": np.full((1, 3), each, np.float32)}): each for each in values}
    for job, reply in caller.wait(jobs, timeout).items():
        assert (reply.y == jobs[job]).all()


def device(worker: WorkerProcess) -> dict[str, Any]:
    return worker.state()["device"]


def test_plans_within_a_budget_that_is_too_small_for_all(fleet: Fleet, caller: Caller) -> None:
    """Models come and go, answers are right, and the device's own figures agree with the ledger all the time."""
    fleet.start(1, backend="tensorrt", memory="100MiB", min_residency=0)
    (worker,) = fleet.workers
    for turn in range(3):
        for model in PLANS:
            ask(caller, model, [turn, turn + 0.5])
            report = device(worker)
            assert abs(report["memory"]["drift"]) <= 4 * MIB, report
            assert report["memory"]["used"] < 110 * MIB
    assert fleet.counter("evictions") >= 4
    report = device(worker)
    assert report["memory"]["arena"] <= report["arena_reserved"]
    assert worker.state()["ledgers"]["tensorrt"]["budget"] == 100 * MIB - report["arena_reserved"]
    fleet.finish()


def test_a_model_without_a_plan_runs_on_onnx_beside_the_plans(fleet: Fleet, caller: Caller) -> None:
    """Text is nothing for TensorRT. Its bytes are the host's, and evict no plan."""
    fleet.start(1, memory="200MiB", host_memory="64MiB")
    (worker,) = fleet.workers
    ask(caller, "p0", [1, 2])
    text = {"inputs": [{"name": "words", "shape": [1], "datatype": "BYTES", "data": ["hund"]}]}
    reply = caller.call_raw("words", json.dumps(text).encode(), content_type=JSON)
    assert reply.code == "ok"
    assert "Hündin" in json.dumps(reply.fields, ensure_ascii=False)
    assert worker.wait_event("model.on_onnx")["reason"].startswith("it has no plan")
    ledgers = worker.state()["ledgers"]
    assert ledgers["onnx"] == {"budget": 64 * MIB, "held": MIB, "peak": MIB}
    assert ledgers["tensorrt"]["held"] >= 40 * MIB
    assert [entry["model"] for entry in device(worker)["memory"]["engines"]] == ["p0"]
    fleet.finish()


def test_a_model_without_a_plan_is_refused_where_only_plans_run(fleet: Fleet, caller: Caller) -> None:
    """With the reason, and what to do."""
    fleet.start(1, backend="tensorrt", max_attempts=1)
    text = {"inputs": [{"name": "words", "shape": [1], "datatype": "BYTES", "data": ["hund"]}]}
    reply = caller.call_raw("words", json.dumps(text).encode(), timeout=60, content_type=JSON)
    assert reply.code == "model_unavailable"
    assert "words has no plan that FakeGPU 0 takes" in reply.message
    assert "qworker build" in reply.message
    fleet.finish(errors_allowed={"model.load_failed", "model.refused"})


def test_a_broken_device_ends_the_worker_and_gives_its_jobs_back(fleet: Fleet, caller: Caller) -> None:
    """The process ends with a code of its own; what it held, and the job that did it, are another worker's."""
    fleet.start(1, backend="tensorrt")
    ask(caller, "fragile", [1, 2])
    (first,) = fleet.workers
    bad = caller.job("fragile", {"x": np.full((1, 3), POISON, np.float32)})
    assert first.wait_exit() == DEVICE_LOST
    lost = first.events("device.lost")
    assert len(lost) == 1
    assert lost[0]["model"] == "fragile"
    assert len(lost[0]["fingerprint"]) == 32
    assert "ILLEGAL_ADDRESS" in first.text()
    fleet.start(1, backend="onnx")
    assert (caller.wait([bad])[bad].y == POISON).all()
    fleet.workers.remove(first)
    fleet.finish()


def test_the_job_that_breaks_devices_is_refused_the_third_time(fleet: Fleet, caller: Caller, tmp_path: Path) -> None:
    """Two processes have ended of it; the book tells the third one, which answers it and serves the others."""
    book = tmp_path / "poison.jsonl"
    fleet.environment["QWORKER_POISON_BOOK"] = str(book)
    bad = ""
    for _ in range(2):
        fleet.start(1, backend="tensorrt")
        if not bad:
            ask(caller, "fragile", [1])
            bad = caller.job("fragile", {"x": np.full((1, 3), POISON, np.float32)})
        assert fleet.workers.pop().wait_exit() == DEVICE_LOST
    marks = [json.loads(line)["fingerprint"] for line in book.read_text().splitlines()]
    assert len(marks) == 2
    assert marks[0] == marks[1]
    fleet.start(1, backend="tensorrt")
    other = caller.job("fragile", {"x": np.full((1, 3), 5, np.float32)})
    replies = caller.wait([bad, other], 60)
    assert replies[bad].code == "inference_failed"
    assert marks[0] in replies[bad].message
    assert (replies[other].y == 5).all()
    fleet.finish()


def test_one_worker_process_for_each_device(fleet: Fleet, caller: Caller) -> None:
    """``--device all``: each has its own device; one that ends badly is started again; a stop reaches all."""
    fleet.environment["FAKEGPU_DEVICES"] = "2"
    fleet.start(1, wait=False, backend="tensorrt", device="all", memory="200MiB")
    (supervisor,) = fleet.workers

    def started() -> list[str]:
        return [line["uuid"][-2:] for line in supervisor.events("device.opened")]

    wait_until_sync(lambda: sorted(started()) == ["00", "01"], 60, what="both devices have a worker")
    names = {f"{supervisor.name}-0", f"{supervisor.name}-1"}
    wait_until_sync(lambda: {line["name"] for line in supervisor.events("worker.started")} == names)
    supervisor.wait_event("broker.connected")
    wait_until_sync(lambda: lane_queue("jobs", "fragile") in queue_depths(fleet.url, [lane_queue("jobs", "fragile")]))
    bad = caller.job("fragile", {"x": np.full((1, 3), POISON, np.float32)})
    supervisor.wait_event("worker.ended", code=DEVICE_LOST)
    assert caller.wait([bad], 90)[bad].code == "inference_failed", "after two processes the book refuses it"
    assert len(supervisor.events("worker.ended", code=DEVICE_LOST)) == 2
    wait_until_sync(lambda: len(started()) == 4, 30, what="each has been started again")
    ask(caller, "p0", [1, 2, 3])
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.wait_exit() == 0
    assert len(supervisor.events("worker.stopped")) == 2
    fleet.workers.remove(supervisor)


@pytest.mark.parametrize(
    "selector", ["1", "GPU-07070707-0707-0707-0707-070707070701", "MIG-07070707-0707-0707-0707-070707070701"]
)
def test_a_device_by_number_or_uuid(fleet: Fleet, caller: Caller, selector: str) -> None:
    """Of two, the second one."""
    fleet.environment["FAKEGPU_DEVICES"] = "2"
    fleet.start(1, backend="tensorrt", device=selector)
    ask(caller, "p0", [1])
    report = device(fleet.workers[0])
    assert report["device"] == "FakeGPU 1"
    assert report["memory"]["used"] > 40 * MIB
    fleet.finish()


@pytest.mark.parametrize(
    ("environment", "flags", "reason"),
    [
        ({"FAKEGPU_DEVICES": "0"}, {}, "CUDA sees no device here"),
        ({"FAKEGPU_DEVICES": "2"}, {"device": "2"}, "there is no device 2 here, there are 2"),
        ({"FAKEGPU_MEM": str(300 * MIB)}, {}, "nothing is left for models"),
    ],
)
def test_a_worker_without_its_device_says_why(
    fleet: Fleet, environment: dict[str, str], flags: dict[str, str], reason: str
) -> None:
    """And ends, before it has touched TensorRT, whose objects crash without a driver."""
    fleet.environment |= environment
    fleet.start(1, wait=False, backend="tensorrt", **flags)
    (worker,) = fleet.workers
    assert worker.wait_exit() == 1
    assert reason in worker.text()
    assert "Traceback" not in worker.text()


def test_without_a_device_auto_is_onnx(fleet: Fleet, caller: Caller) -> None:
    """The same command serves the same models on a laptop."""
    fleet.environment["FAKEGPU_DEVICES"] = "0"
    fleet.start(1)
    ask(caller, "p0", [1, 2])
    (worker,) = fleet.workers
    assert "CUDA sees no device" in worker.wait_event("backend.onnx")["reason"]
    assert "device" not in worker.state()
    fleet.finish()
