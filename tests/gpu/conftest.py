"""Plans built on the device that is there, and a backend on it. Without a device every test says why it did not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qworker.build.profiles import parse_profiles
from qworker.build.tensorrt import toolkit
from qworker.build.tensorrt_build import build_plan
from qworker.engine.base import ModelSource
from qworker.engine.tensorrt.backend import Options, TensorRtBackend
from qworker.engine.tensorrt.engine import TensorRtEngine
from qworker.engine.tensorrt.gpu import Gpu, open_gpu
from qworker.engine.tensorrt.library import Library, load_library
from qworker.errors import DeviceUnavailable

Make = Callable[..., TensorRtBackend]
Plan = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is ``gpu``."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> tuple[Gpu, Library]:
    """The device and TensorRT, in this order. Skips with what is missing."""
    try:
        gpu = open_gpu()
        if gpu.name.startswith("FakeGPU"):
            pytest.skip("the driver in this process is the fake one: run tests/gpu by itself")
        return gpu, load_library()
    except DeviceUnavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="session")
def plan(device: tuple[Gpu, Library], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Builds a plan of an ONNX model; the same one twice is built once."""
    built: dict[tuple[bytes, tuple[str, ...]], Path] = {}

    def make(onnx: bytes, *profiles: str) -> Path:
        key = (onnx, profiles)
        if key not in built:
            folder = tmp_path_factory.mktemp("plan")
            (folder / "model.onnx").write_bytes(onnx)
            target = folder / "model.engine"
            build_plan(toolkit("trt"), folder / "model.onnx", parse_profiles(profiles), target)
            built[key] = target
        return built[key]

    return make


@pytest.fixture
def make(device: tuple[Gpu, Library]) -> Iterator[Make]:
    """Opens backends, and closes them."""
    with ExitStack() as stack:

        def opened(**options: Any) -> TensorRtBackend:
            backend = TensorRtBackend(*device, Options(**{"arena": 256 << 20, **options}))
            backend.open()
            stack.callback(backend.close)
            return backend

        yield opened


def load(backend: TensorRtBackend, path: Path) -> TensorRtEngine:
    loaded = backend.load(ModelSource("m", "1", path, None))
    backend.warm_up(loaded, None)
    backend.trim()
    return loaded


def unload(backend: TensorRtBackend, *engines: TensorRtEngine) -> None:
    for each in engines:
        each.close()
    backend.trim()
