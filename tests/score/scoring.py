"""``qworker score`` as a user runs it, models for it, and files with known answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from qworker.build.register import register
from qworker.score.readers import as_column
from qworker.store.local import LocalStore
from tests.e2e.fleet import COMMAND, ROOT
from tests.support.models import identity, labels, model, value

TABLE_ROWS = 1000


def lookup() -> bytes:
    """Looks a row up by its number, and fails for numbers that it does not have."""
    table = np.arange(TABLE_ROWS, dtype=np.float32)
    node = helper.make_node("Gather", ["table", "ids"], ["y"])
    weights = [numpy_helper.from_array(table, "table")]
    return model([node], [value("ids", TensorProto.INT64, ("n",))], [value("y", TensorProto.FLOAT, ("n",))], weights)


def doubled() -> bytes:
    """y = 2 x."""
    node = helper.make_node("Add", ["x", "x"], ["y"])
    return model([node], [value("x", TensorProto.FLOAT, ("n", 3))], [value("y", TensorProto.FLOAT, ("n", 3))])


MODELS = {"echo": identity, "double": doubled, "lookup": lookup, "words": labels}


def registered_store(folder: Path) -> Path:
    """Models put in as an operator does it: probed, measured, and their rows verified."""
    store = LocalStore(folder / "store")
    for name, make in MODELS.items():
        path = folder / f"{name}.onnx"
        path.write_bytes(make())
        sample = None
        if name == "words":
            sample = folder / "words.npz"
            np.savez(sample, words=np.array(["cat", "hund", "x"]))
        register(store, path, name, None, sample)
    return folder / "store"


@dataclass(slots=True)
class Ended:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        """Its JSON."""
        assert self.out.startswith("{"), (self.code, self.out, self.err)
        return json.loads(self.out)

    @property
    def error(self) -> str:
        return self.told["error"]["code"]

    @property
    def message(self) -> str:
        return self.told["error"]["message"]


class Scoring:
    """Runs the command; ``start`` does not wait for it."""

    def __init__(self, url: str, store: Path, folder: Path) -> None:
        self.url, self.store, self.folder = url, store, folder
        self._started: list[subprocess.Popen[str]] = []

    def stop(self) -> None:
        """End whatever still runs."""
        for process in self._started:
            process.kill()
            process.communicate()

    def start(self, *arguments: object, **more: str) -> subprocess.Popen[str]:
        environment = {key: text for key, text in os.environ.items() if not key.startswith("QWORKER_")}
        environment |= {"PYTHONPATH": str(ROOT), **more}
        command = [*COMMAND, "score", "--json", "--store", str(self.store), "--broker", self.url, *map(str, arguments)]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever starts the tests in the background has interrupts ignored, and children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        self._started.append(process)
        return process

    def run(self, *arguments: object, timeout: float = 60.0, **more: str) -> Ended:
        return self.ended(self.start(*arguments, **more), timeout)

    def ended(self, process: subprocess.Popen[str], timeout: float = 60.0) -> Ended:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"still running after {timeout:g} s: {process.communicate()}") from None
        assert "Traceback" not in err, err
        return Ended(process.returncode, out, err)


def rows_of(count: int, width: int = 3) -> NDArray[np.float32]:
    """Rows that tell their own number."""
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def write_rows(path: Path, count: int, **columns: Any) -> Path:
    """A file with ids, rows of three numbers ``x``, and more columns."""
    table = pa.table({"id": [f"r{i}" for i in range(count)], "x": as_column(rows_of(count)), **columns})
    pq.write_table(table, path, row_group_size=max(1, count // 5))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of an output, in its order."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with np.load(path) as archive:
        names = archive.files
        return [dict(zip(names, row, strict=True)) for row in zip(*(archive[n].tolist() for n in names), strict=True)]


def check_rows(found: Iterable[dict[str, Any]], count: int, *, ordered: bool = False, factor: float = 1.0) -> None:
    """Each row once, with its own result."""
    rows = list(found)
    numbers = [row["row"] for row in rows]
    assert sorted(numbers) == list(range(count)), f"{len(numbers)} rows, {len(set(numbers))} different"
    assert not ordered or numbers == list(range(count)), "not in order"
    x = rows_of(count) * factor
    assert all(row["y"] == x[row["row"]].tolist() for row in rows)
