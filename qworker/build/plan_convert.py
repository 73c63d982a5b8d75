"""A model in the wanted precision, with what the gate says of it; kept beside its version for the next build.

Converting needs no GPU: a machine without one does it, and one with a GPU that shares the store builds the
plan from what lies there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from qworker.build.calibrate import Method, largest_magnitudes, scales
from qworker.build.calibrate_rows import Rows
from qworker.build.convert import (
    at_least_opset,
    element_types,
    onnx,
    ort,
    read_model,
    simplified,
    write_model,
)
from qworker.build.convert_fp16 import FLOAT, SAFE_RANGE, to_fp16
from qworker.build.convert_int8 import OPSET, place, to_int8
from qworker.build.gate import compare
from qworker.errors import InvalidInput, ModelRefused
from qworker.store.card import GateEntry
from qworker.store.files import disk_errors

Precision = Literal["fp32", "fp16", "int8"]
PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "fp16", "int8")

_RECIPE: Final = 3
"""Goes up when the same input would be converted to something else: then what lies there is made anew."""
_HALF_QUANTIZED_OPSET: Final = 19
"""The first operator set in which QuantizeLinear takes FP16."""
_RANGE_ROWS: Final = 16

Stage = Callable[[str, int, int], object]
"""(what, done, of how many)"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to convert. ``rest``: the precision of what INT8 leaves as it is."""

    precision: Precision
    method: Method = "percentile"
    rest: Literal["fp32", "fp16"] = "fp32"

    def options(self) -> dict[str, str]:
        """What a card keeps of it."""
        if self.precision != "int8":
            return {}
        return {"calibration_method": self.method, "int8_rest": self.rest}


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted model. ``note`` says in words how much of it is in the wanted precision."""

    path: Path
    gate: GateEntry | None
    note: str
    worst: tuple[str, ...]
    reused: bool


def convert(source: Path, target: Path, digest: str, rows: Rows | None, recipe: Recipe, stage: Stage) -> Converted:
    """Convert ``source`` into ``target``, unless that is there already from the same source, rows and recipe.

    Raises ModelRefused with the reason, InvalidInput when INT8 has no calibration rows.
    """
    if recipe.precision == "fp32":
        return Converted(source, None, "as it is", (), reused=True)
    if recipe.precision == "int8" and (rows is None or rows.made_up):
        raise InvalidInput(
            "INT8 needs examples of the model's inputs to calibrate on: give some hundred with --calibration"
        )
    key = _key(digest, rows, recipe)
    there = _there(target, key)
    if there is not None:
        return there
    model = read_model(source)
    if recipe.precision == "fp16":
        model, note = _half(model, rows, stage)
    else:
        assert rows is not None
        model, note = _eight_bits(model, rows, recipe, stage)
    result = None
    if rows is not None:
        result = compare(read_model(source), model, rows, lambda done, total: stage("accuracy gate", done, total))
    gate = None if result is None else result.entry()
    worst = () if result is None else tuple(map(str, result.worst))
    _keep(model, target, {"key": key, "note": note, "worst": list(worst), "gate": gate and gate.model_dump()})
    return Converted(target, gate, note, worst, reused=False)


def _half(model: Any, rows: Rows | None, stage: Stage) -> tuple[Any, str]:
    half = to_fp16(model, _too_large(model, rows, stage))
    if half.halved == 0:
        raise ModelRefused(
            "nothing in this model can run in FP16 (bodies of If and Loop stay as they are): build it with "
            "--precision fp32"
        )
    return half.model, f"{half.halved} of {half.floating} nodes in FP16"


def _eight_bits(model: Any, rows: Rows, recipe: Recipe, stage: Stage) -> tuple[Any, str]:
    # simplified first: weights must be constants, and batch normalization inside of them, to be quantized
    model = simplified(at_least_opset(model, _HALF_QUANTIZED_OPSET if recipe.rest == "fp16" else OPSET))
    placement = place(model)
    if placement.count == 0:
        raise ModelRefused(
            "nothing in this model can run in INT8: it has no Conv, Gemm or MatMul with constant weights outside of "
            "If and Loop, but for those that make a spectrum: build it with --precision fp16"
        )
    too_large = _too_large(model, rows, stage) if recipe.rest == "fp16" else frozenset[str]()
    steps = scales(
        model,
        placement.tensors,
        rows,
        rows.calibration(),
        recipe.method,
        lambda done, total: stage("calibration", done, total),
    )
    model = to_int8(model, placement, steps)
    note = f"{placement.count} of {placement.weighted} nodes with weights in INT8"
    if recipe.rest == "fp16":
        half = to_fp16(model, too_large)
        return half.model, f"{note}, {half.halved} of {half.floating} others in FP16"
    return model, note


def _too_large(model: Any, rows: Rows | None, stage: Stage) -> frozenset[str]:
    """Tensors that come near the end of FP16's range on the calibration rows."""
    if rows is None:
        return frozenset()
    types = element_types(model)
    weights = {tensor.name for tensor in model.graph.initializer}
    made = [name for node in model.graph.node for name in node.output if types.get(name) == FLOAT]
    given = [value.name for value in model.graph.input if types.get(value.name) == FLOAT and value.name not in weights]
    numbers = rows.calibration()[:_RANGE_ROWS]
    seen = largest_magnitudes(
        model, [*given, *made], rows, numbers, lambda done, total: stage("value ranges", done, total)
    )
    return frozenset(name for name, largest in seen.items() if largest > SAFE_RANGE)


# --- kept beside the version --------------------------------------------------------------------


def _key(digest: str, rows: Rows | None, recipe: Recipe) -> str:
    parts = [
        _RECIPE,
        digest,
        None if rows is None else rows.digest,
        recipe.precision,
        recipe.options(),
        onnx.__version__,
        ort.__version__,
    ]
    return sha256(json.dumps(parts).encode()).hexdigest()


def _there(target: Path, key: str) -> Converted | None:
    notes = target.with_name(f"{target.name}.json")
    try:
        kept: dict[str, Any] = json.loads(notes.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if kept.get("key") != key or not target.is_file():
        return None
    gate = None if kept["gate"] is None else GateEntry.model_validate(kept["gate"])
    return Converted(target, gate, str(kept["note"]), tuple(kept["worst"]), reused=True)


def _keep(model: Any, target: Path, notes: dict[str, Any]) -> None:
    """Write the model, then its notes: notes that are there describe what is there."""
    beside = target.with_name(f"{target.name}.json")
    with disk_errors(f"{target} cannot be written"):
        beside.unlink(missing_ok=True)
        write_model(model, target)
        aside = beside.with_name(f"{beside.name}.part")
        aside.write_text(json.dumps(notes, indent=2), encoding="utf-8")
        os.replace(aside, beside)
