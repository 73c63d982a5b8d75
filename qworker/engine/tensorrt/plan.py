"""A deserialized plan: what it takes and gives, asked of TensorRT once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from qworker.engine.tensorrt.layout import Bounds, Port, Ports, Profile, Shape
from qworker.engine.tensorrt.library import Library
from qworker.errors import LoadFailed
from qworker.wire.datatypes import itemsize

MAGIC: Final = b"ftrt"
HEADER_BYTES: Final = 28

_DATATYPES: Final = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT64": "INT64",
    "INT32": "INT32",
    "INT8": "INT8",
    "UINT8": "UINT8",
    "BOOL": "BOOL",
}
"""By the names of ``trt.DataType``: their numbers change between versions. FP8 and INT4 cannot be sent."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on the device: the weights, and an execution's scratch memory.

    That of the profile that needs most: the bindings' words ask for it whatever profile a context has.
    """

    weights: int
    scratch: int


def check_header(head: bytes) -> None:
    """Raises LoadFailed for what is no plan, before the library sees it."""
    if len(head) < HEADER_BYTES or head[:4] != MAGIC:
        raise LoadFailed(
            f"the file is no TensorRT plan, it starts with {head[:4]!r} instead of {MAGIC!r}: build it again"
        )


def ports_of(engine: Any, library: Library) -> Ports:
    """Everything that goes in and out. Raises LoadFailed for tensors that cannot be sent."""
    trt = library.trt
    inputs: list[Port] = []
    outputs: list[Port] = []
    for number in range(int(engine.num_io_tensors)):
        name = str(engine.get_tensor_name(number))
        goes_in = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        (inputs if goes_in else outputs).append(_port(engine, trt, name, goes_in=goes_in))
    count = int(engine.num_optimization_profiles)
    profiles = tuple(_profile(engine, inputs, number) for number in range(count))
    return Ports(tuple(inputs), tuple(outputs), profiles)


def sizes_of(engine: Any, library: Library, ports: Ports) -> Sizes:
    """What it takes of the device beside its inputs and outputs, whose sizes the executions know."""
    each = (int(engine.get_device_memory_size_for_profile_v2(number)) for number in range(len(ports.profiles)))
    return Sizes(
        weights=int(engine.get_engine_stat(library.trt.EngineStat.TOTAL_WEIGHTS_SIZE)),
        scratch=max(int(engine.device_memory_size_v2), *each, 0),
    )


def value_ranges(engine: Any, name: str, number: int) -> tuple[Shape, Shape, Shape] | None:
    """Least, best and largest values of an input that is a shape; None where the plan has none."""
    found = engine.get_tensor_profile_values(number, name)  # in this order, whatever its keywords are called
    if not found:
        return None
    low, best, high = (tuple(int(value) for value in values) for values in found)
    return low, best, high


def port_bytes(port: Port, shape: Shape) -> int:
    return math.prod(shape) * port.itemsize


def _port(engine: Any, trt: Any, name: str, *, goes_in: bool) -> Port:
    kind = str(engine.get_tensor_dtype(name).name)
    datatype = _DATATYPES.get(kind)
    if datatype is None:
        role = "input" if goes_in else "output"
        raise LoadFailed(
            f"{role} {name!r} is a {kind}; only {', '.join(_DATATYPES.values())} can be sent: "
            "build the plan with such inputs and outputs"
        )
    dims = tuple(int(dim) for dim in engine.get_tensor_shape(name))
    on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
    return Port(name, datatype, dims, itemsize(datatype), bool(on_host))


def _profile(engine: Any, inputs: list[Port], number: int) -> Profile:
    ranges: dict[str, Bounds] = {}
    for port in inputs:
        if -1 not in port.dims:
            ranges[port.name] = Bounds(port.dims, port.dims, port.dims)
            continue
        low, best, high = (tuple(int(d) for d in shape) for shape in engine.get_tensor_profile_shape(port.name, number))
        ranges[port.name] = Bounds(low, best, high)
    return ranges
