"""The pages of a real worker: what the metrics say is what was done."""

from __future__ import annotations

import time
import urllib.request

from qworker.wire.topology import PUBLISHED_HEADER
from tests.e2e.caller import Caller
from tests.e2e.fleet import Fleet, WorkerProcess
from tests.e2e.models import inputs_of
from tests.support.waiting import wait_until_sync
from tests.telemetry.test_exposition import Samples, parsed


def metrics(worker: WorkerProcess) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.port}/metrics", timeout=10) as answer:
        return parsed(answer.read())


def publish(caller: Caller, model: str, k: int) -> str:
    return caller.job(model, inputs_of(model, k), headers={PUBLISHED_HEADER: int(time.time() * 1000)})


def test_metrics_tell_what_was_done(fleet: Fleet, caller: Caller) -> None:
    """Jobs, failures, loads with their stages, evictions, bytes and the sweep, after a small morning's work."""
    fleet.start(1, memory="60MiB", min_residency=0)
    [worker] = fleet.workers
    jobs = [publish(caller, "echo", k) for k in range(20)] + [publish(caller, "table-a", k) for k in range(3)]
    caller.wait(jobs)
    caller.wait([publish(caller, "table-b", 1)])  # for which table-a must go
    bad = caller.call("echo", {"wrong": inputs_of("echo", 1)["x"]})
    assert bad.code == "invalid_input"
    wait_until_sync(lambda: metrics(worker)["qworker_replies_unconfirmed"] == {(): 0}, what="all answers are confirmed")
    wait_until_sync(lambda: metrics(worker)["qworker_sweeps_total"][()] > 0, what="a sweep")

    found = metrics(worker)
    assert found["qworker_jobs_total"] == {
        ("answered",): 24,
        ("failed",): 1,
        ("dead_lettered",): 0,
        ("given_back",): 0,
    }
    assert found["qworker_job_failures_total"] == {("invalid_input",): 1}
    assert found["qworker_model_jobs_total"] == {("echo",): 20, ("table-a",): 3, ("table-b",): 1}
    for name in ("queue_wait", "run"):
        assert found[f"qworker_job_{name}_seconds_count"] == {("echo",): 20, ("table-a",): 3, ("table-b",): 1}
    assert found["qworker_job_batch_wait_seconds_count"] == {(): 24}
    assert found["qworker_job_publish_seconds_count"] == {(): 25}
    assert found["qworker_job_cold_wait_seconds_count"][()] >= 3, "who woke a model had to wait for it"
    assert found["qworker_model_loads_total"] == {(): 3}
    assert found["qworker_load_seconds_count"] == {(): 3}
    assert set(found["qworker_load_stage_seconds_count"].values()) == {3}
    assert found["qworker_evictions_total"][()] >= 1
    assert found["qworker_evicted_bytes_total"][()] >= 48 << 20
    assert found["qworker_memory_budget_bytes"] == {("host",): 60 << 20}
    assert found["qworker_memory_held_bytes"][("host",)] == found["qworker_models_bytes"][("hot",)]
    assert found["qworker_memory_peak_bytes"][("host",)] <= 60 << 20
    assert found["qworker_models"][("hot",)] == len(found["qworker_model_hot"]) >= 1
    assert found["qworker_sweeper_elected"] == {(): 1}
    assert found["qworker_unserved_models"] == {(): 0}
    assert found["qworker_leases_total"][("got",)] >= 3
    assert found["qworker_ready"] == found["qworker_broker_connected"] == {(): 1}
    assert found["qworker_event_loop_lag_seconds_count"][()] > 0
    assert worker.name in next(iter(found["qworker_worker_info"]))
    fleet.finish()
