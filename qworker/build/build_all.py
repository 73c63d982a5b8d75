"""``qworker build-all``: every model of a folder in every precision of a matrix, each in a process of its own.

::

    [defaults]                       # of all models; the same keys as below
    target = "trt"
    precision = ["fp32", "fp16"]

    [[model]]                        # without any: every .onnx below the folder
    path = "resnet50/model.onnx"     # below the folder; may be a pattern (id is made of the name then)
    id = "vision/resnet50"
    precision = ["fp16", "int8"]
    profile = ["x=1x3x224x224,4x3x224x224,8x3x224x224"]
    calibration = "resnet50/rows.npz"

What is there already, made of the same model in the same way, is left alone: run it again to go on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from qworker.build.calibrate import Method
from qworker.build.plan import PlanRequest
from qworker.build.plan_convert import Precision, Recipe
from qworker.build.tensorrt import Target
from qworker.build.tensorrt_build import BuilderOptions
from qworker.errors import ConfigError

REQUEST: Final = TypeAdapter(PlanRequest)

State = Literal["built", "there", "left", "failed"]


class _Entry(BaseModel):
    """What can be said of one model, or of all."""

    model_config = ConfigDict(extra="forbid")

    target: Target = "trt"
    precision: Annotated[tuple[Precision, ...], Field(min_length=1)] = ("fp16",)
    profile: tuple[str, ...] = ()
    calibration: Path | None = None
    calibration_method: Method = "percentile"
    int8_rest: Literal["fp32", "fp16"] = "fp32"
    max_top1_drop: Annotated[float, Field(ge=0, le=1)] | None = None
    sample: Path | None = None
    version: str | None = None
    workspace: ByteSize | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    timing_cache: Path | None = None
    level: Annotated[int, Field(ge=0, le=5)] = 3
    tf32: bool = True
    device: Annotated[int, Field(ge=0)] = 0


class _ModelEntry(_Entry):
    path: str
    id: str | None = None


class _Matrix(BaseModel):
    model_config = ConfigDict(extra="forbid")

    defaults: dict[str, Any] = {}
    model: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """What became of one build. ``words``: the plan's name, what is left, or the reason."""

    model: str
    version: str | None
    precision: str
    state: State
    words: str
    seconds: float
    top1: float | None = None


def read_matrix(folder: Path, matrix: Path) -> list[PlanRequest]:
    """The builds of a matrix, in its order. Raises ConfigError naming the entry that is wrong."""
    try:
        parsed = _Matrix.model_validate(tomllib.loads(matrix.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{matrix} cannot be read as TOML ({exc}): mend it") from exc
    except ValidationError as exc:
        raise ConfigError(f"{matrix}: {_first(exc)}: a matrix has [defaults] and [[model]] tables") from exc
    requests: list[PlanRequest] = []
    for number, table in enumerate(parsed.model or ({"path": "**/*.onnx"},), 1):
        try:
            entry = _ModelEntry.model_validate(parsed.defaults | table)
        except ValidationError as exc:
            where = f"model {number} ({table.get('path', 'without a path')})"
            raise ConfigError(f"{matrix}, {where}: {_first(exc)}: see `qworker build-all --help`") from exc
        requests += _requests(folder, matrix, entry)
    return requests


def run_all(
    requests: Sequence[PlanRequest], run: Callable[[PlanRequest], Built], told: Callable[[int, Built], object]
) -> list[Built]:
    """Run them one after the other; a failure is a row of the table, and stops nothing."""
    table: list[Built] = []
    for number, request in enumerate(requests, 1):
        table.append(run(request))
        told(number, table[-1])
    return table


def run_child(store: Path, request: PlanRequest) -> Built:
    """One build in a process of its own: what crashes the builder's library ends that process only."""
    started = time.perf_counter()
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "qworker.build.build_all_child"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        order = json.dumps({"store": str(store), "request": REQUEST.dump_python(request, mode="json")})
        try:
            answer, _ = child.communicate(order)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)  # a shell has sent it already; a second one does no harm
            child.wait()
            raise
    seconds = time.perf_counter() - started
    model = request.model or request.path.stem
    if child.returncode != 0 or not answer:
        ended = f"ended by {_signal(-child.returncode)}" if child.returncode < 0 else f"status {child.returncode}"
        words = f"the process that built it {ended}: look at what it wrote above"
        return Built(model, request.version, request.recipe.precision, "failed", words, seconds)
    return Built(**json.loads(answer), precision=request.recipe.precision, seconds=seconds)


def _requests(folder: Path, matrix: Path, entry: _ModelEntry) -> Iterator[PlanRequest]:
    paths = sorted(folder.glob(entry.path))
    if not paths:
        raise ConfigError(f"{matrix}: nothing in {folder} fits the path {entry.path!r}: check it")
    if entry.id is not None and len(paths) > 1:
        raise ConfigError(f"{matrix}: {len(paths)} files fit {entry.path!r}, and an id names one: leave the id out")
    below = {name: None if path is None else folder / path for name, path in _paths(entry).items()}
    for path in paths:
        for precision in entry.precision:
            yield PlanRequest(
                path=path,
                model=entry.id,
                version=entry.version,
                target=entry.target,
                recipe=Recipe(precision, entry.calibration_method, entry.int8_rest),
                profiles=entry.profile,
                calibration=below["calibration"],
                sample=below["sample"],
                max_top1_drop=entry.max_top1_drop,
                builder=BuilderOptions(
                    workspace=None if entry.workspace is None else int(entry.workspace),
                    version_compatible=entry.version_compatible,
                    hardware_compatible=entry.hardware_compatible,
                    timing_cache=below["timing_cache"],
                    level=entry.level,
                    tf32=entry.tf32,
                ),
                device=entry.device,
            )


def _paths(entry: _ModelEntry) -> dict[str, Path | None]:
    return {"calibration": entry.calibration, "sample": entry.sample, "timing_cache": entry.timing_cache}


def _first(exc: ValidationError) -> str:
    error = exc.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}"


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
