"""Finding devices, and how much of one a worker takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from qworker.app_backends import MIN_HEADROOM, device_budget
from qworker.config import Settings
from qworker.engine.tensorrt.devices import driver_version, list_devices
from qworker.engine.tensorrt.gpu import open_gpu
from qworker.errors import DeviceUnavailable
from qworker.supervise import worker_command
from tests.support.fakegpu import FakeGpu, fake_gpu

GIB = 1 << 30


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = fake_gpu()
    gpu.mend()
    gpu.present(True)
    yield gpu
    gpu.mend()
    gpu.present(False)


class NvmlError(Exception):
    """NVML's own error."""


class Nvml(SimpleNamespace):
    """NVML of a machine with these GPUs; each is its MIG slices, or None where it is not cut up."""

    NVMLError = NvmlError
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, gpus: list[list[str | None] | None], *, missing: bool = False) -> None:
        super().__init__(gpus=gpus, missing=missing, open=0)

    def nvmlInit(self) -> None:  # noqa: N802
        if self.missing:
            raise NvmlError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: Any) -> bytes:  # noqa: N802
        return handle.encode() if isinstance(handle, str) else f"GPU-{handle}".encode()

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if handle == 0 and self.gpus[0] is None:
            raise NvmlError("Not Supported")
        return [0 if self.gpus[handle] is None else 1, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        return len(self.gpus[handle])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> str:  # noqa: N802
        found = self.gpus[handle][index]
        if found is None:
            raise NvmlError("Not Found")
        return found


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def use(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_all_devices_are_gpus_and_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is cut up counts by its slices, whose places may be empty; NVML is closed again."""
    nvml = Nvml([None, ["MIG-a", None, "MIG-b"], None])
    use(monkeypatch, nvml)
    assert list_devices() == ["GPU-0", "MIG-a", "MIG-b", "GPU-2"]
    assert nvml.open == 0


def test_what_is_visible_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers count among those that are visible, as CUDA counts them; UUIDs are what they are."""
    use(monkeypatch, Nvml([None] * 8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5,GPU-1f")
    assert list_devices() == ["0", "1", "GPU-1f"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceUnavailable, match="CUDA_VISIBLE_DEVICES"):
        list_devices()


def test_without_nvml_cuda_counts(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    """MIG needs NVML; plain GPUs do not."""
    use(monkeypatch, Nvml([], missing=True))
    assert list_devices() == ["0"]
    assert driver_version() is None
    use(monkeypatch, Nvml([]))
    assert driver_version() == "580.65.06"


def test_no_device_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said, and no crash."""
    fake_gpu().present(False)
    use(monkeypatch, Nvml([], missing=True))
    with pytest.raises(DeviceUnavailable, match="no GPU here"):
        list_devices()
    with pytest.raises(DeviceUnavailable, match="CUDA_ERROR_NO_DEVICE"):
        open_gpu()


def test_a_device_that_is_not_there(gpu: FakeGpu) -> None:
    """Named, with how many there are."""
    with pytest.raises(DeviceUnavailable, match="no device 3 here, there are 1"):
        open_gpu("3")
    with pytest.raises(DeviceUnavailable, match="found 'first'"):
        open_gpu("first")


def test_what_decides_about_plans_comes_from_the_device(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute capability and CUDA from the driver, its version from NVML."""
    use(monkeypatch, Nvml([None]))
    facts = open_gpu().facts("11.4.0.106")
    assert (facts.name, facts.compute_capability, facts.cuda) == ("FakeGPU 0", "9.0", "13.0")
    assert (facts.tensorrt, facts.driver) == ("11.4.0.106", "580.65.06")
    assert not facts.trusts_lean_runtimes


@pytest.mark.parametrize(
    ("settings", "free", "expected"),
    [
        ({}, 80 * GIB, 76 * GIB),  # a twentieth is left
        ({}, 10 * GIB, 6 * GIB),  # somebody else has most of it
        ({"memory": 20 * GIB}, 80 * GIB, 20 * GIB),
        ({"memory": 500 * GIB}, 80 * GIB, 76 * GIB),  # never more than it has
        ({"device_headroom": 1 * GIB}, 80 * GIB, 79 * GIB),
    ],
)
def test_the_budget_comes_from_the_device(settings: dict[str, Any], free: int, expected: int) -> None:
    """All that is free less the headroom, or what is asked for if that is less."""
    assert device_budget(Settings(**settings), free=free, total=80 * GIB) == expected


def test_a_full_device_is_refused() -> None:
    """There is no use in a worker that can hold nothing."""
    with pytest.raises(DeviceUnavailable, match="end what else uses it"):
        device_budget(Settings(), free=MIN_HEADROOM, total=8 * GIB)


def test_each_worker_of_a_supervisor_has_its_own_name_device_and_port() -> None:
    """Of two equal options the last one counts."""
    command = worker_command(["worker", "--device", "all", "--http-port", "9000"], "node", 9000)
    assert list(command(1, "MIG-b"))[-6:] == ["--device", "MIG-b", "--name", "node-1", "--http-port", "9001"]
    assert "--http-port" not in worker_command(["worker"], "node", None)(0, "0")
