"""The GPU of this process: CUDA initialised once, current in each thread that enters, its memory accounted for.

Memory comes from a pool of our own. The device's default pool is TensorRT's, and whatever allocates from it
through ``Device.allocate`` tells it never to give anything back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

from qworker.engine.tensorrt.devices import driver_version
from qworker.errors import DeviceLost, DeviceMemoryFull, DeviceUnavailable
from qworker.policy.plan_choice import DeviceFacts

_NO_MEMORY: Final = {"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"}

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Memory(NamedTuple):
    """Bytes of the device, whoever holds them."""

    free: int
    total: int

    @property
    def used(self) -> int:
        return self.total - self.free


class Gpu:
    """One device. Any thread may call anything here, after :meth:`enter`.

    ``lost`` is set once, by whichever thread meets the error that breaks the process's CUDA context.
    """

    def __init__(self, driver: Any, core: Any, ordinal: int) -> None:
        """Only :func:`open_gpu` makes one: ``driver`` has been initialised, and ``ordinal`` is one of its devices."""
        self.driver = driver
        self.core = core
        self.ordinal = ordinal
        self.lost: str | None = None
        self.quiet = threading.RLock()
        """Held while a graph is captured and while everything is waited for: CUDA forbids the two at once."""
        self._cuda_error = _cuda_error()
        self._here = threading.local()
        self._event_options = core.EventOptions(blocking_sync=True)
        self._stream_options = core.StreamOptions(nonblocking=True)
        with self.errors():
            self._device = core.Device(ordinal)
        self.enter()
        with self.errors():
            self.name = str(self._device.name)
            self.uuid = str(self._device.uuid)
            capability = self._device.compute_capability
            self.compute_capability = f"{capability.major}.{capability.minor}"
            self._pool = core.DeviceMemoryResource(self._device, core.DeviceMemoryResourceOptions())
            self.pinned = core.LegacyPinnedMemoryResource()

    def enter(self) -> None:
        """Make the device current in the calling thread: CUDA keeps that per thread."""
        if not getattr(self._here, "entered", False):
            with self.errors():
                self._device.set_current()
            self._here.entered = True

    def facts(self, tensorrt: str, *, trusts_lean_runtimes: bool = False) -> DeviceFacts:
        """What decides which plans this device takes."""
        cuda = int(self.check(self.driver.cuDriverGetVersion()))
        return DeviceFacts(
            name=self.name,
            compute_capability=self.compute_capability,
            tensorrt=tensorrt,
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            driver=driver_version(),
            trusts_lean_runtimes=trusts_lean_runtimes,
        )

    # --- memory ----------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """What the driver says now."""
        return Memory(*(int(value) for value in self.check(self.driver.cuMemGetInfo())))

    def allocate(self, nbytes: int, stream: Any) -> Any:
        """A buffer from our own pool, 256-byte aligned. Raises DeviceMemoryFull."""
        with self.errors():
            return self._pool.allocate(nbytes, stream=stream)

    def trim(self) -> None:
        """Give what both pools keep back to the device. Waits for everything that runs now."""
        driver = self.driver
        with self.quiet:
            self.check(driver.cuCtxSynchronize())
        self.check(driver.cuMemPoolTrimTo(self._pool.handle, 0))
        self.check(driver.cuMemPoolTrimTo(self.check(driver.cuDeviceGetDefaultMemPool(self.ordinal)), 0))

    # --- streams ---------------------------------------------------------------------------------

    def stream(self) -> Any:
        """A stream that waits for no other one."""
        with self.errors():
            return self._device.create_stream(options=self._stream_options)

    def event(self, stream: Any) -> Any:
        """An event for :meth:`wait`."""
        with self.errors():
            return stream.record(options=self._event_options)

    def wait(self, stream: Any, event: Any) -> None:
        """Sleep until ``stream`` has done all it was told until now. Errors of what ran there come out here."""
        with self.errors():
            stream.record(event)
        self.check(self.driver.cuEventSynchronize(event.handle))

    def drain(self, stream: Any) -> None:
        """Wait for ``stream`` after a failure, so that its memory can be used again."""
        self.check(self.driver.cuStreamSynchronize(stream.handle))

    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.check(self.driver.cuMemcpyHtoDAsync(target, source, nbytes, stream.handle))

    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.check(self.driver.cuMemcpyDtoHAsync(target, source, nbytes, stream.handle))

    # --- errors ----------------------------------------------------------------------------------

    def check(self, answer: tuple[Any, ...]) -> Any:
        """The values of a driver call. Raises DeviceMemoryFull, and DeviceLost for every other error."""
        status, *values = answer
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise self._failure(str(status.name))
        return values[0] if len(values) == 1 else tuple(values)

    def check_alive(self) -> None:
        """Raises DeviceLost when an error has broken the context: any call is answered with it then."""
        self.check(self.driver.cuMemGetInfo())

    @contextmanager
    def errors(self) -> Generator[None]:
        """Turn the errors of cuda.core into ours."""
        try:
            yield
        except self._cuda_error as exc:
            raise self._failure(str(exc).partition(":")[0].strip()) from exc

    def _failure(self, name: str) -> DeviceMemoryFull | DeviceLost:
        if name in _NO_MEMORY:
            return DeviceMemoryFull(f"the device has no memory left for this ({name}): it may have later")
        self.lost = self.lost or name
        return DeviceLost(f"the CUDA driver answered {name}: this process ends, look at the job that ran and at dmesg")


def _cuda_error() -> type[Exception]:
    """What cuda.core raises. It is not public, so that it may move."""
    try:
        return cast("type[Exception]", import_module("cuda.core._utils.cuda_utils").CUDAError)
    except (ImportError, AttributeError):
        return RuntimeError


def open_gpu(selector: str = "0") -> Gpu:
    """The device ``selector``: a number, or the UUID of a GPU or of a MIG slice.

    Call it before anything of TensorRT exists: without a driver, TensorRT's objects crash the process. A UUID
    is the only device that this process can see from then on: CUDA enumerates no more than one MIG slice.
    Raises DeviceUnavailable.
    """
    ordinal = _ordinal(selector)
    try:
        driver, core = import_module("cuda.bindings.driver"), import_module("cuda.core")
    except ImportError as exc:
        raise DeviceUnavailable(f"cuda-python is not installed here ({exc}): pip install 'qworker[gpu]'") from exc
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as exc:  # what looks for libcuda raises one when there is none
        raise DeviceUnavailable("this machine has no NVIDIA driver: serve TensorRT plans on one with a GPU") from exc
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceUnavailable(f"CUDA does not start here ({status.name}): look at nvidia-smi and the system log")
    status, count = driver.cuDeviceGetCount()
    if status != driver.CUresult.CUDA_SUCCESS or count < 1:
        raise DeviceUnavailable("CUDA sees no device here: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    if ordinal >= count:
        raise DeviceUnavailable(f"there is no device {selector} here, there are {count}: choose another --device")
    return Gpu(driver, core, ordinal)


def _ordinal(selector: str) -> int:
    if selector.isdigit():
        return int(selector)
    if not selector.startswith(("GPU-", "MIG-")):
        raise DeviceUnavailable(f"expected a device's number or its UUID (GPU-..., MIG-...); found {selector!r}")
    os.environ[_VISIBLE] = selector
    return 0
