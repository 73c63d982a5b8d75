"""``python surface.py``, with the stub libraries on the path: what the real bindings offer, as JSON."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any

import tensorrt as trt
import tensorrt_libs

calls: dict[str, Any] = {}


class Monitor(trt.IProgressMonitor):
    def __init__(self) -> None:
        trt.IProgressMonitor.__init__(self)

    def phase_start(self, *arguments: Any) -> None:
        calls["IProgressMonitor.phase_start"] = arguments

    def step_complete(self, *arguments: Any) -> bool:
        calls["IProgressMonitor.step_complete"] = arguments
        return True

    def phase_finish(self, *arguments: Any) -> None:
        calls["IProgressMonitor.phase_finish"] = arguments


class Allocator(trt.IGpuAsyncAllocator):
    def __init__(self) -> None:
        trt.IGpuAsyncAllocator.__init__(self)

    def allocate_async(self, *arguments: Any) -> int:
        calls["IGpuAsyncAllocator.allocate_async"] = arguments
        return 0


class Output(trt.IOutputAllocator):
    def __init__(self) -> None:
        trt.IOutputAllocator.__init__(self)

    def reallocate_output_async(self, *arguments: Any) -> int:
        calls["IOutputAllocator.reallocate_output_async"] = arguments
        return 99

    def notify_shape(self, *arguments: Any) -> None:
        calls["IOutputAllocator.notify_shape"] = (arguments[0], tuple(arguments[1]))


def ask(allocator: Output) -> int:
    """Call an allocator as the library does: its object lies behind the head of the Python object."""
    stubs = ctypes.PyDLL(str(Path(tensorrt_libs.__file__).parent / "libnvinfer.so.11"))
    stubs.ask_output_allocator.argtypes = [ctypes.c_void_p]
    stubs.ask_output_allocator.restype = ctypes.c_size_t
    return int(stubs.ask_output_allocator(ctypes.c_void_p.from_address(id(allocator) + object.__basicsize__).value))


class Log(trt.ILogger):
    def __init__(self) -> None:
        trt.ILogger.__init__(self)

    def log(self, *arguments: Any) -> None:
        calls["ILogger.log"] = (arguments[0].name, *arguments[1:])


def main() -> None:
    """By the base class's method a call goes through the library's own table and comes back to Python."""
    monitor, log = Monitor(), Log()
    trt.IProgressMonitor.phase_start(monitor, "phase", "parent", 7)
    trt.IProgressMonitor.step_complete(monitor, "phase", 3)
    trt.IProgressMonitor.phase_finish(monitor, "phase")
    trt.IGpuAsyncAllocator.allocate_async(Allocator(), size=1, alignment=2, flags=3, stream=4)
    calls["IOutputAllocator memory"] = ask(Output())
    calls["IOutputAllocator, in words"] = (
        trt.IOutputAllocator.__doc__
    )  # its methods are not bound: C++ alone calls them
    try:
        trt.Builder(log)
    except TypeError as exc:
        calls["Builder of nothing"] = str(exc)
    surface = {name: sorted(dir(each)) for name, each in vars(trt).items() if isinstance(each, type)}
    parameters = {
        f"{owner}.{name}": re.findall(r"(\w+): ", str(method.__doc__).split("->")[0])
        for owner, each in vars(trt).items()
        if isinstance(each, type)
        for name, method in vars(each).items()
        if callable(method) and "->" in str(method.__doc__)
    }
    json.dump(
        {
            "version": trt.__version__,
            "names": sorted(dir(trt)),
            "classes": surface,
            "parameters": parameters,
            "calls": calls,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
