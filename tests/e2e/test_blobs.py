"""Tensors that travel beside their messages: real workers, a folder as the blob store, our client and a plain one."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray

from qworker import Client
from qworker.broker.base import MessageTooLarge
from qworker.errors import InvalidInput, ResultTooLarge, StoreError
from qworker.store.blobs import Blobs
from qworker.store.depots import FolderDepot
from qworker.wire.topology import BLOBS_HEADER
from tests.e2e.caller import JSON, Caller, packed
from tests.e2e.fleet import Fleet
from tests.e2e.models import copy_store, inputs_of
from tests.support.rabbitmq import SuiteNode
from tests.support.waiting import wait_until_sync

MIB = 1 << 20
LIMIT = 1 * MIB


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The blob store of this file's worker."""
    return tmp_path_factory.mktemp("blobs") / "store"


@pytest.fixture(scope="module")
def shared(
    suite_node: SuiteNode, made_up_store: Path, place: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """One worker with a blob store for all tests of this file."""
    folder = tmp_path_factory.mktemp("with-blobs")
    fleet = Fleet(suite_node.fresh_url(), copy_store(made_up_store, folder / "store"), folder / "workers")
    fleet.environment = {"QWORKER_BLOB_LIMIT": str(LIMIT)}
    fleet.start(1, blob_store=place)
    yield fleet
    try:
        fleet.finish()
    finally:
        fleet.stop()


@pytest.fixture
async def client(shared: Fleet, place: Path) -> AsyncIterator[Client]:
    async with Client(shared.url, blobs=place, blob_limit=LIMIT) as client:
        yield client


@pytest.fixture
def raw(shared: Fleet) -> Iterator[Caller]:
    with Caller(shared.url) as caller:
        yield caller


def numbers(nbytes: int, seed: int = 0) -> NDArray[np.float32]:
    """Inputs of ``echo`` that nobody else sent."""
    return np.random.default_rng(seed).standard_normal((nbytes // 12, 3), np.float32)


def names(place: Path) -> set[str]:
    """All that lies in a store."""
    return {path.name for path in place.iterdir()} if place.exists() else set()


def put(place: Path, content: bytes) -> dict[str, Any]:
    """What a publisher of another kind does: write aside, rename, refer to it."""
    digest = hashlib.sha256(content).hexdigest()
    place.mkdir(parents=True, exist_ok=True)
    (place / "aside").write_bytes(content)
    (place / "aside").rename(place / digest)
    return {"uri": f"{place.as_uri()}/{digest}", "sha256": digest, "nbytes": len(content)}


def referring(ref: dict[str, Any], rows: int) -> bytes:
    return msgpack.packb({"inputs": [{"name": "x", "shape": [rows, 3], "datatype": "FP32", "ref": ref}]})


async def test_more_than_a_message_holds_both_ways(client: Client, shared: Fleet, place: Path) -> None:
    """24 MiB in and out, where the broker's limit and ours are 16: the client does it by itself."""
    x = numbers(24 * MIB)
    result = await client.call("echo", {"x": x}, timeout=60)
    assert (result.arrays()["y"] == x).all()
    assert len(names(place)) == 1, "an echo's answer has the same digest"
    async with Client(shared.url) as without:
        with pytest.raises(MessageTooLarge):
            await without.call("echo", {"x": x})


async def test_small_ones_stay_in_the_message(client: Client, place: Path) -> None:
    """Below the limit nothing is written, in or out."""
    before = names(place)
    x = numbers(LIMIT // 2, seed=1)
    assert ((await client.call("echo", {"x": x})).arrays()["y"] == x).all()
    assert names(place) == before


async def test_json_too(client: Client) -> None:
    """JSON grows, so its tensors leave earlier; the bytes beside it are the same."""
    x = numbers(LIMIT // 2, seed=2)
    result = await client.call("echo", {"x": x}, content_type=JSON, timeout=60)
    assert (result.arrays()["y"] == x).all()


async def test_results_in_a_queue(client: Client) -> None:
    """A reply queue reads what lies beside its messages, too."""
    x = numbers(2 * LIMIT, seed=3)
    async with client.reply_queue() as replies:
        job_id = await client.publish("echo", {"x": x}, reply_to=replies.name, timeout=60)
        reply = await replies.receive()
    assert reply.correlation_id == job_id
    assert (reply.result().arrays()["y"] == x).all()


def test_a_plain_publisher(raw: Caller, place: Path) -> None:
    """Refers to what it put there itself, and is answered in the message: it did not say that it reads the store."""
    x = numbers(2 * LIMIT, seed=4)
    ref = put(place, x.tobytes())
    assert (raw.call_raw("echo", referring(ref, len(x)), timeout=60).y == x).all()
    as_json = {"inputs": [{"name": "x", "shape": [len(x), 3], "datatype": "FP32", "ref": ref}]}
    headers = {BLOBS_HEADER: place.as_uri() + "/"}
    reply = raw.call_raw("echo", json.dumps(as_json).encode(), content_type=JSON, headers=headers, timeout=60)
    assert reply.fields["outputs"][0]["ref"] == ref
    assert "data" not in reply.fields["outputs"][0]


def test_a_requester_that_reads_another_store(raw: Caller, place: Path) -> None:
    """Is answered in the message, or told that it does not fit: never with a ref that it cannot follow."""
    x = numbers(2 * LIMIT, seed=5)
    headers = {BLOBS_HEADER: "s3://theirs/"}
    assert (raw.call("echo", {"x": x}, headers=headers).y == x).all()
    huge = numbers(17 * MIB, seed=6)
    reply = raw.call_raw("echo", referring(put(place, huge.tobytes()), len(huge)), headers=headers, timeout=60)
    assert reply.code == ResultTooLarge.code


def _outside(place: Path, ref: dict[str, Any], port: int) -> dict[str, dict[str, Any]]:
    digest = ref["sha256"]
    return {
        "http": ref | {"uri": f"http://127.0.0.1:{port}/{digest}"},
        "s3": ref | {"uri": f"s3://127.0.0.1:{port}/{digest}"},
        "another file": ref | {"uri": (place.parent / digest).as_uri()},
        "traversal": ref | {"uri": f"{place.as_uri()}/../{digest}"},
        "traversal in the digest": ref | {"uri": f"{place.as_uri()}/../x", "sha256": "../x"},
        "another size": ref | {"nbytes": 12},
        "too many bytes": ref | {"nbytes": 1 << 50},
        "another digest": ref | {"uri": f"{place.as_uri()}/{'0' * 64}", "sha256": "0" * 64},
    }


@pytest.mark.parametrize("what", _outside(Path("/x"), {"sha256": ""}, 0))
def test_what_is_not_allowed_or_not_there(raw: Caller, place: Path, what: str) -> None:
    """A typed failure that does not repeat the URI, nobody is connected to, and a good job passes after it."""
    x = numbers(12_000, seed=7)
    ref = put(place, x.tobytes())
    (place.parent / ref["sha256"]).write_bytes(x.tobytes())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        bad = _outside(place, ref, listener.getsockname()[1])[what]
        reply = raw.call_raw("echo", referring(bad, len(x)), timeout=20)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert reply.code == ("blob_unavailable" if what == "another digest" else "invalid_input"), reply.fields
    assert bad["uri"] not in reply.message
    assert str(place) not in reply.message
    assert raw.call("echo", inputs_of("echo", 1)).code == "ok"


async def test_bytes_that_were_changed(client: Client, raw: Caller, place: Path) -> None:
    """The digest is checked where they are read: by the worker, and by the client."""
    x = numbers(2 * LIMIT, seed=8)
    ref = put(place, x.tobytes())
    (place / ref["sha256"]).write_bytes(numbers(2 * LIMIT, seed=9).tobytes())
    reply = raw.call_raw("echo", referring(ref, len(x)), timeout=20)
    assert reply.code == "invalid_input"
    assert "SHA-256" in reply.message


async def test_a_store_that_is_full(shared: Fleet, tmp_path: Path) -> None:
    """The caller is told before anything is published."""
    store = Blobs([FolderDepot(tmp_path)], quota=LIMIT)
    async with Client(shared.url, blobs=store, blob_limit=LIMIT) as client:
        with pytest.raises(StoreError, match="quota"):
            await client.call("echo", {"x": numbers(2 * LIMIT, seed=10)})


def test_a_worker_cleans_up_and_one_without_a_store_says_so(fleet: Fleet, tmp_path: Path) -> None:
    """What is older than its time to live goes by itself; an answer that has no room in the store goes in the
    message; without a store a ref is bad input, not a crash."""
    place = tmp_path / "short-lived"
    ref = put(place, numbers(12_000).tobytes())
    fleet.environment = {"QWORKER_BLOB_TTL": "1", "QWORKER_BLOB_QUOTA": "1000", "QWORKER_BLOB_LIMIT": "1000"}
    fleet.start(1, blob_store=place)
    wait_until_sync(lambda: not names(place), 20, what="the blob has expired")
    x = numbers(12_000, seed=11)
    with Caller(fleet.url) as raw:
        assert (raw.call("echo", {"x": x}, headers={BLOBS_HEADER: place.as_uri() + "/"}).y == x).all()
    assert fleet.workers[0].events("blobs.not_sent")
    fleet.workers[0].terminate()
    assert fleet.workers[0].wait_exit() == 0
    fleet.environment = {}
    fleet.start(1)
    with Caller(fleet.url) as raw:
        reply = raw.call_raw("echo", referring(ref, 1000), timeout=20)
        assert (reply.code, "blob_store" in reply.message) == (InvalidInput.code, True)
        assert raw.call_raw("echo", packed("echo", inputs_of("echo", 1))).code == "ok"
    fleet.finish()
