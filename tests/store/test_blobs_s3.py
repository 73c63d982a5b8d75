"""The blob store in S3: a real one, on loopback."""

from __future__ import annotations

import datetime as dt
import hashlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import obstore
import pytest
from obstore.store import S3Store

from qworker.errors import BlobUnavailable, InvalidInput, StoreError
from qworker.store.blobs import Blobs
from qworker.store.depots import open_depot
from qworker.wire.datatypes import tensor
from qworker.wire.messages import BlobRef
from tests.support.s3 import PrivateS3, private_s3
from tests.support.waiting import wait_until_sync

MIB = 1 << 20
BUCKET = "tensors"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateS3]:
    """A server with one bucket, for all tests here."""
    with private_s3(tmp_path_factory.mktemp("s3") / "server") as running, pytest.MonkeyPatch.context() as patch:
        for name, setting in running.environment.items():
            patch.setenv(name, setting)
        wait_until_sync(lambda: _made(running), 60, what="the bucket is there and takes objects")
        yield running


def _made(s3: PrivateS3) -> bool:
    store = S3Store(BUCKET, client_options={"allow_http": True}, retry_config={"max_retries": 0})
    url = obstore.sign(store, "PUT", "", dt.timedelta(minutes=1))  # of no object: of the bucket itself
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()  # not yet, or it is there already
    try:
        obstore.put(store, "probe", b"x")
    except obstore.exceptions.BaseError:
        return False
    return True


async def test_what_is_sent_is_fetched(s3: PrivateS3) -> None:
    """24 MiB, in several parts on their way, byte for byte; nothing beside the prefix."""
    blobs = Blobs([open_depot(f"s3://{BUCKET}/qworker/blobs")])
    x = tensor("x", np.random.default_rng(1).integers(0, 255, 24 * MIB, np.uint8))
    (sent,) = await blobs.send((x,), limit=0)
    assert sent.ref is not None
    assert sent.ref.uri == f"s3://{BUCKET}/qworker/blobs/{sent.ref.sha256}"
    assert bytes((await blobs.fetch([sent.ref]))[sent.ref]) == x.array.tobytes()
    assert [entry.name for entry in blobs._own.entries()] == [sent.ref.sha256]
    blobs.close()


async def test_what_is_not_there_or_not_what_it_says(s3: PrivateS3) -> None:
    """Missing is worth another try; other bytes, or another size, are not."""
    depot = open_depot(f"s3://{BUCKET}/bad")
    blobs = Blobs([depot])
    digest = hashlib.sha256(b"right").hexdigest()
    with pytest.raises(BlobUnavailable):
        await blobs.fetch([BlobRef(depot.prefix + digest, digest, 5)])
    depot.put(digest, b"wrong")
    with pytest.raises(InvalidInput, match="SHA-256"):
        await blobs.fetch([BlobRef(depot.prefix + digest, digest, 5)])
    with pytest.raises(InvalidInput, match="has 5 bytes"):
        await blobs.fetch([BlobRef(depot.prefix + digest, digest, 1 << 40)])
    blobs.close()


async def test_old_ones_expire(s3: PrivateS3) -> None:
    """By the time that S3 says; what another worker removed first is no error."""
    depot = open_depot(f"s3://{BUCKET}/old")
    digest = hashlib.sha256(b"x").hexdigest()
    depot.put(digest, b"x")
    blobs = Blobs([depot], ttl=1)
    time.sleep(2.1)  # noqa: ASYNC251  # S3's clock has whole seconds
    assert blobs._sweep() == (1, 1)
    assert list(depot.entries()) == []
    blobs.close()


async def test_refused_credentials(s3: PrivateS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed errors both ways, that show no secret."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    depot = open_depot(f"s3://{BUCKET}/x")
    blobs = Blobs([depot])
    digest = hashlib.sha256(b"x").hexdigest()
    with pytest.raises(StoreError) as put:
        await blobs.send((tensor("x", [1]),), limit=0)
    with pytest.raises(BlobUnavailable) as got:
        await blobs.fetch([BlobRef(depot.prefix + digest, digest, 1)])
    assert "not-the-secret" not in f"{put.value}{got.value}"
    blobs.close()
