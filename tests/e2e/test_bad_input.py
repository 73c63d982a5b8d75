"""Bad input of every kind, from a plain AMQP client: a typed answer each, and a good job after it passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from qworker.store.local import LocalStore
from qworker.wire.topology import DEAD, RESULTS
from tests.e2e.caller import JSON, Caller, packed
from tests.e2e.fleet import Fleet
from tests.e2e.models import MIB, answer_of, copy_store, inputs_of, model_file, put, replace
from tests.support.models import identity, missing_op
from tests.support.rabbitmq import SuiteNode

GOOD = np.zeros((2, 3), np.float32)
GIANT = 64 << 30


def tensor(**changes: Any) -> bytes:
    """A job for ``echo`` with something changed in its only input."""
    fields = {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": GOOD.tobytes()} | changes
    return msgpack.packb({"inputs": [{key: value for key, value in fields.items() if value is not None}]})


def words(data: object) -> bytes:
    return msgpack.packb({"inputs": [{"name": "words", "shape": [1], "datatype": "BYTES", "data": data}]})


ARRAY = packed("echo", {"x": GOOD})
BAD: dict[str, tuple[str, bytes]] = {
    "empty": ("echo", b""),
    "no MessagePack": ("echo", b"\xc1 is never used"),
    "no map": ("echo", msgpack.packb([1, 2, 3])),
    "truncated": ("echo", ARRAY[:-7]),
    "something after it": ("echo", ARRAY + b"\x00"),
    "1 GiB announced": ("echo", b"\x81\xa6inputs\xc6\x40\x00\x00\x00"),
    "an array of 4 billion announced": ("echo", b"\x81\xa6inputs\xdd\xff\xff\xff\xff"),
    "nested 10,000 deep": ("echo", b"\x91" * 10_000 + b"\xc0"),
    "nested 10,000 deep in a field": ("echo", b"\x81\xa6inputs" + b"\x91" * 10_000 + b"\xc0"),
    "maps nested 10,000 deep": ("echo", b"\x81\xa1a" * 10_000 + b"\xc0"),
    "no inputs": ("echo", msgpack.packb({"id": "x"})),
    "missing input": ("echo", packed("echo", {})),
    "extra input": ("echo", packed("echo", {"x": GOOD, "more": GOOD})),
    "misnamed input": ("echo", packed("echo", {"y": GOOD})),
    "wrong dtype": ("echo", packed("echo", {"x": GOOD.astype(np.float64)})),
    "no dtype of ours": ("echo", tensor(datatype="COMPLEX64")),
    "wrong rank": ("echo", packed("echo", {"x": GOOD.reshape(1, 2, 3)})),
    "wrong fixed size": ("echo", packed("echo", {"x": np.zeros((2, 4), np.float32)})),
    "scalar": ("echo", packed("echo", {"x": np.zeros((), np.float32)})),
    "shape larger than the data": ("echo", tensor(shape=[4, 3])),
    "shape smaller than the data": ("echo", tensor(shape=[1, 3])),
    "negative dim": ("echo", tensor(shape=[-2, 3])),
    "huge dims": ("echo", tensor(shape=[2**62, 2**62])),
    "huge dims whose product wraps to 24": ("echo", tensor(shape=[2**32, 2**32, 3])),
    "NaN in the shape": ("echo", tensor(shape=[float("nan"), 3])),
    "text in the shape": ("echo", tensor(shape=["2", 3])),
    "shape of 100,000 dims": ("echo", tensor(shape=[1] * 100_000)),
    "data of numbers": ("echo", tensor(data=[0.0] * 6)),
    "no data": ("echo", tensor(data=None)),
    "10,000 inputs": ("echo", packed("echo", {f"x{k}": GOOD for k in range(10_000)})),
    "name of a megabyte": ("echo", tensor(name="x" * MIB)),
    "another model's name": ("echo", packed("other", {"x": GOOD})),
    "version that is not there": ("echo", packed("echo", {"x": GOOD}, model_version="77")),
    "output that is not there": ("echo", packed("echo", {"x": GOOD}, outputs=[{"name": "z"}])),
    "BYTES that is not a list": ("words", words(b"Hund")),
    "BYTES of numbers": ("words", words([1])),
    "BYTES that are no text": ("words", words([b"\xff\xfe"])),
}
BAD_JSON = {
    "no JSON": b'{"inputs": [',
    "no object": b"[1, 2]",
    "nested 10,000 deep": b'{"inputs": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "NaN in the shape": b'{"inputs": [{"name": "x", "shape": [NaN, 3], "datatype": "FP32", "data": [0]}]}',
    "a number of a million digits": b'{"inputs": [{"name": "x", "shape": [' + b"9" * 1_000_000 + b"]}]}",
    "no UTF-8": b'{"inputs": [{"name": "\xff"}]}',
}


@pytest.fixture(scope="module")
def shared(suite_node: SuiteNode, made_up_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two workers for all tests of this file, with some models that cannot be served."""
    folder = tmp_path_factory.mktemp("bad-input")
    store = copy_store(made_up_store, folder / "store")
    for name in ("truncated", "flipped", "emptied", "deleted", "doomed"):
        put(store, name, identity())
    put(store, "alien", missing_op(), loads=False)
    put(store, "giant", identity(), resident_bytes=GIANT)
    fleet = Fleet(suite_node.fresh_url(), store, folder / "workers")
    fleet.start(2)
    yield fleet
    try:
        fleet.finish(errors_allowed={"model.load_failed", "model.refused"})
    finally:
        fleet.stop()


@pytest.fixture
def raw(shared: Fleet) -> Iterator[Caller]:
    with Caller(shared.url) as caller:
        yield caller


def a_good_job_passes(caller: Caller, k: int = 5) -> None:
    reply = caller.call("echo", inputs_of("echo", k), timeout=20)
    assert (reply.y == answer_of("echo", inputs_of("echo", k))).all()


@pytest.mark.parametrize("what", BAD)
def test_bad_body(raw: Caller, what: str) -> None:
    """Answered with invalid_input, in words that do not repeat what was sent; then a good job passes."""
    model, body = BAD[what]
    reply = raw.call_raw(model, body, timeout=20)
    assert reply.code == "invalid_input", reply.fields
    assert not reply.fields["error"]["retryable"]
    assert 10 < len(reply.message) < 4096
    a_good_job_passes(raw)


@pytest.mark.parametrize("what", BAD_JSON)
def test_bad_json(raw: Caller, what: str) -> None:
    """The same in JSON, and the answer is JSON."""
    reply = raw.call_raw("echo", BAD_JSON[what], content_type=JSON, timeout=20)
    assert reply.content_type == JSON
    assert reply.code == "invalid_input", reply.fields
    a_good_job_passes(raw)


def test_engine_refuses_the_values(raw: Caller) -> None:
    """What only the engine can see comes back as the job's failure, and the engine lives on."""
    reply = raw.call("roll", {"x": np.zeros((0, 256), np.float32), "times": np.array(-5, np.int64)}, timeout=20)
    assert reply.code in ("ok", "invalid_input", "inference_failed")
    reply = raw.call("roll", inputs_of("roll", 1), timeout=20)
    assert (reply.y == answer_of("roll", inputs_of("roll", 1))).all()


def test_unknown_model(raw: Caller) -> None:
    """A job for a model that nobody registered is answered and kept as a dead letter."""
    job_id = raw.job("no-such-model", {"x": GOOD})
    assert raw.wait([job_id])[job_id].code == "unknown_model"
    letter, body, key = raw.get(DEAD)
    assert (key, letter.message_id, body) == ("no-such-model", job_id, packed("no-such-model", {"x": GOOD}))
    assert letter.headers["x-qworker-cause"] == "unknown_model"
    a_good_job_passes(raw)


@pytest.mark.parametrize("key", ["../../etc/passwd", "a..b", "", "#", "*.*", "x" * 250])
def test_key_that_is_no_model_id(raw: Caller, key: str) -> None:
    """Whatever the routing key is, it is no model: answered as such."""
    job_id = raw.send(key, ARRAY)
    assert raw.wait([job_id])[job_id].code == "unknown_model"
    assert raw.get(DEAD)[0].message_id == job_id
    a_good_job_passes(raw)


def test_bad_job_without_reply_to(raw: Caller) -> None:
    """Nobody to tell: the job is kept as it came, with why, where and when in its headers."""
    sent_at = time.time()
    job_id = raw.send("echo", BAD["truncated"][1], reply_to=None, headers={"mine": "kept"})
    letter, body, key = raw.get(DEAD)
    assert (body, key, letter.message_id) == (BAD["truncated"][1], "echo", job_id)
    assert letter.headers["x-qworker-cause"] == "invalid_input"
    assert "truncated" in letter.headers["x-qworker-reason"]
    assert letter.headers["x-qworker-model"] == "echo"
    assert letter.headers["x-qworker-worker"].startswith("worker-")
    assert letter.headers["x-qworker-attempts"] == 1
    assert sent_at - 1 < letter.headers["x-qworker-at"] / 1000 < time.time() + 1
    assert letter.headers["mine"] == "kept"
    a_good_job_passes(raw)


def test_good_job_without_reply_to(raw: Caller) -> None:
    """Its result goes to the results exchange, by the model's id."""
    mine = raw.channel.queue_declare("", exclusive=True).method.queue
    raw.channel.queue_bind(mine, RESULTS, "echo")
    job_id = raw.job("echo", inputs_of("echo", 4), reply_to=None)
    properties, body, key = raw.get(mine)
    assert (key, properties.correlation_id) == ("echo", job_id)
    assert msgpack.unpackb(body)["outputs"][0]["data"] == answer_of("echo", inputs_of("echo", 4)).tobytes()


@pytest.mark.parametrize("body", [ARRAY, BAD["no map"][1]], ids=["good job", "bad job"])
def test_reply_queue_gone(raw: Caller, body: bytes) -> None:
    """The answer has nowhere to go: the job is a dead letter with the cause reply_gone."""
    job_id = raw.send("echo", body, reply_to="a-queue-that-was-deleted")
    letter, kept, _ = raw.get(DEAD)
    assert (letter.message_id, kept) == (job_id, body)
    assert letter.headers["x-qworker-cause"] == "reply_gone"
    a_good_job_passes(raw)


def test_deadline_that_has_passed(raw: Caller) -> None:
    """A job that comes too late is not run."""
    late = {"x-deadline": int((time.time() - 5) * 1000)}
    reply = raw.call("echo", inputs_of("echo", 1), headers=late)
    assert reply.code == "deadline_exceeded"
    in_time = {"x-deadline": int((time.time() + 60) * 1000)}
    assert raw.call("echo", inputs_of("echo", 1), headers=in_time).code == "ok"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-deadline": "soon"},
        {"x-deadline": True},
        {"x-published": "yesterday"},
        {"x-published": -(2**62)},
        {"x-delivery-count": -9},
        {"x-delivery-count": 50},
        {"x-acquired-count": 50},
    ],
    ids=str,
)
def test_headers_that_make_no_sense(raw: Caller, headers: dict[str, Any]) -> None:
    """A header that is not what it should be is not held against the job.

    A count of deliveries comes from a dead letter that somebody published again: those were of another life.
    """
    assert raw.call("echo", inputs_of("echo", 1), headers=headers).code == "ok"


@pytest.mark.parametrize("name", ["truncated", "flipped", "emptied", "deleted"])
def test_model_file_is_damaged_and_repaired(raw: Caller, shared: Fleet, name: str) -> None:
    """Jobs fail with the reason while the file is bad, others are unharmed, and the same bytes heal it."""
    path = model_file(shared.store, name)
    whole = path.read_bytes()
    if name == "deleted":
        path.unlink()
    else:
        broken = {"truncated": whole[:-9], "flipped": whole[:-9] + b"?" + whole[-8:], "emptied": b""}[name]
        replace(path, broken)
    reply = answered_while_calling_again(raw, name)
    assert reply.code == "model_unavailable"
    assert reply.fields["error"]["retryable"]
    assert str(path) in reply.message
    a_good_job_passes(raw)
    replace(path, whole)
    deadline = time.monotonic() + 20
    while (reply := answered_while_calling_again(raw, name)).code != "ok":
        assert reply.code == "model_unavailable"
        assert time.monotonic() < deadline, "it was not tried again"
    assert (reply.y == GOOD).all()


def answered_while_calling_again(caller: Caller, name: str) -> Any:
    """The first answer when somebody asks again and again, as clients do."""
    jobs: list[str] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        jobs.append(caller.job(name, {"x": GOOD}))
        caller.listen(0.3)
        answered = [job for job in jobs if job in caller.replies.by_id]
        if answered:
            caller.wait(jobs)
            return caller.replies.by_id[jobs[-1]][0]
    raise AssertionError(f"no job for {name} was answered within 30 s")


def test_model_that_the_library_does_not_load(raw: Caller) -> None:
    """Verified bytes that onnxruntime refuses: the failure has its words, at once and every time."""
    for _ in range(2):
        reply = raw.call("alien", {"x": GOOD}, timeout=20)
        assert reply.code == "model_unavailable"
        assert "Levitate" in reply.message
    a_good_job_passes(raw)


def test_model_larger_than_the_budget(raw: Caller) -> None:
    """A model that can never fit is answered with both figures, and evicts nobody."""
    reply = raw.call("giant", {"x": GOOD}, timeout=20)
    assert reply.code == "model_too_large"
    assert str(512 * MIB) in reply.message
    a_good_job_passes(raw)


def test_model_removed_while_its_queue_exists(raw: Caller, shared: Fleet) -> None:
    """Its queue is still there, and whoever asks is told that the model is not."""
    LocalStore(shared.store).remove("doomed")
    job_id = raw.job("doomed", {"x": GOOD})
    assert raw.wait([job_id])[job_id].code == "unknown_model"
    assert raw.get(DEAD)[0].message_id == job_id
    a_good_job_passes(raw)


def test_model_registered_after_the_start(raw: Caller, shared: Fleet) -> None:
    """The first job has no queue yet: a worker makes it, and the job is answered."""
    put(shared.store, "late/comer", identity())
    reply = raw.call("late/comer", {"x": GOOD + 2}, timeout=20)
    assert (reply.y == GOOD + 2).all()


def test_batch_lane(raw: Caller) -> None:
    """A job in the batch lane is answered by a cold model and by a hot one, though no such queue was there."""
    for model in ("other", "other", "echo"):
        reply = raw.call(model, {"x": GOOD + 3}, exchange="qworker.batch", timeout=20)
        assert (reply.y == GOOD + 3).all()
    a_good_job_passes(raw)
