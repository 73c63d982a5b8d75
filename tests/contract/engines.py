"""The backends under the engine contract, and what sets them apart.

TensorRT runs as its double, on the fake driver: what is tested is our backend, and not TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from qworker.engine.base import Backend
from qworker.engine.onnx import OnnxBackend
from qworker.engine.tensorrt.backend import Options, TensorRtBackend
from qworker.engine.tensorrt.gpu import open_gpu
from qworker.engine.tensorrt.library import library_of
from tests.support.fakegpu import double, fake_gpu

TRT_TYPES = {"BOOL", "UINT8", "INT8", "INT32", "INT64", "FP16", "FP32"}


@dataclass(frozen=True)
class Kind:
    """One backend, and what it takes for the ONNX model of a test."""

    name: str
    backend: Backend
    content: Callable[[bytes], bytes]
    lacks: frozenset[str] = frozenset()

    def needs(self, what: str) -> None:
        """Skip the test where models of this kind cannot exist."""
        if what in self.lacks:
            pytest.skip(f"{self.name} has no {what}: its builder refuses such models")


@contextmanager
def onnx() -> Iterator[Kind]:
    yield Kind("onnx", OnnxBackend(), lambda content: content)


@contextmanager
def tensorrt() -> Iterator[Kind]:
    with tensorrt_backend(Options(arena=128 << 20)) as backend:
        lacks = frozenset(
            {"text", "inputs of any rank", "shapes that values choose", "sizes that it finds out", "external weights"}
        )
        yield Kind("tensorrt", backend, double().build, lacks | set(_other_types()))


@contextmanager
def tensorrt_backend(options: Options) -> Iterator[TensorRtBackend]:
    """A backend on the fake driver; when it is closed, the device must be empty."""
    gpu = fake_gpu()
    gpu.present(True)
    gpu.mend()
    gpu.memory(1 << 30)
    backend = TensorRtBackend(open_gpu(), library_of(double()), options)
    backend.open()
    try:
        yield backend
    finally:
        gpu.mend()
        backend.close()
        gpu.present(False)
        assert gpu.used == 0, f"the test left {gpu.used} bytes on the device"
        assert gpu.pinned == 0


def _other_types() -> set[str]:
    return {"UINT16", "UINT32", "UINT64", "INT16", "FP64"}


KINDS = {"onnx": onnx, "tensorrt": tensorrt}
