"""The TensorRT backend on the fake driver, in a test's hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qworker.engine.base import ModelSource
from qworker.engine.tensorrt.backend import Options, TensorRtBackend
from qworker.engine.tensorrt.engine import TensorRtEngine
from qworker.wire.datatypes import tensor
from qworker.wire.messages import Tensor
from tests.contract.engines import tensorrt_backend
from tests.support import models
from tests.support.fakegpu import FakeGpu, double, fake_gpu

MIB = 1 << 20
ARENA = 64 * MIB

Make = Callable[..., TensorRtBackend]


@pytest.fixture
def gpu() -> FakeGpu:
    return fake_gpu()


@pytest.fixture
def make() -> Iterator[Make]:
    """Opens backends; at the end each has given everything back, or the test fails."""
    with ExitStack() as stack:

        def opened(**options: Any) -> TensorRtBackend:
            return stack.enter_context(tensorrt_backend(Options(**{"arena": ARENA, **options})))

        yield opened


@pytest.fixture
def backend(make: Make) -> TensorRtBackend:
    return make()


def plan(onnx: bytes | None = None, **more: Any) -> bytes:
    """A plan of a small model: the sum, difference and product of two inputs."""
    return double().build(models.arithmetic() if onnx is None else onnx, **more)


def source(content: bytes, model: str = "m") -> ModelSource:
    return ModelSource(model, "1", Path("plan.engine"), content)


def load(backend: TensorRtBackend, content: bytes | None = None, model: str = "m", **more: Any) -> TensorRtEngine:
    """Loaded and warm."""
    loaded = backend.load(source(plan(**more) if content is None else content, model))
    try:
        backend.warm_up(loaded, None)
        backend.trim()
    except BaseException:
        loaded.close()
        backend.trim()
        raise
    return loaded


def unload(backend: TensorRtBackend, *loaded: TensorRtEngine) -> None:
    for each in loaded:
        each.close()
    backend.trim()


def numbers(value: float, rows: int = 1) -> list[Tensor]:
    """Inputs of ``arithmetic``."""
    array = np.full((rows, 2), value, np.float32)
    return [tensor("in/a:0", array), tensor("b", array)]


def total(loaded: TensorRtEngine, value: float, rows: int = 1) -> float:
    """Runs ``arithmetic``: twice the value."""
    (answer,) = loaded.run(numbers(value, rows), ("sum:0",))
    assert answer.array.shape == (rows, 2)
    return float(answer.array[0, 0])
