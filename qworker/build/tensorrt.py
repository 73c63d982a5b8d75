"""TensorRT or TensorRT-RTX as the builder sees it: the library, its log, its progress.

Both have the same builder API. TensorRT needs a GPU from its first object on; TensorRT-RTX builds without
one, and its plans are for testing the build: TensorRT does not take them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Final, Literal, Protocol, cast

import structlog

from qworker.errors import ModelRefused

Target = Literal["trt", "rtx"]

LIBRARY: Final = {"trt": "TensorRT", "rtx": "TensorRT-RTX"}
_MODULES: Final = {"trt": ("tensorrt", "tensorrt_bindings"), "rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
_EXTRA: Final = {"trt": "gpu", "rtx": "rtx"}
_REMEMBERED: Final = 20

log = structlog.stdlib.get_logger(__name__)


class Watch(Protocol):
    """Hears of the builder's phases, from any of its threads."""

    def phase(self, name: str, parent: str | None, steps: int) -> None: ...
    def step(self, name: str, step: int) -> None: ...
    def finished(self, name: str) -> None: ...


class NoWatch:
    """Hears and says nothing."""

    def phase(self, name: str, parent: str | None, steps: int) -> None: ...
    def step(self, name: str, step: int) -> None: ...
    def finished(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Complaints:
    """The last errors that the library logged: its calls return None and say nothing."""

    lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=_REMEMBERED))
    warned: set[str] = field(default_factory=set[str])
    """A warning comes once for each layer: once is enough."""

    def clear(self) -> None:
        self.lines.clear()
        self.warned.clear()

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(self.lines)) or "it gave no reason"


@dataclass(frozen=True, slots=True)
class Toolkit:
    """The library of one target. ``logger`` is the process's only one: the library keeps the first it meets."""

    target: Target
    trt: Any
    version: str
    logger: Any
    complaints: Complaints

    @property
    def name(self) -> str:
        return f"{LIBRARY[self.target]} {self.version}"


@cache
def toolkit(target: Target) -> Toolkit:
    """The library, loaded. Raises ModelRefused when it is not installed."""
    trt = _load(target)
    complaints = Complaints()
    logger = _logger(trt, lambda severity, text: _hear(target, complaints, severity, text))
    return Toolkit(target, trt, str(trt.__version__), logger, complaints)


def progress_monitor(trt: Any, watch: Watch, cancelled: threading.Event) -> Any:
    """A monitor that tells ``watch``, and ends the build once ``cancelled`` is set."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            watch.phase(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            watch.step(phase_name, step)
            return not cancelled.is_set()

        def phase_finish(self, phase_name: str) -> None:
            watch.finished(phase_name)

    return cast("Any", Monitor())


def _load(target: Target) -> Any:
    missing = ""
    for module in _MODULES[target]:
        try:
            return import_module(module)
        except (ImportError, OSError, RuntimeError) as exc:  # OSError: a library of its own is missing
            missing = missing or f"{type(exc).__name__}: {exc}"
    raise ModelRefused(
        f"{LIBRARY[target]} is not installed here ({missing}): pip install 'qworker[{_EXTRA[target]}]'"
        + (" on a machine with an NVIDIA GPU" if target == "trt" else "")
    )


def _logger(trt: Any, hear: Callable[[str, str], None]) -> Any:
    class Log(trt.ILogger):
        """Called from any thread; must outlive all objects of the library, hence kept by the cached toolkit."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            hear(str(severity.name), msg)

    return cast("Any", Log())


_LEVELS: Final = {"INTERNAL_ERROR": "error", "ERROR": "error", "WARNING": "warning", "INFO": "debug"}


def _hear(target: Target, complaints: Complaints, severity: str, text: str) -> None:
    level = _LEVELS.get(severity)
    if level is None:  # VERBOSE: thousands of lines a second
        return
    line = " ".join(text.split())
    if level == "warning":
        if line in complaints.warned:
            return
        complaints.warned.add(line)
    elif level == "error":
        complaints.lines.append(line if len(line) <= 500 else f"{line[:500]}...")
    getattr(log, level)("tensorrt.log", library=LIBRARY[target], severity=severity, text=line)
