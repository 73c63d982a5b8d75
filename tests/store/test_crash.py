"""The store when writers are killed and disks refuse: whole versions or nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from qworker.errors import ModelNotFound, StoreError
from qworker.store.local import LocalStore
from tests.store.publishing import publish

REPOSITORY = Path(__file__).parents[2]


def test_a_killed_publisher_leaves_whole_versions_or_nothing(tmp_path: Path) -> None:
    """kill -9 at random moments: every version that can be seen is whole, and the rest is cleaned up."""
    store = LocalStore(tmp_path / "store")
    chance = random.Random(11)
    seen = leftovers = 0
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.store.publishing", str(store.root)],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            try:
                writer.wait(chance.uniform(0.01, 0.3))
            except subprocess.TimeoutExpired:
                writer.kill()
        leftovers += len(list(store.incoming.iterdir())) if store.incoming.exists() else 0
        for model in store.models() if store.root.exists() else []:
            for version in store.versions(model):
                assert store.fetch(store.card(model, version)).content is None  # it has weights beside it
                seen += 1
    assert seen, "the test saw published versions"
    assert leftovers, "the test killed in the middle of a publish"
    publish(store, "after")
    assert list(store.incoming.iterdir()) == []


def test_a_living_publisher_is_not_cleaned_up(tmp_path: Path) -> None:
    """Leftovers are told from work in progress by the lock."""
    store = LocalStore(tmp_path / "store")
    with store.stage() as staging:
        source = tmp_path / "source"
        source.write_bytes(b"x")
        staging.add("model.onnx", source)
        publish(store, "other")
        assert (staging.folder / "model.onnx").read_bytes() == b"x"
    assert list(store.incoming.iterdir()) == []


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    """What was staged is deleted when the block ends without a publish."""
    store = LocalStore(tmp_path / "store")
    with pytest.raises(StoreError, match="nowhere"), store.stage() as staging:
        staging.add("model.onnx", tmp_path / "nowhere")
    assert list(store.incoming.iterdir()) == []
    assert store.models() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB. Needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Append to a file until the disk takes nothing more."""
    with path.open("ab", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"x" * 4096)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    """StoreError says what to do, nothing half-written stays, and removing still works."""
    store = LocalStore(small_disk / "store")
    publish(store, "small", content=b"x" * 1000)
    with small_disk.joinpath("filler").open("wb") as filler:
        filler.write(b"x" * (1 << 20))
    source = tmp_path / "large"
    source.write_bytes(b"x" * (3 << 20))
    with pytest.raises(StoreError, match=r"full.*models remove"), store.stage() as staging:
        staging.add("model.onnx", source)
    assert list(store.incoming.iterdir()) == []
    assert store.models() == ["small"]
    fill(small_disk / "filler")
    with pytest.raises(StoreError):
        publish(store, "another", content=b"y" * 100_000)
    assert store.fetch(store.card("small")).content == b"x" * 1000
    small_disk.joinpath("filler").unlink()
    assert store.remove("small") == ["1"]


def test_a_read_only_disk(small_disk: Path) -> None:
    """Reading works, writing is refused with what to do."""
    store = LocalStore(small_disk / "store")
    publish(store, "m")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert store.fetch(store.card("m")).content == b"weights"
    for write in (lambda: publish_directly(store), lambda: store.remove("m")):
        with pytest.raises(StoreError, match="read-only"):
            write()
    assert store.models() == ["m"]


def publish_directly(store: LocalStore) -> None:
    """Enter a staging, which is the first thing that writes."""
    with store.stage():
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_this_user_may_not_write(tmp_path: Path) -> None:
    """The right that is missing is named."""
    store = LocalStore(tmp_path / "store")
    store.root.mkdir(mode=0o555)
    with pytest.raises(StoreError, match="may not"):
        publish_directly(store)


def test_readers_and_a_remover_at_once(tmp_path: Path) -> None:
    """A fetch that races a removal gets the whole model or ModelNotFound, never CorruptModel."""
    store = LocalStore(tmp_path / "store")
    outcomes: set[str] = set()
    for number in range(300):
        card = publish(store, "m", "1", content=b"x" * 200_000, more={"w": b"w" * 200_000}).card
        outcomes.add(_race(store, card.version, number))
        if number >= 20 and len(outcomes) == 2:
            break
    assert outcomes == {"whole", "gone"}


def _race(store: LocalStore, version: str, number: int) -> str:
    """Fetch while another thread removes, with a head start that differs from round to round."""
    card = store.card("m", version)
    remover = threading.Thread(target=lambda: (time.sleep((number % 10) / 2000), store.remove("m")))
    remover.start()
    try:
        store.fetch(card)
        return "whole"
    except ModelNotFound:
        return "gone"
    finally:
        remover.join()
