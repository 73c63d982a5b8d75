"""Models that the faults need: one that runs for as long as it is told to, and some that are large to load.

They are put into a store with cards of our own making, so that budgets are exact; the real models of
``test_real_models.py`` go through registration and its probe.
"""

from __future__ import annotations

import os
import shutil
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession

from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend
from qworker.store.card import Card, TensorEntry
from qworker.store.local import LocalStore
from tests.support.models import identity, labels, model, value

MIB = 1 << 20
WIDTH = 256
TABLE_BYTES = 48 * MIB
TABLES = ("table-a", "table-b")
SIZES = {"echo": 1 * MIB, "other": 1 * MIB, "roll": 10 * MIB, "words": 1 * MIB, **dict.fromkeys(TABLES, TABLE_BYTES)}
"""What each card says that the model takes."""


def rolling() -> bytes:
    """Rolls the columns of ``x`` by one, ``times`` times: an exact answer after as long as one likes.

    How many make a second is measured (``_rolls_a_second``): machines differ by a factor of five.
    """
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["on_in"], ["on_out"]),
            helper.make_node("MatMul", ["v_in", "shift"], ["v_out"]),
        ],
        "body",
        [
            value("i", TensorProto.INT64, ()),
            value("on_in", TensorProto.BOOL, ()),
            value("v_in", TensorProto.FLOAT, None),
        ],
        [value("on_out", TensorProto.BOOL, ()), value("v_out", TensorProto.FLOAT, None)],
    )
    weights = [
        numpy_helper.from_array(np.roll(np.eye(WIDTH, dtype=np.float32), 1, axis=1), "shift"),
        numpy_helper.from_array(np.array(True), "on"),
    ]
    node = helper.make_node("Loop", ["times", "on", "x"], ["y"], body=body)
    inputs = [value("x", TensorProto.FLOAT, ("n", WIDTH)), value("times", TensorProto.INT64, ())]
    return model([node], inputs, [value("y", TensorProto.FLOAT, ("n", WIDTH))], weights)


def table(name: str) -> bytes:
    """Looks rows up in 48 MiB of noise: takes a while to read, verify and load."""
    rows = helper.make_node("Gather", ["rows", "ids"], ["y"])
    weights = [numpy_helper.from_array(_noise(name), "rows")]
    return model(
        [rows], [value("ids", TensorProto.INT64, ("n",))], [value("y", TensorProto.FLOAT, ("n", WIDTH))], weights
    )


def inputs_of(name: str, k: int, seconds: float = 0.0) -> dict[str, NDArray[Any]]:
    """The ``k``-th inputs; ``roll`` runs for at least about so many seconds on them."""
    if name in TABLES:
        return {"ids": np.array([k, 2 * k, 1], np.int64)}
    if name == "roll":
        x = np.arange(64 * WIDTH, dtype=np.float32).reshape(64, WIDTH) + k
        return {"x": x, "times": np.array(1 + round(seconds * _rolls_a_second()), np.int64)}
    return {"x": np.full((2, 3), k, np.float32)}


@cache
def _rolls_a_second() -> int:
    """The fastest of five looks: beside other work a job then takes longer, but never much less than it should."""
    session = InferenceSession(rolling(), providers=["CPUExecutionProvider"])
    feed = {"x": np.zeros((64, WIDTH), np.float32), "times": np.array(200, np.int64)}
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        session.run(None, feed)
        seconds.append(time.perf_counter() - start)
    return round(200 / min(seconds))


def answer_of(name: str, inputs: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """The only output, ``y``, that is right."""
    if name in TABLES:
        return _noise(name)[inputs["ids"]]
    if name == "roll":
        return np.roll(inputs["x"], int(inputs["times"]), axis=1)
    return inputs["x"]


def fill(root: Path) -> None:
    """Put all of them into a new store."""
    put(root, "echo", identity())
    put(root, "other", identity())
    put(root, "roll", rolling())
    put(root, "words", labels())
    for name in TABLES:
        put(root, name, table(name))


def put(root: Path, name: str, content: bytes, *, resident_bytes: int = 0, loads: bool = True) -> Card:
    """Publish a version with a card that says what it takes. With ``loads=False`` the card says that it is
    one like ``echo``, whatever the bytes are."""
    store = LocalStore(root)
    probe = OnnxBackend().load(ModelSource(name, "1", Path("-"), content if loads else identity()))
    signature = probe.signature
    probe.close()

    def entries(specs: Any) -> tuple[TensorEntry, ...]:
        return tuple(TensorEntry(name=s.name, datatype=s.datatype, shape=s.shape or ()) for s in specs)

    root.mkdir(parents=True, exist_ok=True)
    with store.stage() as staging:
        (staging.folder / "model.onnx").write_bytes(content)
        draft = Card(
            model=name,
            version="1",
            backend="onnx",
            files=(staging.adopt("model.onnx"),),
            inputs=entries(signature.inputs),
            outputs=entries(signature.outputs),
            resident_bytes=resident_bytes or SIZES.get(name, MIB),
            load_seconds=0.1,
            warmed=True,
            runtime="made up by a test",
            created=datetime.now(UTC),
        )
        return staging.publish(draft, choose_version=True).card


def copy_store(source: Path, target: Path) -> Path:
    """A store of a test's own. The files are shared: replace them, never write into them."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def model_file(store: Path, name: str, version: str = "1") -> Path:
    return LocalStore(store).version_folder(name, version) / "model.onnx"


def replace(path: Path, content: bytes) -> None:
    """Put other bytes in a file's place, leaving those who share it alone."""
    aside = path.with_name(path.name + ".new")
    aside.write_bytes(content)
    os.replace(aside, path)


@cache
def _noise(name: str) -> NDArray[np.float32]:
    rows = TABLE_BYTES // (4 * WIDTH)
    return np.random.default_rng(sum(name.encode())).standard_normal((rows, WIDTH), np.float32)
