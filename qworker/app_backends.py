"""Composition of a worker's backends, store and budgets: which of them there are depends on the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from qworker.config import Settings
from qworker.engine.base import Backend
from qworker.engine.canary import OnnxCanary
from qworker.engine.onnx import OnnxBackend, host
from qworker.errors import DeviceUnavailable, QworkerError
from qworker.store.base import Store
from qworker.store.builds import Arena, BuildsStore
from qworker.store.local import LocalStore

if TYPE_CHECKING:
    from qworker.engine.tensorrt.gpu import Gpu

log = structlog.get_logger(__name__)

MIN_HEADROOM: Final = 512 << 20
"""The CUDA context and the kernels of a few plans."""
ARENA_SHARE: Final = 4
"""The arena takes a quarter of the budget at most; what needs more has memory of its own."""


def _nothing() -> None: ...


def _no_report() -> dict[str, Any]:
    return {}


def _no_trouble() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Backends:
    """What a worker runs models with. ``budgets`` by backend, where they use different memory."""

    store: Store
    backend: Backend | Mapping[str, Backend]
    budgets: Mapping[str, int] | None = None
    report: Callable[[], dict[str, Any]] = field(default=_no_report)
    """The device, for people and programs; blocks for a moment."""
    trouble: Callable[[], str | None] = field(default=_no_trouble)
    canary: Callable[[], str | None] = field(default=_no_trouble)
    """A small inference: what is wrong with it, or None. Blocks."""
    close: Callable[[], None] = field(default=_nothing)

    def used_bytes(self) -> dict[str, int]:
        """Bytes that this process holds now, by kind of memory as the ledgers have it. Blocks for a moment."""
        if isinstance(self.backend, Mapping):
            return {kind: backend.used_bytes() for kind, backend in self.backend.items()}
        return {"": self.backend.used_bytes()}


def open_backends(settings: Settings) -> Backends:
    """The backends that ``settings`` ask for and this machine has. Blocks.

    ``auto`` takes TensorRT where there is a device, and ONNX for the models that it has no plan of; without a
    device it takes ONNX. Raises DeviceUnavailable for ``tensorrt`` without one.
    """
    store = LocalStore(Path(settings.store), host())
    onnx = OnnxBackend(threads=settings.intra_op_threads)
    canary = OnnxCanary(onnx)
    if settings.backend == "onnx":
        return Backends(store, onnx, canary=canary.run)
    try:
        return _on_device(settings, store, onnx if settings.backend == "auto" else None)
    except DeviceUnavailable as why:
        if settings.backend == "tensorrt":
            raise
        log.info("backend.onnx", reason=str(why))
        return Backends(store, onnx, canary=canary.run)


def device_budget(settings: Settings, *, free: int, total: int) -> int:
    """Bytes of a device for models: what is asked for, and never more than it has beside its headroom."""
    headroom = int(settings.device_headroom or max(MIN_HEADROOM, total // 20))
    most = min(free, total) - headroom
    if most <= 0:
        raise DeviceUnavailable(
            f"the device has {free} of {total} bytes free and {headroom} are kept as headroom: nothing is left for "
            "models; end what else uses it, or lower device_headroom"
        )
    if "memory" not in settings.model_fields_set:
        return most
    if settings.memory > most:
        log.warning("memory.limited", asked=int(settings.memory), given=most, total=total, free=free)
    return min(int(settings.memory), most)


def _on_device(settings: Settings, local: LocalStore, onnx: OnnxBackend | None) -> Backends:
    from qworker.engine.tensorrt.backend import Options, TensorRtBackend
    from qworker.engine.tensorrt.gpu import open_gpu
    from qworker.engine.tensorrt.library import load_library

    gpu = open_gpu(settings.device)  # before anything of TensorRT exists
    library = load_library()
    memory = gpu.memory()
    budget = device_budget(settings, free=memory.free, total=memory.total)
    facts = gpu.facts(library.version, trusts_lean_runtimes=settings.trust_lean_runtimes)
    reserved = 0
    if settings.arena == "shared":
        most = budget // ARENA_SHARE
        need = settings.lanes * BuildsStore(local, facts, Arena(settings.lanes, 0), onnx=True).largest_need()
        reserved = min(int(settings.arena_memory or need), most)
    options = Options(lanes=settings.lanes, arena=reserved, graphs=settings.cuda_graphs, poison=settings.poison_book)
    tensorrt = TensorRtBackend(gpu, library, options)
    tensorrt.open()
    log.info(
        "device.opened",
        device=gpu.name,
        uuid=gpu.uuid,
        runtime=library.name,
        total=memory.total,
        budget=budget,
        arena=reserved,
    )
    backends: dict[str, Backend] = {"tensorrt": tensorrt}
    budgets = {"tensorrt": budget - reserved}
    if onnx is not None:
        backends["onnx"] = onnx
        budgets["onnx"] = int(settings.host_memory)
    return Backends(
        store=BuildsStore(local, facts, Arena(settings.lanes, reserved), onnx=onnx is not None),
        backend=backends,
        budgets=budgets,
        report=tensorrt.report,
        trouble=lambda: None if gpu.lost is None else f"the device is lost: {gpu.lost}",
        canary=lambda: _device_answers(gpu),
        close=tensorrt.close,
    )


def _device_answers(gpu: Gpu) -> str | None:
    """Any call is answered with the error that broke the context, if one has."""
    try:
        gpu.enter()
        gpu.check_alive()
    except QworkerError as error:
        return str(error)
    return None
