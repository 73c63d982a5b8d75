"""``qworker models`` as somebody at a shell meets it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from qworker.broker.base import Depth
from qworker.broker.reference.session import AioPikaConnector
from qworker.cli import builds as builds_cli
from qworker.cli import models as models_cli
from qworker.errors import ModelRefused
from qworker.policy.plan_choice import DeviceFacts
from qworker.wire.topology import lane_queue
from tests.support import models
from tests.support.fakegpu.store import put_plan

app = typer.Typer()
models_cli.register(app)


class Shell:
    """Runs ``qworker models ...`` on a store of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"

    def __call__(self, *arguments: object) -> Result:
        return CliRunner().invoke(app, ["models", *map(str, arguments)], env={"QWORKER_STORE": str(self.store)})

    def json(self, *arguments: object) -> Any:
        result = self(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def file(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.delenv("QWORKER_BROKER", raising=False)
    return Shell(tmp_path)


def test_register_list_show_remove(shell: Shell) -> None:
    """The life of a model, in JSON and for people."""
    path = shell.file("calc.onnx", models.arithmetic())
    assert shell.json("register", path) == [{"path": str(path), "model": "calc", "version": "1"}]
    [listed] = shell.json("list")
    assert (listed["model"], listed["version"], listed["warmed"]) == ("calc", "1", True)
    shown = shell.json("show", "calc")
    assert [entry["name"] for entry in shown["outputs"]] == ["sum:0", "difference", "7"]
    assert shown["versions"] == ["1"]
    assert "calc" in shell("list").stdout
    for words in ("in/a:0 FP32[batch,2]", "MiB", "onnxruntime", "default 1"):
        assert words in shell("show", "calc").stdout
    assert shell.json("remove", "calc") == {"model": "calc", "removed": ["1"]}
    assert shell.json("list") == []


def test_builds_are_shown_with_who_takes_them(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan for this device is taken, the others say why not; without a device all say that."""
    shell.json("register", shell.file("m.onnx", models.identity()))
    put_plan(shell.store, "m", precision="fp16")
    put_plan(shell.store, "m", precision="int8", compute_capability="8.6")
    device = DeviceFacts("H100", "9.0", "11.4.0.106", "13.0", "580.1")
    monkeypatch.setattr(builds_cli, "find_device", lambda: device)
    [listed] = shell.json("list")
    refused = {build["precision"]: build["refused"] for build in listed["builds"]}
    assert (refused[None], refused["fp16"]) == (None, None)
    assert "8.6" in refused["int8"]
    assert "taken here" in shell("show", "m").stdout
    assert "not taken here" in shell("list").stdout

    def nothing() -> DeviceFacts:
        raise ModelRefused("no GPU in this machine")

    monkeypatch.setattr(builds_cli, "find_device", nothing)
    assert {build["refused"] for build in shell.json("show", "m")["builds"]} == {None, "no GPU in this machine"}


def test_one_bad_model_does_not_stop_the_others(shell: Shell) -> None:
    """Each error is one line on stderr without a traceback; the exit code is 1."""
    good, bad = shell.file("good.onnx", models.identity()), shell.file("bad.onnx", b"<html>")
    result = shell("register", bad, shell.folder / "nowhere.onnx", good, "--json")
    assert result.exit_code == 1
    outcomes = json.loads(result.stdout)
    assert [outcome.get("model") for outcome in outcomes] == [None, None, "good"]
    assert outcomes[0]["error"]["code"] == "model_refused"
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert "web page" in errors[0]
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [("list",), ("show", "m"), ("show", "../m"), ("remove", "m"), ("register", "x.onnx", "--id", "a b")],
    ids=" ".join,
)
def test_errors_are_one_line(shell: Shell, arguments: tuple[str, ...]) -> None:
    """Exit code 1 and one line on stderr that says what is wrong."""
    shell.file("x.onnx", models.identity())
    result = shell(*(shell.folder / word if word.endswith(".onnx") else word for word in arguments))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_damaged_card_does_not_hide_the_others(shell: Shell) -> None:
    """``list`` shows what it can read and complains of what it cannot."""
    for name in ("a.onnx", "b.onnx"):
        assert shell("register", shell.file(name, models.identity())).exit_code == 0
    (shell.store / "models/a/1/card.json").write_text("{")
    result = shell("list", "--json")
    assert result.exit_code == 1
    assert [card["model"] for card in json.loads(result.stdout)] == ["b"]
    assert "card.json" in result.stderr


def test_one_id_cannot_be_given_to_several(shell: Shell) -> None:
    """It is a wrong usage."""
    path = shell.file("a.onnx", models.identity())
    assert shell("register", path, path, "--id", "x").exit_code == 2


def test_a_broker_that_is_not_there(shell: Shell) -> None:
    """The models are in the store all the same, and the message says so."""
    path = shell.file("a.onnx", models.identity())
    result = shell("register", path, "--broker", "amqp://guest:guest@127.0.0.1:1/")
    assert result.exit_code == 1
    assert "are in the store" in result.stderr
    assert "guest:guest" not in result.output
    assert [card["model"] for card in shell.json("list")] == ["a"]


@pytest.mark.broker
def test_queues_are_declared_where_a_broker_is_named(shell: Shell, amqp_url: str) -> None:
    """Jobs for the model are kept from then on."""
    result = shell("register", shell.file("a.onnx", models.identity()), "--broker", amqp_url)
    assert result.exit_code == 0, result.output

    async def depth() -> Depth | None:
        async with await AioPikaConnector(amqp_url, name="test").connect() as session:
            return await session.depth(lane_queue("jobs", "a"))

    assert asyncio.run(depth()) == Depth(ready=0, consumers=0)
