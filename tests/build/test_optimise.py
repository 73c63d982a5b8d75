"""What a library has optimised is kept beside the model, where that makes loads faster and changes no answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from qworker.build.register import OPTIMISED, register
from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend, host
from qworker.errors import CorruptModel
from qworker.store.card import Card
from qworker.store.local import LocalStore
from qworker.wire.datatypes import tensor
from tests.support import models
from tests.support.models import model, value

NODES = 3000


def foldable(last: str = "Identity") -> bytes:
    """y = x + 3000, where the 3000 is the work of as many nodes that come down to one constant.

    ``last``: what x goes through first.
    """
    nodes = [helper.make_node(last, ["x"], ["seen"])]
    nodes += [helper.make_node("Add", [f"c{k}", "one"], [f"c{k + 1}"]) for k in range(NODES)]
    nodes.append(helper.make_node("Add", ["seen", f"c{NODES}"], ["y"]))
    weights = [
        numpy_helper.from_array(np.array([number], np.float32), name) for name, number in (("c0", 0), ("one", 1))
    ]
    shape = ("n", 3)
    return model(nodes, [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, shape)], weights)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def put(folder: Path, content: bytes) -> Card:
    """Register a model of these bytes."""
    path = folder.parent / "model.onnx"
    path.write_bytes(content)
    return register(LocalStore(folder), path, "m")


def test_a_model_that_gains_is_loaded_in_its_optimised_form(folder: Path) -> None:
    """On a host like the one that registered it; the answers are those of the model."""
    card = put(folder, foldable())
    assert card.optimised is not None
    assert card.optimised.host == host()
    assert [entry.name for entry in card.given_files] == ["model.onnx", "warmup.npz"]
    fetched = LocalStore(folder, host()).fetch(card)
    assert fetched.optimised
    assert fetched.path.name == OPTIMISED
    assert fetched.content == fetched.path.read_bytes()
    source = ModelSource("m", "1", fetched.path, fetched.content, optimised=True)
    engine = OnnxBackend().load(source)
    (y,) = engine.run([tensor("x", np.zeros((2, 3), np.float32))])
    assert (y.array == NODES).all()
    engine.close()


@pytest.mark.parametrize("host", ["", "onnxruntime 1.2.3 x86_64 avx2"])
def test_another_host_loads_the_model_itself(folder: Path, host: str) -> None:
    """Its file is verified and read, and nothing of the other one is."""
    card = put(folder, foldable())
    (folder / "models" / "m" / "1" / OPTIMISED).unlink()
    fetched = LocalStore(folder, host).fetch(card)
    assert not fetched.optimised
    assert fetched.content == foldable()


def test_a_damaged_optimised_file_is_not_loaded(folder: Path) -> None:
    """It is verified as the model is."""
    card = put(folder, foldable())
    path = folder / "models" / "m" / "1" / OPTIMISED
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptModel, match="optimised"):
        LocalStore(folder, host()).fetch(card)


@pytest.mark.parametrize(
    "content",
    [models.identity(), foldable("RandomNormalLike")],
    ids=["nothing to gain", "answers that differ from run to run"],
)
def test_a_model_that_does_not_gain_has_no_such_file(folder: Path, content: bytes) -> None:
    """One that is as fast without, and one whose answers cannot be compared."""
    card = put(folder, content)
    assert card.optimised is None
    assert not (folder / "models" / "m" / "1" / OPTIMISED).exists()


def test_registered_again_it_is_the_same(folder: Path) -> None:
    """What was made of the model here does not make it another one."""
    assert put(folder, foldable()) == put(folder, foldable())
