"""The yardstick: one plan in a bare loop, without anything of ours but the names of its tensors."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

WARM_UPS, RUNS = 10, 60
"""The plan and its context go with the last variable of ``bare_loop``, when it returns."""


def bare_loop(
    trt: Any, logger: Any, content: bytes, inputs: Mapping[str, NDArray[Any]], ordinal: int
) -> dict[str, float]:
    """Median milliseconds of ``execute_async_v3`` alone, and with copies from and to page-locked memory."""
    driver, core = import_module("cuda.bindings.driver"), import_module("cuda.core")
    device = core.Device(ordinal)
    device.set_current()
    memory = core.DeviceMemoryResource(device, core.DeviceMemoryResourceOptions())
    pinned = core.LegacyPinnedMemoryResource()
    stream = device.create_stream()
    handle = int(stream.handle)
    engine = trt.Runtime(logger).deserialize_cuda_engine(content)
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    number = _profile(engine, inputs)
    assert context.set_optimization_profile_async(number, handle)
    stream.sync()
    scratch = memory.allocate(max(int(engine.get_device_memory_size_for_profile_v2(number)), 256), stream=stream)
    context.set_device_memory(int(scratch.handle), scratch.size)
    for name, array in inputs.items():
        assert context.set_input_shape(name, array.shape)
    kept: list[Any] = [scratch]
    goes_in: list[tuple[int, int, int]] = []
    comes_out: list[tuple[int, int, int]] = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        nbytes = inputs[name].nbytes if name in inputs else _output_bytes(engine, context, name)
        there, here = memory.allocate(max(nbytes, 1), stream=stream), pinned.allocate(max(nbytes, 1), stream=stream)
        kept += [there, here]
        assert context.set_tensor_address(name, int(there.handle))
        (goes_in if name in inputs else comes_out).append((int(there.handle), int(here.handle), nbytes))

    def run(*, copies: bool) -> None:
        for target, origin, nbytes in goes_in if copies else ():
            driver.cuMemcpyHtoDAsync(target, origin, nbytes, handle)
        assert context.execute_async_v3(handle)
        for origin, target, nbytes in comes_out if copies else ():
            driver.cuMemcpyDtoHAsync(target, origin, nbytes, handle)
        stream.sync()

    figures = {"execute_ms": _median(lambda: run(copies=False)), "with_copies_ms": _median(lambda: run(copies=True))}
    for buffer in kept:
        buffer.close(stream)
    stream.sync()
    return figures


def _profile(engine: Any, inputs: Mapping[str, NDArray[Any]]) -> int:
    for number in range(engine.num_optimization_profiles):
        ranges = [(array.shape, engine.get_tensor_profile_shape(name, number)) for name, array in inputs.items()]
        if all(
            len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
            for shape, (low, _, high) in ranges
        ):
            return number
    raise AssertionError("no profile takes the known inputs")


def _output_bytes(engine: Any, context: Any, name: str) -> int:
    sizes = {"FLOAT": 4, "HALF": 2, "INT32": 4, "INT64": 8, "BOOL": 1, "UINT8": 1, "INT8": 1, "BF16": 2}
    return math.prod(context.get_tensor_shape(name)) * sizes[engine.get_tensor_dtype(name).name]


def _median(call: Any) -> float:
    spent: list[float] = []
    for number in range(WARM_UPS + RUNS):
        started = time.perf_counter()
        call()
        if number >= WARM_UPS:
            spent.append(time.perf_counter() - started)
    return round(float(np.median(spent)) * 1000, 4)
