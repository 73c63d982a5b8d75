"""Jobs and models that end workers, by real kills: each harms as few as can be, and nobody beside it pays."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pika
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from qworker.cli.main import app
from qworker.store.card import Card
from qworker.wire.topology import DEAD, strike_queue
from qworker.worker.load_guard import load_mark
from qworker.worker.strikes import AT, KIND, WORKER, Strike
from tests.e2e.caller import Caller, Reply
from tests.e2e.fleet import Fleet
from tests.e2e.models import put
from tests.support import deadly
from tests.support.models import identity
from tests.support.waiting import wait_until_sync

pytestmark = pytest.mark.chaos


@pytest.fixture(params=["quorum", "classic"])
def queue_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fleet(fleet: Fleet, tmp_path: Path) -> Fleet:
    """A fleet whose workers die of what is deadly."""
    fleet.environment = deadly.environment(tmp_path / "switch")
    return fleet


def filled(k: float) -> dict[str, NDArray[Any]]:
    return {"x": np.full((2, 3), k, np.float32)}


def answers(
    fleet: Fleet, caller: Caller, ids: list[str], deaths: tuple[int, int], **settings: object
) -> dict[str, Reply]:
    """The answer to each job, with a worker started for each one that dies, of which there are so many."""
    seen = 0
    while missing := [job_id for job_id in ids if job_id not in caller.replies.by_id]:
        caller.listen(0.05)
        for worker in [each for each in fleet.workers if not each.alive]:
            seen += 1
            assert worker.process.returncode == -signal.SIGKILL, f"it ended by itself:\n{worker.text()[-2000:]}"
            assert seen <= deaths[1], f"{seen} workers died, and {len(missing)} jobs have no answer"
            fleet.workers.remove(worker)
            fleet.start(1, wait=False, **settings)
    assert seen >= deaths[0], f"only {seen} workers died of it"
    for worker in fleet.workers:
        worker.wait_ready()
    return caller.wait(ids)


def shown(fleet: Fleet, model: str) -> dict[str, Any]:
    """``qworker models show``."""
    return told(fleet, "models", "show", model, "--store", str(fleet.store))


def told(fleet: Fleet, *arguments: str) -> dict[str, Any]:
    """What ``qworker`` says to an operator."""
    return json.loads(CliRunner().invoke(app, [*arguments, "--broker", fleet.url, "--json"]).stdout)


def ended_elsewhere(caller: Caller, build: Card, workers: int) -> None:
    """Put on record that loads of ``build`` have ended more workers, just now: its next load is long off."""
    said = {KIND: Strike.BEGUN.value, WORKER: "elsewhere", AT: int(time.time() * 1000)}
    queue = strike_queue(load_mark(build))
    caller.channel.queue_declare(queue.name, durable=True, arguments=queue.arguments)
    for _ in range(workers):
        caller.channel.basic_publish("", queue.name, b"", pika.BasicProperties(headers=said), mandatory=True)


def test_job_that_ends_its_workers(fleet: Fleet, caller: Caller, queue_type: str) -> None:
    """It ends one worker beside others, two more alone, and then it is dead-lettered. Its neighbours are answered."""
    fleet.start(2, queue_type=queue_type)
    good = [caller.job("echo", filled(k)) for k in range(6)]
    poison = caller.job("echo", filled(deadly.KILLS))
    good += [caller.job("echo", filled(k)) for k in range(6, 12)]
    replies = answers(fleet, caller, [*good, poison], (3, 3), queue_type=queue_type)
    for k, job_id in enumerate(good):
        assert (replies[job_id].y == k).all()
    assert replies[poison].code == "poison_job"
    letter, _, _ = caller.get(DEAD)
    assert letter.message_id == poison
    assert letter.headers["x-qworker-cause"] == "poison_job"
    assert letter.headers["x-qworker-attempts"] == 3
    assert "2 times alone" in letter.headers["x-qworker-reason"]
    assert fleet.counter("jobs_convicted") == 1
    # the same payload under another id: the worker that serves the model knows it, and it costs nobody
    again = caller.job("echo", filled(deadly.KILLS))
    assert caller.wait([again])[again].code == "poison_job"
    fleet.finish()


@pytest.mark.slow
def test_several_poison_jobs_burn_no_neighbour(fleet: Fleet, caller: Caller) -> None:
    """Neighbours that are in hand at each of five deaths or more have no attempt counted against them."""
    fleet.start(2)
    good, bad = [], []
    for k in range(2):
        bad.append(caller.job("echo", {"x": np.full((2, 3), [k, k, deadly.KILLS], np.float32)}))
        good += [caller.job("echo", filled(k)) for _ in range(3)]
    replies = answers(fleet, caller, [*good, *bad], (5, 6))
    assert {replies[job_id].code for job_id in good} == {"ok"}
    assert {replies[job_id].code for job_id in bad} == {"poison_job"}
    fleet.finish()


@pytest.mark.slow
def test_a_new_worker_knows_the_payload(fleet: Fleet, caller: Caller) -> None:
    """What was convicted is on record at the broker: elsewhere it costs one worker, not three."""
    fleet.start(2)
    first = caller.job("echo", filled(deadly.KILLS))
    answers(fleet, caller, [first], (3, 3))
    fleet.finish()
    fleet.workers.clear()
    fleet.start(2)
    second = caller.job("echo", filled(deadly.KILLS))
    replies = answers(fleet, caller, [second], (1, 1))
    assert replies[second].code == "poison_job"
    fleet.finish()


def test_kills_from_outside_while_a_model_loads_refuse_no_job(fleet: Fleet, caller: Caller, tmp_path: Path) -> None:
    """Its jobs wait, and are answered once loads are let be."""
    put(fleet.store, "deadly", identity())
    switch = tmp_path / "switch"
    switch.touch()
    fleet.start(4)
    jobs = [caller.job("deadly", filled(k)) for k in range(3)]
    wait_until_sync(lambda: sum(not each.alive for each in fleet.workers) >= 2, 30, what="two workers have ended")
    switch.unlink()
    replies = answers(fleet, caller, jobs, (2, 3))
    assert {reply.code for reply in replies.values()} == {"ok"}
    fleet.finish()


def test_a_model_that_is_put_off_says_so_and_can_be_released(fleet: Fleet, caller: Caller) -> None:
    """Nothing is answered meanwhile; ``why`` and the state have the reason; other models are served."""
    build = put(fleet.store, "deadly", identity())
    fleet.start(1, max_load_crashes=20)
    ended_elsewhere(caller, build, 8)
    job = caller.job("deadly", filled(1))
    (worker,) = fleet.workers
    (held,) = wait_until_sync(lambda: worker.state()["quarantined"], 30, what="it is put off")
    assert held["model"] == "deadly"
    assert "ended 8 workers" in held["reason"]
    assert "its jobs wait" in held["reason"]
    assert "its jobs wait" in told(fleet, "why", "deadly")["verdict"]
    assert (caller.call("echo", filled(2)).y == 2).all()
    assert job not in caller.replies.by_id
    told(fleet, "models", "release", "deadly")
    assert (caller.wait([job])[job].y == 1).all()
    assert worker.state()["quarantined"] == []
    fleet.finish()


def test_model_that_ends_its_workers_when_it_loads(fleet: Fleet, caller: Caller, tmp_path: Path) -> None:
    """So many workers as are allowed, not all of them: then its jobs are answered with the reason, also by workers
    that start later.

    Five are there from the start: on a slow machine, one that has yet to start finds the first wait over.
    """
    build = put(fleet.store, "deadly", identity())
    switch = tmp_path / "switch"
    switch.touch()
    fleet.start(5, max_load_crashes=3)
    jobs = [caller.job("deadly", filled(k)) for k in range(3)]
    replies = answers(fleet, caller, jobs, (3, 3), max_load_crashes=3)
    assert {reply.code for reply in replies.values()} == {"model_unavailable"}
    assert "ended 3 workers" in replies[jobs[0]].message
    (held,) = [entry for worker in fleet.live() for entry in worker.state()["quarantined"]]
    assert held["model"] == "deadly"
    assert "out of memory" in held["reason"]
    ended_elsewhere(caller, build, 2)
    assert "ended 5 workers" in shown(fleet, "deadly")["quarantine"]
    assert shown(fleet, "echo")["quarantine"] == ""
    fleet.finish(errors_allowed={"model.refused"})
    fleet.workers.clear()
    fleet.start(1)
    refused = caller.call("deadly", filled(1))
    assert refused.code == "model_unavailable"
    assert "ended 5 workers" in refused.message
    assert caller.call("echo", filled(1)).code == "ok"
    switch.unlink()
    mended = onnx.load_from_string(identity())
    mended.doc_string = "mended"
    put(fleet.store, "deadly", mended.SerializeToString())  # other bytes are not in quarantine
    wait_until_sync(lambda: caller.call("deadly", filled(1)).code == "ok", 30, what="the new version is served")
    fleet.finish(errors_allowed={"model.refused"})


def test_model_whose_rehearsal_ends_its_process(fleet: Fleet, caller: Caller, tmp_path: Path) -> None:
    """Loads are rehearsed: the worker lives, says why the model is refused, and loads it once it is mended."""
    put(fleet.store, "deadly", identity())
    switch = tmp_path / "switch"
    switch.touch()
    fleet.environment["QWORKER_REHEARSE_LOADS"] = "1"
    fleet.start(1)
    (worker,) = fleet.workers
    refused = caller.call("deadly", filled(1))
    assert (refused.code, worker.alive) == ("model_unavailable", True)
    assert "SIGKILL" in refused.message
    assert "SIGKILL" in worker.state()["quarantined"][0]["reason"]
    assert (caller.call("echo", filled(2)).y == 2).all()
    switch.unlink()
    wait_until_sync(lambda: caller.call("deadly", filled(3)).code == "ok", 30, what="it is tried again by itself")
    fleet.finish(errors_allowed={"model.load_failed", "model.refused"})
