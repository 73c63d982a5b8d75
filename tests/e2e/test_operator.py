"""The operator's commands against two workers on one broker: each is carried out, and a missing answer is told."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from typing import Any

import pytest
from typer.testing import CliRunner

from qworker.cli.main import app
from tests.e2e.caller import Caller
from tests.e2e.fleet import COMMAND, ROOT, Fleet, WorkerProcess
from tests.e2e.models import inputs_of
from tests.support.waiting import wait_until_sync


def command(fleet: Fleet, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Standard output and error of ``qworker``: here, since its start takes longer than what it does."""
    done = CliRunner().invoke(app, [*arguments, "--broker", fleet.url])
    assert done.exit_code == code, f"{arguments} ended with {done.exit_code}:\n{done.output}\n{done.exception}"
    return done.stdout, done.stderr


def asked(fleet: Fleet, *arguments: str, code: int = 0) -> Any:
    return json.loads(command(fleet, *arguments, "--json", code=code)[0])


def answers(fleet: Fleet, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Answer by worker."""
    told = asked(fleet, *arguments, code=code)
    return {answer["worker"]: answer for answer in told["answers"]}


def test_orders_about_models(fleet: Fleet, caller: Caller) -> None:
    """Preload, pin, evict, quarantine and release do what they say; ``why`` says it in words."""
    fleet.start(2, memory="60MiB")
    cold = asked(fleet, "why", "table-a")
    assert "table-a is cold" in cold["verdict"], cold["verdict"]
    assert len(cold["answers"]) == 2

    told = answers(fleet, "models", "preload", "table-a", "--worker", "worker-0")
    assert told["worker-0"]["claimed"] is True
    fleet.workers[0].wait_event("model.loaded", model="table-a")
    wait_until_sync(lambda: fleet.workers[0].is_hot("table-a"), what="table-a is hot")
    assert "hot on worker-0" in asked(fleet, "why", "table-a")["verdict"]
    shown = asked(fleet, "models", "show", "table-a", "--store", str(fleet.store))
    assert shown["workers"] == {"worker-0": "hot", "worker-1": "cold"}
    [row] = [row for row in asked(fleet, "models", "ls")["models"] if row["model"] == "table-a"]
    assert (row["worker"], row["state"]) == ("worker-0", "hot")

    pinned = answers(fleet, "models", "pin", "table-a", "--for", "3600")
    assert all(answer["pinned"] for answer in pinned.values())
    assert len(pinned) == 2
    refused = answers(fleet, "models", "pin", "table-b", code=1)
    assert {answer["error"]["code"] for answer in refused.values()} == {"model_unavailable"}, "the quota holds"
    assert "pinned" in answers(fleet, "models", "evict", "table-a", code=1)["worker-0"]["error"]["message"]
    answers(fleet, "models", "unpin", "table-a")
    assert answers(fleet, "models", "evict", "table-a")["worker-0"]["leaving"] is True
    wait_until_sync(lambda: fleet.workers[0].row("table-a") is None, what="table-a has left")

    answers(fleet, "models", "quarantine", "echo", "--reason", "it smells")
    failed = caller.call("echo", inputs_of("echo", 1))
    assert failed.code == "model_unavailable"
    assert "it smells" in failed.message
    assert "it smells" in asked(fleet, "why", "echo")["verdict"]
    assert any(answer["released"] for answer in answers(fleet, "models", "release", "echo").values())
    wait_until_sync(lambda: caller.call("echo", inputs_of("echo", 2)).code == "ok", 30, what="echo is served again")
    fleet.finish(errors_allowed=["model.refused"])


def test_a_worker_is_drained_and_resumed(fleet: Fleet, caller: Caller) -> None:
    """Its jobs go on to the other one, none is lost; it takes nothing until it is resumed."""
    fleet.start(2)
    jobs = [caller.job("roll", inputs_of("roll", k, seconds=0.2)) for k in range(10)]
    first = fleet.holder("roll")
    command(fleet, "workers", "drain", first.name)
    state = first.state()
    assert (state["models"], state["claims"], state["drained"]) == ([], {}, True)
    assert first.page("/readyz")[0] == 503
    assert all(reply.code == "ok" for reply in caller.wait(jobs, 60).values())
    second = fleet.other(first)
    states = {row["worker"]: row["state"] for row in asked(fleet, "workers", "ls")["workers"]}
    assert states[second.name] == "ready"
    assert "drained" in states[first.name]
    assert caller.call("echo", inputs_of("echo", 1)).code == "ok"
    assert not first.is_hot("echo")

    command(fleet, "workers", "drain", second.name)
    waiting = caller.job("other", inputs_of("other", 1))
    verdict = asked(fleet, "why", "other")["verdict"]
    assert "drained" in verdict, verdict
    command(fleet, "workers", "resume", first.name)
    assert caller.wait([waiting], 60)[waiting].code == "ok"
    fleet.finish()


def test_a_worker_that_does_not_answer_is_named(fleet: Fleet) -> None:
    """A stopped process is told from one that has gone, and from a name that nobody has."""
    fleet.start(2, heartbeat=60)
    first, second = fleet.workers
    wait_until_sync(lambda: _know_each_other(first, second), 30, what="each has heard the other's pulse")
    second.pause()
    out, complaint = command(fleet, "workers", "ls", "--timeout", "1", code=3)
    assert "does not answer" in out
    assert f"{second.name} did not answer within 1 s" in complaint
    assert asked(fleet, "models", "ls", "--timeout", "1", code=3)["silent"].keys() == {second.name}
    assert f"{second.name} did not answer" in command(fleet, "why", "echo", "--timeout", "1", code=3)[1]
    command(fleet, "workers", "show", second.name, "--timeout", "1", code=3)
    second.resume()
    wait_until_sync(lambda: len(asked(fleet, "workers", "ls")["workers"]) == 2, what="it answers again")

    second.kill()
    wait_until_sync(lambda: command_ends_well(fleet), what="who has gone is not waited for")
    told = json.loads(command(fleet, "workers", "show", second.name, "--json", code=1)[0])
    assert told["error"]["code"] == "no_worker"
    assert first.name in told["error"]["message"]
    fleet.workers.remove(second)
    fleet.finish()


def _know_each_other(first: WorkerProcess, second: WorkerProcess) -> bool:
    return second.name in first.state()["peers"] and first.name in second.state()["peers"]


def command_ends_well(fleet: Fleet) -> bool:
    return CliRunner().invoke(app, ["workers", "ls", "--timeout", "1", "--broker", fleet.url]).exit_code == 0


@pytest.mark.parametrize("arguments", [("workers", "ls"), ("why", "echo"), ("models", "pin", "echo")])
def test_no_worker_at_all(fleet: Fleet, arguments: tuple[str, ...]) -> None:
    """Is told as such, at once."""
    told = json.loads(command(fleet, *arguments, "--json", code=1)[0])
    assert told["error"]["code"] == "no_worker"


def test_top_before_the_first_worker(fleet: Fleet) -> None:
    """Says that there is none; nothing has been declared on this broker yet."""
    assert "no worker is connected" in command(fleet, "top", "--once")[0]


def test_top_shows_both_workers(fleet: Fleet, caller: Caller) -> None:
    """Its figures are those of the workers: what is hot where, bytes, jobs, loads and evictions with their reasons."""
    fleet.start(2, memory="60MiB", min_residency=0)
    caller.wait([caller.job("echo", inputs_of("echo", k)) for k in range(20)])
    caller.wait([caller.job("table-a", inputs_of("table-a", 1))])
    seen = asked(fleet, "top")
    assert {row["worker"]: row["state"] for row in seen["workers"]} == dict.fromkeys(("worker-0", "worker-1"), "ready")
    for worker in fleet.workers:
        state = worker.state()
        [row] = [row for row in seen["workers"] if row["worker"] == worker.name]
        assert row["bytes"] == state["ledger"]["held"]
        hot = {each["model"] for each in seen["models"] if each["worker"] == worker.name and each["state"] == "hot"}
        assert hot == {each["model"] for each in state["models"] if each["state"] == "hot"}
    jobs = {row["model"]: row["jobs"] for row in seen["models"]}
    assert (jobs["echo"], jobs["table-a"]) == (20, 1)
    loads = [note["model"] for note in seen["timeline"] if note["kind"] == "loaded"]
    assert sorted(loads) == ["echo", "table-a"]
    assert "echo" in command(fleet, "top", "--once")[0]
    fleet.finish()


def test_top_in_a_terminal(fleet: Fleet, caller: Caller) -> None:
    """It draws, and its keys select a model and pin it."""
    fleet.start(1)
    caller.wait([caller.job("echo", inputs_of("echo", 1))])
    ours, its = os.openpty()
    line = [*COMMAND, "top", "--broker", fleet.url]
    terminal = {"TERM": "xterm", "COLUMNS": "150", "LINES": "50"}
    process = subprocess.Popen(line, stdin=its, stdout=its, stderr=its, cwd=ROOT, env=os.environ | terminal)
    os.close(its)
    os.set_blocking(ours, False)
    screen = bytearray()

    def drawn(text: bytes) -> bool:
        with contextlib.suppress(OSError):  # nothing there yet, or nobody at the other end any more
            screen.extend(os.read(ours, 1 << 16))
        return text in screen

    try:
        wait_until_sync(lambda: drawn(b"echo"), 60, what="the model is on the screen")
        os.write(ours, b"jp")
        wait_until_sync(lambda: drawn(b"pin echo: worker-0"), 60, what="what was done is told")
        assert (fleet.workers[0].row("echo") or {})["pinned"]
        os.write(ours, b"q")
        wait_until_sync(lambda: not drawn(b"\0") and process.poll() is not None, 60, what="it ends")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)
    fleet.finish()


def test_a_pin_ends_and_that_of_the_settings_does_not(fleet: Fleet, caller: Caller) -> None:
    """An order for a time leaves what the settings say as it was; to unpin is to unpin."""
    fleet.start(1, pin="echo")
    caller.wait([caller.job(model, inputs_of(model, 1)) for model in ("echo", "other")])
    [worker] = fleet.workers
    for model in ("echo", "other"):
        answers(fleet, "models", "pin", model, "--for", "1")
    wait_until_sync(lambda: worker.state()["pins"] == {}, 30, what="the orders are over")
    assert [(worker.row(model) or {})["pinned"] for model in ("echo", "other")] == [True, False]
    answers(fleet, "models", "unpin", "echo")
    assert (worker.row("echo") or {})["pinned"] is False
    fleet.finish()
