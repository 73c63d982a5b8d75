"""Putting versions into a store without a probe: the store does not look into the files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from qworker.store.card import Card, FileEntry, TensorEntry
from qworker.store.local import LocalStore
from qworker.store.staging import Published


def publish(
    store: LocalStore,
    model: str,
    version: str | None = None,
    *,
    content: bytes = b"weights",
    more: Mapping[str, bytes] | None = None,
    sample: str | None = None,
) -> Published:
    """Publish ``content`` as model.onnx, with ``more`` files beside it."""
    tensor = TensorEntry(name="x", datatype="FP32", shape=("n", 3))
    with TemporaryDirectory() as sources, store.stage() as staging:
        entries: list[FileEntry] = []
        for name, body in {"model.onnx": content, **(more or {})}.items():
            Path(sources, name).write_bytes(body)
            entries.append(staging.add(name, Path(sources, name)))
        draft = Card(
            model=model,
            version=version or "1",
            backend="onnx",
            files=tuple(entries),
            sample=sample,
            inputs=(tensor,),
            outputs=(tensor,),
            resident_bytes=1 << 20,
            load_seconds=0.5,
            warmed=True,
            runtime="test 1",
            created=datetime.now(UTC),
        )
        return staging.publish(draft, choose_version=version is None)


def publish_and_remove_for_ever(root: Path) -> None:
    """What the kill test kills: it says "ready", then publishes and removes until then."""
    store = LocalStore(root)
    number = 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        number += 1
        publish(store, f"m{number % 3}", content=bytes([number % 256]) * (1 << 20), more={"more.bin": b"x" * 300_000})
        if number % 4 == 0:
            store.remove(f"m{number % 3}", store.versions(f"m{number % 3}")[0])


if __name__ == "__main__":
    publish_and_remove_for_ever(Path(sys.argv[1]))
