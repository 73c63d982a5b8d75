"""Which TensorRT plans a device takes, and why not the others: from their cards alone, before a byte is read.

Pure. The facts come as plain values: a card's ``plan`` has the attributes of ``PlanFacts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

MIN_DRIVER: Final = 580
"""TensorRT 11 for CUDA 13 needs this driver branch or a newer one."""

PREFERRED: Final = ("int8", "fp16", "fp32")
"""Fastest first. Whoever does not want what INT8 loses builds none: each has passed its gate."""


class PlanFacts(Protocol):
    """What a plan's card says of it."""

    @property
    def target(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def library_version(self) -> str: ...
    @property
    def cuda_version(self) -> str | None: ...
    @property
    def compute_capability(self) -> str | None: ...
    @property
    def version_compatible(self) -> bool: ...
    @property
    def lean_runtime(self) -> bool: ...
    @property
    def hardware_compatibility(self) -> str: ...


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device and what runs on it. Versions are dotted numbers; None: not there."""

    name: str
    compute_capability: str
    tensorrt: str | None
    cuda: str | None
    driver: str | None
    trusts_lean_runtimes: bool = False
    """Plans with a runtime of their own run code on the host: only from a store that one trusts like a package."""
    wants_signatures: bool = False


def refusal(plan: PlanFacts | None, device: DeviceFacts, *, signed: bool = False) -> str | None:
    """Why ``device`` does not take a plan, and what to do; None when it does.

    ``plan`` is None for a file without a card, which nobody may load: a plan is code.
    """
    if plan is None:
        return "it has no card, and what has no card is not loaded: build it again with `qworker build`"
    if device.tensorrt is None:
        return f"TensorRT is not installed beside {device.name}: install qworker[gpu]"
    if plan.target != "trt":
        return "it was built with TensorRT-RTX, for tests of the build: build it with --target trt"
    if device.wants_signatures and not signed:
        return "its card has no signature, and this worker takes only signed ones: sign it, or relax the worker"
    if plan.lean_runtime and not device.trusts_lean_runtimes:
        return (
            "it brings a runtime of its own, which is code for this host, and this worker does not trust the store "
            "with that: build it without --version-compatible, or trust the store"
        )
    return _version(plan, device) or _capability(plan, device) or _driver(plan, device)


def rank(plan: PlanFacts, device: DeviceFacts) -> tuple[bool, bool, int]:
    """Sort key of the plans that a device takes: the best one is the smallest."""
    return (
        plan.compute_capability != device.compute_capability,  # made for this very device before a compatible one
        plan.library_version != device.tensorrt,
        PREFERRED.index(plan.precision) if plan.precision in PREFERRED else len(PREFERRED),
    )


_P = TypeVar("_P", bound=PlanFacts)


def choose(plans: Sequence[_P], device: DeviceFacts, *, signed: Sequence[bool] = ()) -> _P | None:
    """The plan to load on ``device``, or None when it takes none of them. Of equals, the last one."""
    marks = signed or [False] * len(plans)
    takes = [p for p, mark in zip(plans, marks, strict=True) if refusal(p, device, signed=mark) is None]
    return min(reversed(takes), key=lambda plan: rank(plan, device), default=None)


def _version(plan: PlanFacts, device: DeviceFacts) -> str | None:
    here, there = _numbers(device.tensorrt or ""), _numbers(plan.library_version)
    if here == there or (plan.version_compatible and here >= there):
        return None
    if plan.version_compatible:
        return (
            f"it was built with TensorRT {plan.library_version}, and {device.tensorrt} is here: version-compatible "
            "plans run on newer versions only, build it with this one"
        )
    return (
        f"it was built with TensorRT {plan.library_version}, and {device.tensorrt} is here: a plan runs on the very "
        "version that built it, build it again"
    )


def _capability(plan: PlanFacts, device: DeviceFacts) -> str | None:
    here, there = device.compute_capability, plan.compute_capability
    if there is None:
        return "it was built without a device: build it on one like this"
    if here == there:
        return None
    if plan.hardware_compatibility == "AMPERE_PLUS" and _numbers(here) >= (8,):
        return None
    why = f"it was built for compute capability {there}, and {device.name} has {here}"
    if plan.hardware_compatibility == "AMPERE_PLUS":
        return f"{why}: hardware-compatible plans run from 8.0 on, build it on a device like this"
    return f"{why}: build it on a device like this, or with --hardware-compatible"


def _driver(plan: PlanFacts, device: DeviceFacts) -> str | None:
    driver = _numbers(device.driver or "")
    if driver and driver < (MIN_DRIVER,) and _numbers(device.tensorrt or "") >= (11,):
        return f"the driver {device.driver} is too old for TensorRT {device.tensorrt}: {MIN_DRIVER} or newer is needed"
    here, there = _numbers(device.cuda or ""), _numbers(plan.cuda_version or "")
    if here and there and here[0] < there[0]:
        return f"it was built with CUDA {plan.cuda_version}, and the driver knows {device.cuda}: install a newer driver"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
