"""The models of a chaos run: small ones that each take a third of a budget, a slow one, and large ones to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.e2e import models as made_up
from tests.e2e.models import MIB, TABLES
from tests.support.models import model, value

SMALL = tuple(f"add-{n}" for n in range(6))
SMALL_BYTES = 16 * MIB
"""What their cards say: four fit into 64 MiB, and two beside a table do not."""
SLOW = "roll"
LARGE = TABLES
ALL = (*SMALL, SLOW, *LARGE)
BUDGET = 64 * MIB
STORE_BYTES = 192 * MIB


def fill(store: Path, models: tuple[str, ...] = ALL) -> None:
    """Publish them into a new store."""
    for name in models:
        content = adding(_number(name)) if name in SMALL else rolling_or_table(name)
        made_up.put(store, name, content, resident_bytes=SMALL_BYTES if name in SMALL else 0)


def rolling_or_table(name: str) -> bytes:
    return made_up.rolling() if name == SLOW else made_up.table(name)


def adding(number: int) -> bytes:
    """y = x + number."""
    node = helper.make_node("Add", ["x", "number"], ["y"])
    weights = [numpy_helper.from_array(np.array(number, np.float32), "number")]
    dims = ("n", 3)
    return model([node], [value("x", TensorProto.FLOAT, dims)], [value("y", TensorProto.FLOAT, dims)], weights)


def inputs_of(name: str, k: int, seconds: float = 0.0) -> dict[str, NDArray[Any]]:
    return made_up.inputs_of(name, k, seconds)


def is_answer(name: str, k: int, y: NDArray[Any], seconds: float = 0.0) -> bool:
    """Whether ``y`` is the answer to the ``k``-th inputs."""
    inputs = inputs_of(name, k, seconds)
    wanted = inputs["x"] + _number(name) if name in SMALL else made_up.answer_of(name, inputs)
    return y.shape == wanted.shape and bool((y == wanted).all())


def _number(name: str) -> int:
    return 1 + SMALL.index(name)
