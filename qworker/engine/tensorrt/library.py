"""TensorRT as the worker sees it: the library, its log, and the objects of it that call back.

Ask for it after ``open_gpu`` only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, cast

import structlog

from qworker.errors import DeviceUnavailable

_MODULES: Final = ("tensorrt", "tensorrt_bindings")
_REMEMBERED: Final = 20
_LEVELS: Final = {"INTERNAL_ERROR": "error", "ERROR": "error", "WARNING": "warning", "INFO": "debug"}

log = structlog.get_logger(__name__)


class Complaints:
    """The errors that the library logged: its calls answer None or False, and say nothing.

    Most are logged by the thread that called; those of the library's own threads are told where it has none.
    """

    def __init__(self) -> None:
        self._all: deque[str] = deque(maxlen=_REMEMBERED)
        self._here = threading.local()

    def add(self, line: str) -> None:
        self._all.append(line)
        self._mine().append(line)

    def clear(self) -> None:
        """Forget what this thread was told so far."""
        self._mine().clear()

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(self._mine() or list(self._all)[-3:])) or "it gave no reason"

    def _mine(self) -> deque[str]:
        lines: deque[str] | None = getattr(self._here, "lines", None)
        if lines is None:
            lines = self._here.lines = deque[str](maxlen=_REMEMBERED)
        return lines


@dataclass(frozen=True, slots=True)
class Library:
    """``logger`` is the process's only one and outlives everything: the library keeps the first that it meets."""

    trt: Any
    version: str
    logger: Any
    complaints: Complaints

    @property
    def name(self) -> str:
        return f"TensorRT {self.version}"


@cache
def load_library() -> Library:
    """TensorRT, loaded. Raises DeviceUnavailable when it is not installed."""
    missing = ""
    for module in _MODULES:
        try:
            return library_of(import_module(module))
        except (ImportError, OSError, RuntimeError) as exc:  # OSError: a library of its own is missing
            missing = missing or f"{type(exc).__name__}: {exc}"
    raise DeviceUnavailable(f"TensorRT is not installed here ({missing}): pip install 'qworker[gpu]'")


def library_of(trt: Any) -> Library:
    """``trt`` with a logger of ours."""
    complaints = Complaints()
    return Library(trt, str(trt.__version__), _logger(trt, complaints), complaints)


def output_allocator(trt: Any, take: Callable[[str, int], int], shape: Callable[[str, tuple[int, ...]], None]) -> Any:
    """What TensorRT asks for the memory of outputs whose size it knows only while it runs.

    ``take`` gives an address for so many bytes, 0 for none; ``shape`` hears the size in the end. Both are
    called in the thread that enqueues, before ``execute_async_v3`` returns.
    """

    class Allocator(trt.IOutputAllocator):
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)

        def reallocate_output_async(
            self,
            tensor_name: str,
            memory: int,  # noqa: ARG002 - the signature is TensorRT's
            size: int,
            alignment: int,  # noqa: ARG002 - our pool aligns to 256, which is TensorRT's most
            stream: int,  # noqa: ARG002
        ) -> int:
            return take(tensor_name, size)

        def notify_shape(self, tensor_name: str, shape_: Any) -> None:
            shape(tensor_name, tuple(int(dim) for dim in shape_))

    return cast("Any", Allocator())


def _logger(trt: Any, complaints: Complaints) -> Any:
    class Log(trt.ILogger):
        """Called from any thread."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            _hear(complaints, str(severity.name), msg)

    return cast("Any", Log())


def _hear(complaints: Complaints, severity: str, text: str) -> None:
    level = _LEVELS.get(severity)
    if level is None:  # VERBOSE: thousands of lines a second
        return
    line = " ".join(text.split())
    line = line if len(line) <= 500 else f"{line[:500]}..."
    if level == "error":
        complaints.add(line)
    getattr(log, level)("tensorrt.log", severity=severity, text=line)
