"""Payloads are in no log and in no error text: bad inputs that hold a marker, at the most talkative level."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from qworker.wire.topology import DEAD
from tests.e2e.caller import JSON, MSGPACK, Caller, packed
from tests.e2e.fleet import Fleet
from tests.e2e.models import copy_store, inputs_of
from tests.support.rabbitmq import SuiteNode

MARKER = b"zq7PAYLOADzq7"
TEXT = MARKER.decode()
NUMBER = 718_281_828_459
"""As a value within a tensor."""
TRACES = (TEXT, MARKER.hex(), base64.b64encode(MARKER).decode()[:16], "PAYLOAD", str(NUMBER))
DATA = (MARKER * 2)[:24]
"""The bytes of an FP32 tensor of the shape [2, 3]."""


def tensor(**changed: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": DATA} | changed


def job(*tensors: dict[str, Any], **more: Any) -> bytes:
    return msgpack.packb({"inputs": list(tensors), **more})


def as_json(data: Any, **changed: Any) -> bytes:
    return json.dumps({"inputs": [tensor(data=data, **changed)]}).encode()


GOOD = job(tensor())
WORDS = {"name": "words", "shape": [1], "datatype": "BYTES"}
BAD: list[tuple[str, str, bytes]] = [
    ("echo", MSGPACK, MARKER),
    ("echo", JSON, MARKER),
    ("echo", "text/plain", GOOD),
    ("echo", MSGPACK, msgpack.packb(TEXT)),
    ("echo", MSGPACK, msgpack.packb([MARKER])),
    ("echo", MSGPACK, msgpack.packb({"inputs": TEXT})),
    ("echo", MSGPACK, job({"name": "x", "data": DATA})),
    *(("echo", MSGPACK, GOOD[:cut]) for cut in range(1, len(GOOD), 5)),
    ("echo", MSGPACK, GOOD + MARKER),
    *(
        ("echo", MSGPACK, job(tensor(**changed)))
        for changed in (
            {"shape": [5, 3]},
            {"shape": TEXT},
            {"shape": [TEXT]},
            {"datatype": "FP64"},
            {"datatype": "BOOL", "shape": [24]},
            {"data": TEXT},
            {"data": [MARKER]},
            {"data": [NUMBER]},
            {"data": {TEXT: MARKER}},
            {"name": "y"},
            {"ref": MARKER},
            {"ref": {"uri": f"http://127.0.0.1:1/{TEXT}", "sha256": "a" * 64, "nbytes": 24}, "data": None},
            {"ref": {"uri": TEXT, "sha256": TEXT, "nbytes": 24}, "data": None},
        )
    ),
    ("echo", MSGPACK, job(tensor(), tensor(name="more"))),
    ("echo", MSGPACK, job(tensor(), parameters=TEXT)),
    ("echo", MSGPACK, job(tensor(), parameters={"p": [MARKER]})),
    ("echo", MSGPACK, job(tensor(), parameters={"p": {TEXT: 1}})),
    ("words", MSGPACK, job(WORDS | {"data": MARKER})),
    ("words", MSGPACK, job(WORDS | {"data": [TEXT]})),
    ("words", MSGPACK, job(WORDS | {"data": [b"\xff" + MARKER]})),
    ("words", MSGPACK, job(WORDS | {"data": [MARKER, MARKER]})),
    ("words", JSON, b'{"inputs": [{"name": "words", "shape": [1], "datatype": "BYTES", "data": ["' + MARKER + b"\xff"),
    ("echo", JSON, as_json([TEXT] * 6)),
    ("echo", JSON, as_json([[NUMBER, NUMBER]])),
    ("echo", JSON, as_json(TEXT)),
    ("echo", JSON, as_json([NUMBER] * 6, datatype="INT8")),
    ("echo", JSON, as_json([NUMBER + 0.5] * 6, datatype="INT64")),
    ("echo", JSON, as_json([1e300] * 6)),
    ("echo", JSON, as_json([0] * 6)[:-3] + MARKER),
    ("table-a", MSGPACK, packed("table-a", {"ids": np.array([NUMBER], np.int64)})),
    ("no-such-model", MSGPACK, GOOD),
    ("roll", MSGPACK, packed("roll", {"x": np.full((3, 7), NUMBER, np.float32), "times": np.array(NUMBER)})),
]


def mutated(count: int) -> Iterator[bytes]:
    """Good jobs with a few bytes wrong: reproducible."""
    chance = random.Random(7)
    for _ in range(count):
        body = bytearray(GOOD)
        for _ in range(chance.randint(1, 4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        yield bytes(body)


@pytest.mark.parametrize("plane", ["fast", "aio-pika"])
def test_no_payload_in_logs_or_errors(suite_node: SuiteNode, made_up_store: Path, tmp_path: Path, plane: str) -> None:
    """Neither the worker's log at debug level, nor what it answers, nor a dead letter's headers hold any of it."""
    fleet = Fleet(suite_node.fresh_url(), copy_store(made_up_store, tmp_path / "store"), tmp_path / "workers")
    fleet.start(1, log_level="debug", data_plane=plane)
    try:
        with Caller(fleet.url) as caller:
            calls = [caller.send(model, body, content_type=kind) for model, kind, body in BAD]
            calls += [caller.send("echo", body) for body in mutated(60)]
            for model, kind, body in BAD:  # nobody to tell: a dead letter, and its log line
                caller.send(model, body, content_type=kind, reply_to=None)
            caller.send("echo", GOOD, reply_to="gone")
            answers = caller.wait(calls, 60)
            failed = [answer for answer in answers.values() if answer.code != "ok"]
            assert len(failed) > len(BAD) * 0.8
            for answer in failed:
                _clean(json.dumps(answer.fields["error"]), "an answer")
            for _ in range(len(BAD) // 2):
                letter, _, _ = caller.get(DEAD, timeout=20)
                _clean(str(letter.headers), "a dead letter's headers")
            assert caller.call("echo", inputs_of("echo", 1)).code == "ok"
        assert fleet.workers[0].events("job.failed"), "the log says what happened"
    finally:
        for worker in fleet.live():
            worker.terminate()
        exits = [worker.wait_exit() for worker in fleet.workers]
        fleet.stop()
    assert exits == [0]
    _clean(fleet.workers[0].text(), "the log")


def _clean(text: str, where: str) -> None:
    for trace in TRACES:
        at = text.find(trace)
        assert at < 0, f"{where} has {trace!r}: ...{text[max(0, at - 300) : at + 100]}"
