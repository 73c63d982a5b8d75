"""A GPU for tests that is none: the fake driver, compiled when it is first asked for, and TensorRT's double.

``cuda.core`` and ``cuda.bindings`` are the real ones. The driver is put into this process before they look for
one, under the name that they look for. Other tests of the process see a machine without a GPU, as before:
``present`` is off outside of the fixture.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCE = HERE / "fakegpu.cpp"
SONAME = "libcuda.so.1"
FLAGS = ("-O1", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{SONAME}")

OUT_OF_MEMORY, ILLEGAL_ADDRESS, LAUNCH_FAILED, ECC = 2, 700, 719, 214


@cache
def library_folder() -> Path:
    """The folder with the compiled driver. Skips the test without a compiler, and fails it in CI."""
    if find_spec("cuda") is None:
        pytest.skip("cuda-python is for Linux on x86-64 only")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        message = "the fake GPU driver needs a C++ compiler: install g++"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    mark = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    folder = ROOT / ".cache" / "fakegpu" / mark
    if not (folder / SONAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{SONAME}.{os.getpid()}"
        subprocess.run([compiler, *FLAGS, "-o", str(part), str(SOURCE), "-ldl"], check=True)
        part.rename(folder / SONAME)
    return folder


class FakeGpu:
    """The fake driver of this process, in a test's hands."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(library_folder() / SONAME), mode=ctypes.RTLD_GLOBAL)
        for name in ("used", "default_pool", "pinned"):
            getattr(self._library, f"fakegpu_{name}").restype = ctypes.c_size_t
        self._library.fakegpu_default_threshold.restype = ctypes.c_uint64
        for name in ("calls", "streams"):
            getattr(self._library, f"fakegpu_{name}").restype = ctypes.c_long
        self._library.fakegpu_memory.argtypes = [ctypes.c_size_t]

    def present(self, yes: bool) -> None:
        """Whether the driver finds a device."""
        self._library.fakegpu_present(int(yes))

    def mend(self) -> None:
        """No faults, no delays, no counts."""
        self._library.fakegpu_mend()

    def fail(self, call: str, error: int, *, after: int = 0, times: int = 1) -> None:
        """``call`` answers ``error`` so many ``times``, after so many good answers."""
        self._library.fakegpu_fail(call.encode(), error, after, times)

    def break_context(self, error: int = ILLEGAL_ADDRESS) -> None:
        """From now on every call is answered with ``error``."""
        self._library.fakegpu_break(error)

    def memory(self, nbytes: int) -> None:
        """The device has so many bytes."""
        self._library.fakegpu_memory(nbytes)

    def copies_take(self, ms: int) -> None:
        self._library.fakegpu_copy_ms(ms)

    @property
    def used(self) -> int:
        """Bytes of device 0, as the driver counts them: what ``cuMemGetInfo`` says, without a context."""
        return self._library.fakegpu_used(0)

    @property
    def pinned(self) -> int:
        return self._library.fakegpu_pinned()

    @property
    def default_pool(self) -> int:
        return self._library.fakegpu_default_pool(0)

    @property
    def default_threshold(self) -> int:
        return self._library.fakegpu_default_threshold(0)

    @property
    def streams(self) -> int:
        return self._library.fakegpu_streams()

    def calls(self, name: str) -> int:
        return self._library.fakegpu_calls(name.encode())


@cache
def fake_gpu() -> FakeGpu:
    """The only one: it stays in the process once it is there."""
    return FakeGpu()


def environment(**more: str) -> dict[str, str]:
    """For a child process that shall find the fake driver, and TensorRT's double under TensorRT's name."""
    paths = [str(HERE / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(library_folder()),
        "PYTHONPATH": os.pathsep.join(paths),
        **more,
    }


def python() -> str:
    return sys.executable


def double() -> Any:
    """TensorRT's double, imported when the driver is there."""
    fake_gpu()
    from tests.support.fakegpu import tensorrt_double

    return tensorrt_double
