"""The blob store: what goes in comes out, nothing else can be reached through it, and it stays within its bounds."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import LocalStore, MemoryStore

from qworker.errors import BlobUnavailable, ConfigError, InvalidInput, StoreError
from qworker.store.blobs import Blobs, open_blobs
from qworker.store.depots import Depot, FolderDepot, ObjectDepot, open_depot
from qworker.wire.datatypes import tensor
from qworker.wire.messages import BlobRef, Tensor
from tests.support.waiting import wait_until

CONTENT = b"the bytes of a tensor" * 100


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def large(seed: int = 0, nbytes: int = 1000) -> Tensor:
    return tensor("x", np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8))


@pytest.fixture(params=["folder", "objects in memory", "objects in a folder"])
def depot(request: pytest.FixtureRequest, tmp_path: Path) -> Depot:
    """Each kind of depot, empty. S3 itself is ``ObjectDepot`` over another of obstore's stores."""
    if request.param == "folder":
        return FolderDepot(tmp_path / "blobs")
    store = MemoryStore() if "memory" in request.param else LocalStore(tmp_path, mkdir=True)
    return ObjectDepot(store, "s3://bucket/blobs/")


@pytest.fixture
async def blobs(depot: Depot) -> AsyncIterator[Blobs]:
    opened = Blobs([depot])
    yield opened
    opened.close()


# --- in and out ----------------------------------------------------------------------------------


async def test_what_is_sent_is_fetched(blobs: Blobs) -> None:
    """The largest tensors leave the message; their bytes come back, read-only, under the digest of themselves."""
    small, words = tensor("s", np.zeros(8, np.uint8)), tensor("w", ["a", "bc" * 300])
    sent = await blobs.send((small, large(), words), limit=100)
    assert [t.ref is not None for t in sent] == [False, True, True]
    refs = [t.ref for t in sent if t.ref is not None]
    assert all(ref.uri == blobs.prefix + ref.sha256 for ref in refs)
    found = await blobs.fetch(refs)
    assert bytes(found[refs[0]]) == large().array.tobytes()
    assert [digest_of(bytes(found[ref])) for ref in refs] == [ref.sha256 for ref in refs]
    assert all(view.readonly for view in found.values())


async def test_nothing_leaves_that_fits(blobs: Blobs) -> None:
    """Small tensors cost the store nothing."""
    tensors = (large(nbytes=50), tensor("y", np.zeros(50, np.uint8)))
    assert await blobs.send(tensors, limit=100) == tensors


async def test_the_same_bytes_are_kept_once(blobs: Blobs, depot: Depot) -> None:
    """Content-addressed: sent five times, there once."""
    for _ in range(5):
        await blobs.send((large(),), limit=0)
    assert len(list(depot.entries())) == 1


async def test_an_empty_tensor(blobs: Blobs) -> None:
    """Nobody sends one apart, but a publisher may."""
    digest = digest_of(b"")
    blobs._own.put(digest, b"")
    ref = BlobRef(blobs.prefix + digest, digest, 0)
    assert bytes((await blobs.fetch([ref]))[ref]) == b""


async def test_what_is_not_there(blobs: Blobs) -> None:
    """It may come, or have expired: said to be worth another try."""
    ref = BlobRef(blobs.prefix + digest_of(b"?"), digest_of(b"?"), 1)
    with pytest.raises(BlobUnavailable):
        await blobs.fetch([ref])


@pytest.mark.parametrize("wrong", [b"other bytes", CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"?"])
async def test_other_bytes_than_the_digest_says(blobs: Blobs, depot: Depot, wrong: bytes) -> None:
    """Truncated, longer, or changed in one byte: refused, and no byte of it gets any further."""
    digest = digest_of(CONTENT)
    depot.put(digest, wrong)
    with pytest.raises(InvalidInput, match=r"SHA-256|bytes; its ref says"):
        await blobs.fetch([BlobRef(blobs.prefix + digest, digest, len(CONTENT))])


async def test_a_wrong_size_takes_no_memory(blobs: Blobs, depot: Depot) -> None:
    """A ref that announces a terabyte for a small blob is refused by the blob's own size."""
    digest = digest_of(CONTENT)
    depot.put(digest, CONTENT)
    with pytest.raises(InvalidInput, match=f"has {len(CONTENT)} bytes"):
        await blobs.fetch([BlobRef(blobs.prefix + digest, digest, 1 << 40)])


# --- nothing else can be reached -----------------------------------------------------------------


def _elsewhere(prefix: str, digest: str, secret: Path, port: int) -> dict[str, str]:
    root = prefix.rstrip("/")
    return {
        "another file": secret.as_uri(),
        "traversal": f"{prefix}../{secret.name}",
        "traversal and digest": f"{prefix}../{digest}",
        "percent": f"{prefix}%2e%2e%2f{digest}",
        "double slash": f"{prefix}/{digest}",
        "dot": f"{prefix}./{digest}",
        "below": f"{prefix}sub/{digest}",
        "beside": f"{root}-other/{digest}",
        "no slash": f"{root}{digest}",
        "query": f"{prefix}{digest}?versionId=1",
        "fragment": f"{prefix}{digest}#x",
        "newline": f"{prefix}{digest}\n",
        "null": f"{prefix}{digest}\0",
        "upper case": f"{prefix}{digest.upper()}",
        "digest alone": digest,
        "prefix alone": prefix,
        "path alone": f"{root.removeprefix('file://')}/{digest}",
        "host": f"file://127.0.0.1{root.removeprefix('file://')}/{digest}",
        "another scheme's case": prefix.replace("file", "FILE") + digest,
        "http": f"http://127.0.0.1:{port}/{digest}",
        "https": f"https://127.0.0.1:{port}/{digest}",
        "http with user": f"http://{prefix}@127.0.0.1:{port}/{digest}",
        "metadata service": f"http://169.254.169.254/latest/{digest}",
        "another bucket": f"s3://elsewhere/{digest}",
        "bucket with host": f"s3://127.0.0.1:{port}/{digest}",
        "ftp": f"ftp://127.0.0.1:{port}/{digest}",
        "gopher": f"gopher://127.0.0.1:{port}/_{digest}",
        "data": f"data:,{digest}",
        "empty": "",
    }


@pytest.mark.parametrize("what", _elsewhere("file:///x/", "d", Path("/s"), 1))
async def test_nothing_outside_the_allowed_prefixes(tmp_path: Path, what: str) -> None:
    """Traversal and SSRF: refused by the letter, before any file or socket is opened, in words without the URI."""
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    blobs = Blobs([FolderDepot(tmp_path / "blobs")])
    digest = digest_of(CONTENT)
    (tmp_path / digest).write_bytes(CONTENT)
    (tmp_path / "blobs" / "sub").mkdir(parents=True)
    (tmp_path / "blobs" / "sub" / digest).write_bytes(CONTENT)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    with listener:
        uri = _elsewhere(blobs.prefix, digest, secret, listener.getsockname()[1])[what]
        with pytest.raises(InvalidInput, match="blob store that is allowed") as refused:
            await blobs.fetch([BlobRef(uri, digest, len(CONTENT))])
        with pytest.raises(TimeoutError):
            listener.accept()
    assert not uri or uri not in str(refused.value)
    assert blobs._pool._threads == set(), "a thread was started to read something"


@given(st.text(max_size=300), st.sampled_from(["", "file:///var/blobs/", "s3://b/p/", "s3://b/p"]))
def test_any_uri_is_the_one_or_is_refused(text: str, start: str) -> None:
    """Whatever stands there: only a prefix and the digest, to the letter, is let in."""
    blobs = Blobs([FolderDepot(Path("/var/blobs")), ObjectDepot(MemoryStore(), "s3://b/p/")])
    digest = digest_of(b"x")
    for uri in (start + text, start + text + digest, start + digest + text):
        if uri in ("file:///var/blobs/" + digest, "s3://b/p/" + digest):
            continue
        with pytest.raises(InvalidInput):
            blobs._depot(BlobRef(uri, digest, 1))


def _as_symlink(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _as_pipe(path: Path, target: Path) -> None:
    os.mkfifo(path)


def _as_folder(path: Path, target: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("plant", [_as_symlink, _as_pipe, _as_folder])
async def test_what_somebody_planted_in_the_folder(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    """A link out of the folder, a pipe that would wait for ever, a folder: refused, at once."""
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    (tmp_path / "blobs").mkdir()
    digest = digest_of(CONTENT)
    plant(tmp_path / "blobs" / digest, secret)
    blobs = Blobs([FolderDepot(tmp_path / "blobs")])
    async with asyncio.timeout(10):
        with pytest.raises((InvalidInput, BlobUnavailable)):
            await blobs.fetch([BlobRef(blobs.prefix + digest, digest, len(CONTENT))])
    blobs.close()


async def test_reads_from_all_that_is_allowed_and_writes_to_the_first(tmp_path: Path) -> None:
    """Inputs may come from several stores; results go to one."""
    ours, theirs = FolderDepot(tmp_path / "ours"), FolderDepot(tmp_path / "theirs")
    digest = digest_of(CONTENT)
    theirs.put(digest, CONTENT)
    blobs = Blobs([ours, theirs])
    ref = BlobRef(theirs.prefix + digest, digest, len(CONTENT))
    assert bytes((await blobs.fetch([ref]))[ref]) == CONTENT
    (sent,) = await blobs.send((large(),), limit=0)
    assert sent.ref is not None
    assert sent.ref.uri.startswith(ours.prefix)
    blobs.close()


@pytest.mark.parametrize(
    "place",
    [
        "blobs",
        "../blobs",
        "/var/../etc",
        "/",
        "file://host/var/blobs",
        "file:blobs",
        "http://127.0.0.1/blobs",
        "s3://",
        "s3:///x",
        "s3://b/../c",
        "s3://b//c",
        "s3://b/c?x=1",
        "s3://key:secret@b/c",
        "~/blobs",
    ],
)
def test_places_that_are_none(place: str) -> None:
    """The operator is told what one looks like."""
    with pytest.raises(ConfigError, match="absolute path"):
        open_depot(place)


def test_s3_prefixes() -> None:
    """Bucket and folder are the prefix, with one slash at the end; no connection is made."""
    assert open_depot("s3://bucket").prefix == "s3://bucket/"
    assert open_depot("s3://bucket/a/b/").prefix == "s3://bucket/a/b/"
    assert open_depot("/var/blobs/").prefix == open_depot("file:///var/blobs").prefix == "file:///var/blobs/"
    assert open_blobs(None) is None


def test_s3_speaks_tls_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain endpoint is refused by itself, and nothing is sent to it; AWS_ALLOW_HTTP lets it through."""
    for name, setting in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "r"}.items():
        monkeypatch.setenv(f"AWS_{name}", setting)
    digest = digest_of(CONTENT)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(StoreError):
            open_depot("s3://bucket").put(digest, CONTENT)
        with pytest.raises(TimeoutError):
            listener.accept()
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        listener.settimeout(10)
        writer = threading.Thread(target=_put, args=(open_depot("s3://bucket"), digest))
        writer.start()
        connection, _ = listener.accept()
        assert connection.recv(3) == b"PUT"
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()
        writer.join(10)


def _put(depot: Depot, digest: str) -> None:
    with pytest.raises(StoreError):
        depot.put(digest, CONTENT)


# --- bounds --------------------------------------------------------------------------------------


def age(depot: Depot, seconds: float) -> None:
    """Make all that is in a folder's depot older."""
    assert isinstance(depot, FolderDepot)
    for path in depot._root.iterdir():
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


async def test_what_is_older_than_the_ttl_goes(tmp_path: Path) -> None:
    """By itself while the store is open, with what dead writers left; what was put again since stays."""
    depot = FolderDepot(tmp_path)
    old, again, stranger = digest_of(b"old"), digest_of(b"again"), tmp_path / "README"
    depot.put(old, b"old")
    depot.put(again, b"again")
    (tmp_path / ".unfinished-of-a-dead-writer").write_bytes(b"half")
    stranger.write_text("not ours")
    age(depot, 120)
    depot.put(again, b"again")
    async with Blobs([depot], ttl=60):
        await wait_until(lambda: sorted(p.name for p in tmp_path.iterdir()) == sorted([again, "README"]))


def test_a_blob_that_is_put_again_while_it_expires_stays(tmp_path: Path) -> None:
    """Between the look that found it old and its removal, somebody relies on it anew."""
    depot = FolderDepot(tmp_path)
    digest = digest_of(b"x")
    depot.put(digest, b"x")
    age(depot, 120)
    (seen,) = depot.entries()
    depot.put(digest, b"x")
    assert not depot.expire(seen)
    assert depot.get(digest, 1).tobytes() == b"x"


def test_expiry_of_objects() -> None:
    """The same through obstore; one that another worker removed first is no error."""
    depot = ObjectDepot(MemoryStore(), "s3://b/")
    depot.put(digest_of(b"x"), b"x")
    obstore.put(depot._store, "not-ours", b"y")
    (seen,) = depot.entries()
    time.sleep(0.01)
    depot.put(seen.name, b"x")
    assert not depot.expire(seen)
    (seen,) = depot.entries()
    assert depot.expire(seen)
    assert not depot.expire(seen)
    assert list(depot.entries()) == []


async def test_the_quota(tmp_path: Path) -> None:
    """Never more bytes than that, also of those that others put; what has expired makes room first."""
    depot = FolderDepot(tmp_path)
    blobs = Blobs([depot], quota=2500, ttl=60)
    await blobs.send((large(1),), limit=0)
    depot.put(digest_of(b"z" * 1000), b"z" * 1000)  # another process
    blobs._count._until = 0.0  # the count is a minute old by now
    with pytest.raises(StoreError, match="quota"):
        await blobs.send((large(2),), limit=0)
    assert sum(entry.nbytes for entry in depot.entries()) == 2000
    age(depot, 120)
    await blobs.send((large(2),), limit=0)
    assert sum(entry.nbytes for entry in depot.entries()) == 1000
    blobs.close()


async def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A typed error that says where, and nothing half-written."""
    (tmp_path / "blobs").write_text("a file in its place")
    blobs = Blobs([FolderDepot(tmp_path / "blobs")])
    with pytest.raises(StoreError, match="blob store"):
        await blobs.send((large(),), limit=0)
    blobs.close()


async def test_memory_is_bounded(tmp_path: Path) -> None:
    """Blobs in hand never take more than the room; who finds none waits until a view is dropped, in turn."""
    blobs = Blobs([FolderDepot(tmp_path)], memory=2000)
    refs = [t.ref for seed in range(4) for t in await blobs.send((large(seed),), limit=0) if t.ref is not None]
    one, two = await blobs.fetch(refs[:1]), await blobs.fetch(refs[1:2])
    async with asyncio.TaskGroup() as group:
        third = group.create_task(blobs.fetch(refs[2:3]))
        given_up = group.create_task(blobs.fetch(refs[:1]))
        fourth = group.create_task(blobs.fetch(refs[3:]))
        await wait_until(lambda: len(blobs._room._waiting) == 3)
        given_up.cancel()
        del one
        await wait_until(third.done)
        assert not fourth.done()
        del two
        gc.collect()
        await wait_until(fourth.done)
    assert blobs._room._held == 2000
    third, fourth = third.result(), None
    del third
    await wait_until(lambda: blobs._room._held <= 1000)
    blobs.close()


async def test_reading_does_not_hold_the_loop(tmp_path: Path) -> None:
    """While 64 MiB are read and hashed, the event loop goes on."""
    blobs = Blobs([FolderDepot(tmp_path)])
    (sent,) = await blobs.send((tensor("x", np.zeros(64 << 20, np.uint8)),), limit=0)
    assert sent.ref is not None
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(blobs.fetch([sent.ref]))
        turns = 0
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
    assert turns > 20
    blobs.close()
