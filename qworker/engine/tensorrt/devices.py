"""Which GPUs and MIG slices there are, by what selects them, and the driver's version: from NVML.

NVML sees what CUDA hides: CUDA enumerates one MIG slice at most, and counting with it takes a process's choice.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from qworker.errors import DeviceUnavailable


def list_devices() -> list[str]:
    """A selector for each GPU, or for each MIG slice of one that is cut up. Raises DeviceUnavailable for none.

    CUDA_VISIBLE_DEVICES limits them, as everywhere.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        parts = [part.strip() for part in visible.split(",") if part.strip()]
        found = [part if part.startswith(("GPU-", "MIG-")) else str(number) for number, part in enumerate(parts)]
    else:
        found = _from_nvml() or [str(number) for number in range(_count())]
    if not found:
        raise DeviceUnavailable("there is no GPU here: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    return found


def driver_version() -> str | None:
    """The driver's own version, which CUDA does not tell; None where NVML is missing."""
    with _nvml() as nvml:
        return None if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


def _from_nvml() -> list[str]:
    found: list[str] = []
    with _nvml() as nvml:
        if nvml is None:
            return found
        for number in range(int(nvml.nvmlDeviceGetCount())):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            found += _slices(nvml, handle) or [_text(nvml.nvmlDeviceGetUUID(handle))]
    return found


def _slices(nvml: Any, handle: Any) -> list[str]:
    """UUIDs of the MIG slices of one GPU; none where MIG is off or unknown."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
    except nvml.NVMLError:  # a GPU that has no MIG
        return []
    found: list[str] = []
    for number in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # an empty place
            continue
        found.append(_text(nvml.nvmlDeviceGetUUID(part)))
    return found


def _count() -> int:
    """How many devices CUDA sees; it takes no memory of them."""
    try:
        driver = import_module("cuda.bindings.driver")
        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return 0
        return int(driver.cuDeviceGetCount()[1])
    except (ImportError, RuntimeError):
        return 0


@contextmanager
def _nvml() -> Generator[Any]:
    """NVML, or None where it is missing."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
