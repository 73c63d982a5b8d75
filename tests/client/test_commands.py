"""``qworker call``, ``publish`` and ``doctor`` as a shell runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from qworker.cli import call, doctor
from tests.client.responder import MODEL, Responder
from tests.support.rabbitmq import STRANGER

pytestmark = pytest.mark.broker

NOBODY = "amqp://guest:guest@127.0.0.1:1/"


@dataclass(frozen=True)
class Ran:
    returncode: int
    stdout: str
    stderr: str


def qworker(*arguments: str, stdin: str = "", variables: Mapping[str, str] | None = None) -> Ran:
    """Run the command to its end in this process, with no settings but those of the test."""
    app = typer.Typer(pretty_exceptions_enable=False)
    call.register(app)
    doctor.register(app)
    inherited = dict.fromkeys((name for name in os.environ if name.startswith("QWORKER_")), None)
    env = {**inherited, "COLUMNS": "160", "NO_COLOR": "1", **(variables or {})}
    done = CliRunner().invoke(app, arguments, input=stdin, env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception  # a traceback in a shell
    return Ran(done.exit_code, done.stdout, done.stderr)


def outputs_of(stdout: str) -> dict[str, dict[str, object]]:
    return {output["name"]: output for output in json.loads(stdout)["outputs"]}


def test_call_with_literals_and_a_file(amqp_url: str, responder: Responder, tmp_path: Path) -> None:
    """Literals get a datatype by name or by their look; the result is one JSON object."""
    np.save(tmp_path / "x.npy", np.arange(4, dtype=np.int16))
    literals = ["i=[[1, 2]]", "f=0.5", "h:FP16=[1]", 's=["a", "b"]', "colon:0=true", f"x=@{tmp_path / 'x.npy'}"]
    options = [part for literal in literals for part in ("-i", literal)]
    ran = qworker("call", MODEL, *options, "--json", variables={"QWORKER_BROKER": amqp_url})
    assert ran.returncode == 0, ran.stderr
    found = {name: (output["datatype"], output["shape"]) for name, output in outputs_of(ran.stdout).items()}
    assert found == {
        "i": ("INT64", [1, 2]),
        "f": ("FP32", []),
        "h": ("FP16", [1]),
        "s": ("BYTES", [2]),
        "colon:0": ("BOOL", []),
        "x": ("INT16", [4]),
    }


def test_call_from_npz_to_npz(amqp_url: str, responder: Responder, tmp_path: Path) -> None:
    """Arrays go through unchanged, and a person sees a table."""
    arrays = {"x": np.float32([[1.5, 2]]), "s": np.array([b"a", b"bc"])}
    np.savez(tmp_path / "in.npz", **arrays)
    ran = qworker(
        *("call", MODEL, "--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")),
        *("--broker", amqp_url),
    )
    assert ran.returncode == 0, ran.stderr
    assert "FP32" in ran.stdout
    assert "1x2" in ran.stdout
    with np.load(tmp_path / "out.npz") as saved:
        assert saved.files == ["x", "s"]
        assert all(np.array_equal(saved[name], arrays[name]) for name in arrays)


def test_call_with_a_json_body_from_standard_input(amqp_url: str, responder: Responder) -> None:
    """An Open Inference body says datatypes and parameters; options are added to it."""
    body = {
        "inputs": [{"name": "x", "shape": [2], "datatype": "UINT8", "data": [1, 2]}],
        "parameters": {"act": "stray"},
    }
    options = ("--from-json", "-", "-p", "top=3", "--only", "x", "--priority", "2", "--json", "--broker", amqp_url)
    ran = qworker("call", MODEL, *options, stdin=json.dumps(body))
    assert ran.returncode == 0, ran.stderr
    assert outputs_of(ran.stdout)["x"]["data"] == [1, 2]
    seen = responder.seen.get(timeout=5)
    assert dict(seen.job.parameters) == {"act": "stray", "top": 3}
    assert seen.job.outputs == ("x",)
    plain = qworker("call", MODEL, "--from-json", "-", "--json", "--broker", amqp_url, stdin='{"y": [0.5]}')
    assert outputs_of(plain.stdout)["y"]["datatype"] == "FP32"


def test_a_failure_is_exit_code_1_with_its_code(amqp_url: str, responder: Responder) -> None:
    """For a person on standard error, for a program on standard output."""
    asked = ("call", MODEL, "-i", "x=1", "-p", 'act="fail"', "-p", 'code="unknown_model"', "--broker", amqp_url)
    told = qworker(*asked)
    assert told.returncode == 1
    assert told.stderr.startswith("unknown_model: no luck")
    as_json = qworker(*asked, "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["error"]["code"] == "unknown_model"


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["-i", "x"], "NAME=VALUE"),
        (["-i", "x=hello"], "expected JSON"),
        (["-i", "x=1", "-i", "x=2"], "given twice"),
        (["-i", "x:FP32=[[1], [2, 3]]"], "evenly nested"),
        (["-i", "x=@/nowhere.npy"], "cannot read /nowhere.npy"),
        (["--from-json", "-"], "as JSON"),
        (["-p", "top"], "NAME=JSON"),
        (["-i", "x=1", "--broker", "http://x"], "amqp://user:password@host"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], fragment: str) -> None:
    """Told before any broker is asked."""
    ran = qworker("call", MODEL, "--broker", NOBODY, *arguments)
    assert ran.returncode == 2, ran.stderr
    assert fragment in " ".join(ran.stderr.replace("│", " ").split())


def test_call_without_a_broker(tmp_path: Path) -> None:
    """One line that says where it looked, and no traceback."""
    ran = qworker("call", MODEL, "-i", "x=1", "--broker", NOBODY)
    assert ran.returncode == 1
    assert ran.stderr.startswith("broker_unavailable: ")


def test_the_real_command(amqp_url: str, responder: Responder) -> None:
    """As a shell runs it: a process of its own, settings from a variable, one JSON object on standard output."""
    ran = subprocess.run(
        [sys.executable, "-c", "from qworker.cli.main import main; main()", "call", MODEL, "-i", "x=[1]", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "QWORKER_BROKER": amqp_url},
        check=True,
    )
    assert outputs_of(ran.stdout)["x"]["data"] == [1]
    assert not ran.stderr


def test_publish_prints_the_jobs_id(amqp_url: str, responder: Responder) -> None:
    """The job arrives with the reply address and the correlation id that were asked for."""
    asked = ("--reply-to", "my-queue", "--correlation-id", "c1", "--broker", amqp_url)
    ran = qworker("publish", MODEL, "-i", "x=1", *asked)
    assert ran.returncode == 0, ran.stderr
    seen = responder.seen.get(timeout=5)
    assert ran.stdout.strip() == seen.job.id
    assert (seen.properties.reply_to, seen.properties.correlation_id) == ("my-queue", "c1")


# --- doctor ---------------------------------------------------------------------------------------


def findings(ran: Ran) -> dict[str, list[dict[str, str]]]:
    by_check: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(ran.stdout)["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    return by_check


def test_doctor_on_a_good_place(amqp_url: str, tmp_path: Path) -> None:
    """Everything looked at, nothing wrong, and settings with their source, without the password."""
    options = ("--store", str(tmp_path), "--memory", "1MiB", "--json")
    ran = qworker("doctor", *options, variables={"QWORKER_BROKER": amqp_url})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = findings(ran)
    assert {"python", "packages", "broker", "permissions", "round trip", "store", "device", "memory"} <= found.keys()
    assert not [f for checks in found.values() for f in checks if f["status"] == "fail"]
    assert all(f["advice"] for checks in found.values() for f in checks if f["status"] != "ok")
    settings = {row["name"]: row for row in json.loads(ran.stdout)["settings"]}
    assert settings["memory"]["source"] == "--memory"
    assert settings["broker"]["source"] == "QWORKER_BROKER"
    assert "guest:guest" not in ran.stdout


def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    """No broker, no store, more memory than there is, a misspelt variable: four findings, exit code 1."""
    options = ("--store", str(tmp_path / "none"), "--memory", "4000TB", "--broker", NOBODY)
    ran = qworker("doctor", *options, "--json", variables={"QWORKER_MEMROY": "1"})
    assert ran.returncode == 1
    found = findings(ran)
    assert [found[check][0]["status"] for check in ("broker", "store", "memory")] == ["fail"] * 3
    assert "QWORKER_MEMROY" in found["settings"][0]["found"]
    assert all(f["advice"] for checks in found.values() for f in checks if f["status"] != "ok")
    table = qworker("doctor", *options)
    assert table.returncode == 1
    assert "qworker broker" in table.stdout


def test_doctor_names_missing_permissions(amqp_url: str, tmp_path: Path) -> None:
    """A user who may log in and do nothing."""
    url = amqp_url.replace("guest:guest", ":".join(STRANGER))
    ran = qworker("doctor", "--store", str(tmp_path), "--broker", url, "--json")
    assert ran.returncode == 1
    assert findings(ran)["permissions"][0]["status"] == "fail"
    assert "permission" in findings(ran)["permissions"][0]["advice"] + findings(ran)["permissions"][0]["found"]


def test_doctor_names_a_wrong_setting(tmp_path: Path) -> None:
    """One finding a wrong setting, with its source; the rest is still looked at."""
    ran = qworker("doctor", "--json", variables={"QWORKER_HEARTBEAT": "1"})
    assert ran.returncode == 1
    assert "QWORKER_HEARTBEAT" in findings(ran)["settings"][0]["found"]
    assert findings(ran)["python"][0]["status"] == "ok"


def test_doctor_finds_a_topology_of_another_kind(amqp_url: str, responder: Responder, tmp_path: Path) -> None:
    """The responder declared classic queues; a worker that wants quorum would stop at its start."""
    ran = qworker("doctor", "--store", str(tmp_path), "--broker", amqp_url, "--json")
    assert ran.returncode == 1
    assert "queue type" in findings(ran)["topology"][0]["advice"]
