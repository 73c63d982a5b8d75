"""From a converted ONNX model to a plan file, with TensorRT's or TensorRT-RTX's own parser and builder."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qworker.build.profiles import Profile
from qworker.build.tensorrt import NoWatch, Toolkit, Watch, progress_monitor
from qworker.errors import InvalidInput, ModelRefused
from qworker.store.files import disk_errors

_MAX_ERRORS: Final = 5

MAGIC: Final = {"trt": b"ftrt", "rtx": b"vtrt"}
HEADER_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class BuilderOptions:
    """What the builder may do. ``workspace`` in bytes; None: all that the device has."""

    workspace: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    timing_cache: Path | None = None
    level: int = 3
    tf32: bool = True


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """A plan file and what the builder settled on, by name."""

    path: Path
    nbytes: int
    version: str
    weights_bytes: int | None
    """From the header, where it is there (TensorRT-RTX)."""
    flags: tuple[str, ...]
    hardware_compatibility: str
    seconds: float


class Cancelled(Exception):
    """The build was ended on request; nothing is left of it."""


def build_plan(
    kit: Toolkit,
    model: Path,
    profiles: Sequence[Profile],
    target: Path,
    options: BuilderOptions | None = None,
    watch: Watch | None = None,
) -> BuiltPlan:
    """Build ``model`` into the file ``target``.

    Blocks for seconds to many minutes, in a thread of its own, so that Ctrl-C is heard: it ends the build at
    its next step, and comes out as KeyboardInterrupt. Raises ModelRefused with the parser's or builder's
    words and the node's name, InvalidInput for profiles that do not fit.
    """
    cancelled = threading.Event()
    job = _Job(kit, options or BuilderOptions(), watch or NoWatch(), cancelled)
    with ThreadPoolExecutor(1, thread_name_prefix="tensorrt-build") as pool:
        future = pool.submit(job.run, model, profiles, target)
        try:
            return future.result()
        except KeyboardInterrupt:
            cancelled.set()
            raise


def plan_version(path: Path, target: str) -> str:
    """The version of the library that built a plan, from the plan itself. Raises ModelRefused."""
    with disk_errors(f"{path} cannot be read"), path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or header[:4] != MAGIC[target]:
        raise ModelRefused(
            f"{path.name} does not start like a plan ({header[:4]!r} instead of {MAGIC[target]!r}): build it again"
        )
    return ".".join(str(number) for number in header[24:28])


class _Job:
    """One build, in one thread: TensorRT's builders are not to be shared."""

    def __init__(self, kit: Toolkit, options: BuilderOptions, watch: Watch, cancelled: threading.Event) -> None:
        self._kit = kit
        self._trt = kit.trt
        self._options = options
        self._watch = watch
        self._cancelled = cancelled

    def run(self, model: Path, profiles: Sequence[Profile], target: Path) -> BuiltPlan:
        started = time.perf_counter()
        self._kit.complaints.clear()
        builder = self._builder()
        network = builder.create_network(0)
        parser = self._trt.OnnxParser(network, self._kit.logger)
        if not parser.parse(model.read_bytes(), str(model)):
            raise ModelRefused(f"{self._kit.name} cannot take this model: {_parser_words(parser)}")
        config = self._config(builder)
        for number, profile in enumerate(profiles or ({},), 1):
            self._add_profile(builder, network, config, profile, number)
        cache = self._timing_cache(config)
        plan = builder.build_serialized_network(network, config)
        if self._cancelled.is_set():
            raise Cancelled
        if plan is None:
            raise ModelRefused(f"{self._kit.name} cannot build this model: {self._kit.complaints}")
        with disk_errors(f"{target} cannot be written"), target.open("xb") as file:
            file.write(plan)
            file.flush()
            os.fsync(file.fileno())
        if cache is not None:
            self._keep_timing_cache(config)
        return self._built(config, target, time.perf_counter() - started)

    def _builder(self) -> Any:
        try:
            return self._trt.Builder(self._kit.logger)
        except TypeError as exc:  # what the binding makes of a null pointer
            raise ModelRefused(f"{self._kit.name} does not start here: {self._kit.complaints}") from exc

    def _config(self, builder: Any) -> Any:
        trt, options = self._trt, self._options
        config = builder.create_builder_config()
        config.progress_monitor = progress_monitor(trt, self._watch, self._cancelled)
        config.builder_optimization_level = options.level
        config.profiling_verbosity = trt.ProfilingVerbosity.LAYER_NAMES_ONLY
        if options.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
        if not options.tf32:
            config.clear_flag(trt.BuilderFlag.TF32)
        if options.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if options.hardware_compatible:
            config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        return config

    def _add_profile(self, builder: Any, network: Any, config: Any, wanted: Profile, number: int) -> None:
        profile = builder.create_optimization_profile()
        given = False
        for tensor in (network.get_input(i) for i in range(network.num_inputs)):
            bounds = wanted.get(tensor.name)
            if tensor.is_shape_tensor:
                if bounds is None or not bounds.values:
                    raise InvalidInput(
                        f"input {tensor.name!r} is a shape, and a plan is built for a range of its values: "
                        f"give them, as in --profile {tensor.name}:=1x1,4x4,8x8"
                    )
                profile.set_shape_input(tensor.name, bounds.min, bounds.opt, bounds.max)
                given = True
            elif -1 in tuple(tensor.shape):
                if bounds is None or bounds.values:
                    raise InvalidInput(
                        f"input {tensor.name!r} has sizes {list(tensor.shape)} of which some are open, and no "
                        f"--profile: give one in profile {number}"
                    )
                profile.set_shape(tensor.name, bounds.min, bounds.opt, bounds.max)
                given = True
        if not given:
            return  # everything is fixed: the builder makes a profile of its own
        if not profile or config.add_optimization_profile(profile) < 0:
            words = "; ".join(f"{name}={bounds}" for name, bounds in wanted.items())
            raise InvalidInput(
                f"{self._kit.name} does not take profile {number} ({words}): {self._kit.complaints}: "
                "check the ranks and the order of the sizes"
            )

    # --- timing cache ---

    def _timing_cache(self, config: Any) -> Any:
        path = self._options.timing_cache
        if path is None or self._kit.target == "rtx":  # which times nothing, and says that its caches do nothing
            return None
        with disk_errors(f"the timing cache {path} cannot be read"):
            content = path.read_bytes() if path.exists() else b""
        cache = config.create_timing_cache(content)
        if cache is None or not config.set_timing_cache(cache, False):
            # of another device or version, which only costs its time
            cache = config.create_timing_cache(b"")
            config.set_timing_cache(cache, False)
        return cache

    def _keep_timing_cache(self, config: Any) -> None:
        path = self._options.timing_cache
        cache = config.get_timing_cache()
        if path is None or cache is None:
            return
        with disk_errors(f"the timing cache {path} cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
            with os.fdopen(handle, "wb") as file:
                file.write(cache.serialize())
            os.replace(aside, path)

    # --- what came out ---

    def _built(self, config: Any, target: Path, seconds: float) -> BuiltPlan:
        flags = [name for name, flag in self._trt.BuilderFlag.__members__.items() if config.get_flag(flag)]
        rtx = self._kit.target == "rtx"
        with target.open("rb") as file:
            header = file.read(HEADER_BYTES)
        return BuiltPlan(
            path=target,
            nbytes=target.stat().st_size,
            version=plan_version(target, self._kit.target),
            weights_bytes=int.from_bytes(header[56:64], "little") if rtx else None,
            flags=tuple(sorted(flags)),
            # TensorRT-RTX has the attribute and complains when it is read
            hardware_compatibility="NONE" if rtx else str(config.hardware_compatibility_level.name),
            seconds=seconds,
        )


def _parser_words(parser: Any) -> str:
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    words: list[str] = []
    for error in errors[:_MAX_ERRORS]:
        name, operator = str(error.node_name()), str(error.node_operator())
        where = f"node {name!r} ({operator})" if name or operator else "the model"
        words.append(f"{where}: {' '.join(str(error.desc()).split())} [{error.code().name}]")
    more = f"; {len(errors) - _MAX_ERRORS} more" if len(errors) > _MAX_ERRORS else ""
    return "; ".join(dict.fromkeys(words)) + more or "the parser gave no reason"
