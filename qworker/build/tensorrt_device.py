"""The GPU that a plan is built on: what it is, and what a plan takes of it once loaded.

Nothing of TensorRT may exist before ``find_device`` has found a driver and a device: without a driver its
objects crash the process.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from qworker.build.profiles import Profile
from qworker.build.tensorrt import Toolkit, toolkit
from qworker.errors import ModelRefused
from qworker.policy.plan_choice import DeviceFacts
from qworker.store.card import BatchTime

_WARM_UPS: Final = 3
_RUNS: Final = 20
_SCRATCH_ALIGNMENT: Final = 256


@dataclass(frozen=True, slots=True)
class Measured:
    """What a loaded plan takes and how fast it is; see the card's fields of the same names."""

    weights_bytes: int
    context_bytes: tuple[int, ...]
    io_bytes: tuple[int, ...]
    free_memory_delta: int
    load_seconds: float
    batch_ms: tuple[BatchTime, ...]


def find_device(index: int = 0) -> DeviceFacts:
    """The device, and the versions beside it. Raises ModelRefused saying what is missing here."""
    driver, number = _open_device(index)
    attribute = driver.CUdevice_attribute
    major, minor = (
        _ok(driver, driver.cuDeviceGetAttribute(each, number))
        for each in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    cuda = int(_ok(driver, driver.cuDriverGetVersion()))
    return DeviceFacts(
        name=_ok(driver, driver.cuDeviceGetName(128, number)).split(b"\0")[0].decode(errors="replace"),
        compute_capability=f"{major}.{minor}",
        tensorrt=_tensorrt_version(),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        driver=_driver_version(),
    )


def measure(kit: Toolkit, plan: Path, profiles: Sequence[Profile], index: int = 0) -> Measured:
    """Load a plan as a worker does, run it at each profile's best and largest shapes, and free it again.

    Blocks; to be called in the thread that built the plan. Raises ModelRefused when it does not load or run.
    """
    driver, _ = _open_device(index)
    core = import_module("cuda.core")
    device = core.Device(index)
    device.set_current()
    runtime = kit.trt.Runtime(kit.logger)
    content = plan.read_bytes()
    before, _ = _ok(driver, driver.cuMemGetInfo())
    started = time.perf_counter()
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise ModelRefused(f"{kit.name} does not load the plan that it built: {kit.complaints}")
    load_seconds = time.perf_counter() - started
    numbers = range(engine.num_optimization_profiles)
    with _Bench(kit, core, device, engine) as bench:
        times = [each for i in numbers for each in bench.times(i, profiles[i] if i < len(profiles) else {})]
        after, _ = _ok(driver, driver.cuMemGetInfo())
        return Measured(
            weights_bytes=int(engine.get_engine_stat(kit.trt.EngineStat.TOTAL_WEIGHTS_SIZE)),
            context_bytes=tuple(int(engine.get_device_memory_size_for_profile_v2(i)) for i in numbers),
            io_bytes=tuple(bench.io_bytes),
            free_memory_delta=max(0, int(before) - int(after)),
            load_seconds=load_seconds,
            batch_ms=tuple(times),
        )


class _Bench:
    """One execution context with memory of its own."""

    def __init__(self, kit: Toolkit, core: Any, device: Any, engine: Any) -> None:
        self._kit = kit
        self._trt = kit.trt
        self._core = core
        self._device = device
        self._engine = engine
        self._context: Any = None
        self.io_bytes: list[int] = []

    def __enter__(self) -> _Bench:
        core = self._core
        # a pool of our own: that of Device.allocate() never gives anything back
        self._memory = core.DeviceMemoryResource(self._device, core.DeviceMemoryResourceOptions())
        self._stream = self._device.create_stream(options=core.StreamOptions(nonblocking=True))
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context = self._engine.create_execution_context(strategy)
        if self._context is None:
            raise ModelRefused(f"{self._kit.name} makes no execution context of this plan: {self._kit.complaints}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.sync()
        self._context = None
        self._stream.close()

    def times(self, number: int, shapes: Profile) -> list[BatchTime]:
        """Milliseconds at the best and the largest shapes of a profile."""
        stream = int(self._stream.handle)
        if not self._context.set_optimization_profile_async(number, stream):
            raise ModelRefused(f"profile {number} cannot be chosen: {self._kit.complaints}")
        self._stream.sync()
        scratch = int(self._engine.get_device_memory_size_for_profile_v2(number))
        with self._buffers({"scratch": max(scratch, _SCRATCH_ALIGNMENT)}) as buffers:
            self._context.set_device_memory(int(buffers["scratch"].handle), buffers["scratch"].size)
            best = self._run(number, shapes, largest=False)
            most = self._run(number, shapes, largest=True)
        if best is None or most is None:
            return []
        return [BatchTime(profile=number, at="opt", ms=best), BatchTime(profile=number, at="max", ms=most)]

    def _run(self, number: int, shapes: Profile, *, largest: bool) -> float | None:
        """None: sizes of this model depend on values, and zeros for inputs would say nothing of its speed."""
        sizes = self._sizes(number, shapes, largest=largest)
        if sizes is None:
            return None
        if largest:
            self.io_bytes.append(sum(sizes.values()))
        with self._buffers(sizes) as buffers:
            for name, buffer in buffers.items():
                buffer.fill(0, stream=self._stream)
                if not self._context.set_tensor_address(name, int(buffer.handle)):
                    raise ModelRefused(f"tensor {name!r} takes no memory: {self._kit.complaints}")
            return self._median_ms()

    def _median_ms(self) -> float:
        timed = self._core.EventOptions(timing_enabled=True)
        spent: list[float] = []
        for run in range(_WARM_UPS + _RUNS):
            start = self._stream.record(options=timed)
            if not self._context.execute_async_v3(int(self._stream.handle)):
                raise ModelRefused(f"the plan does not run: {self._kit.complaints}")
            end = self._stream.record(options=timed)
            end.sync()
            if run >= _WARM_UPS:
                spent.append(float(end - start))
        return statistics.median(spent)

    def _sizes(self, number: int, shapes: Profile, *, largest: bool) -> dict[str, int] | None:
        """Tensor → bytes at the shapes to run, after these shapes have been set; None: they depend on values."""
        engine, context = self._engine, self._context
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT]
        sizes: dict[str, int] = {}
        for name in inputs:
            low, best, high = (tuple(shape) for shape in engine.get_tensor_profile_shape(name, number))
            shape = (high if largest else best) or low
            wanted = shapes.get(name)
            if wanted is not None and wanted.values:
                return None
            if not context.set_input_shape(name, shape):
                raise ModelRefused(f"input {name!r} does not take the shape {shape}: {self._kit.complaints}")
            sizes[name] = math.prod(shape) * int(engine.get_tensor_dtype(name).itemsize)
        if context.infer_shapes():
            return None
        for name in names:
            if name not in sizes:
                sizes[name] = int(context.get_max_output_size(name))
        return None if min(sizes.values()) < 0 else {name: max(size, 1) for name, size in sizes.items()}

    @contextmanager
    def _buffers(self, sizes: dict[str, int]) -> Generator[dict[str, Any]]:
        buffers = {name: self._memory.allocate(size, stream=self._stream) for name, size in sizes.items()}
        try:
            yield buffers
        finally:
            self._stream.sync()
            for buffer in buffers.values():
                buffer.close(self._stream)


# --- CUDA ---------------------------------------------------------------------------------------


def _open_device(index: int) -> tuple[Any, Any]:
    """The driver's bindings and a device number, after ``cuInit`` and a count that includes it."""
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as exc:
        raise ModelRefused("cuda-python is not installed here: pip install 'qworker[gpu]'") from exc
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as exc:  # the library that finds libcuda raises one when there is none
        raise ModelRefused("this machine has no NVIDIA driver: run this on one with a GPU") from exc
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ModelRefused(f"CUDA does not start here ({status.name}): run this on a machine with a working GPU")
    count = int(_ok(driver, driver.cuDeviceGetCount()))
    if not 0 <= index < count:
        raise ModelRefused(f"there is no device {index} here, there are {count}: choose another --device")
    return driver, _ok(driver, driver.cuDeviceGet(index))


def _ok(driver: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ModelRefused(f"the CUDA driver answered {status.name}: look at nvidia-smi and the system log")
    return values[0] if len(values) == 1 else tuple(values)


def _tensorrt_version() -> str | None:
    try:
        return toolkit("trt").version
    except ModelRefused:
        return None


def _driver_version() -> str | None:
    """The driver's own version, which CUDA does not tell; None where NVML is missing."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    finally:
        nvml.nvmlShutdown()
    return version.decode() if isinstance(version, bytes) else str(version)
