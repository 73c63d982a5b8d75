"""The real models that plans are built of in the tests, and what INT8 and FP16 cost them.

``python -m tests.build.real_models`` prints the table of docs/precision.md. It takes some minutes.
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ops.model_inputs import INPUTS
from ops.models import ROOT, LaidOut, lay_out
from qworker.build.calibrate import METHODS
from qworker.build.calibrate_rows import read_rows
from qworker.build.convert import inputs_of, read_model, source_digest
from qworker.build.plan_convert import Converted, Recipe, convert
from qworker.errors import ModelRefused

PROFILES: Mapping[str, tuple[str, ...]] = {
    "light-squeezenet": (),
    "magika": (),
    "ppocr2-cls": ("x=1x3x48x192,4x3x48x192,8x3x48x192",),
    "ppocr4-rec": ("x=1x3x48x160,1x3x48x192,1x3x48x256",),
    "romanizer-dec": (
        "prefix=1x2,1x4,1x8",
        "memory=1x4x256,1x8x256,1x16x256",
        "src_mask=1x4,1x8,1x16",
        "hidden=1x2x256",
    ),
    "romanizer-enc": ("src=1x4,1x8,1x16", "src_mask=1x4,1x8,1x16"),
    "silero-vad-fixed": (),
    "speech-embedding": (),
    "thai-attacut": ("input=1x2x8,1x2x32,1x2x64", "input=1x2x64,1x2x64,1x2x256"),
    "thai-deepcut": (),
    "traffic-pair": ("x=1x15x32,2x15x64,8x15x128",),
}
"""Models that are built, and the profiles for sizes that are no batch axis."""

ALSO_IN_THE_TABLE = ("basic-pitch", "melspectrogram", "ppocr4-det")
"""Converted for the table; building them takes long."""

REFUSED: Mapping[str, str] = {
    "onnx-words": "string",
    "onnx-sequence": "SequenceConstruct",
    "traffic-decode": "float64",
    "traffic-function": "float64",
    "tashkeel-rawi": "DynamicQuantizeLSTM of com.microsoft",
}
"""Models that TensorRT has no place for, and a word of the reason."""

Feed = dict[str, Any]


def write_rows(model: str, folder: Path, count: int) -> Path:
    """A folder with ``count`` calls of a model, all different."""
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(count):
        rng = np.random.default_rng([zlib.crc32(model.encode()), 100 + k])
        np.savez(folder / f"{k:03}.npz", **_FEEDS.get(model, _usual)(model, rng, k))
    return folder


def _usual(model: str, rng: np.random.Generator, k: int) -> Feed:
    return INPUTS[model](rng, k % 4)


def _file(model: str, rng: np.random.Generator, k: int) -> Feed:
    """The start and the end of a file of this repository, as the type detector takes them."""
    files = sorted(path for kind in ("py", "md", "toml", "json") for path in ROOT.glob(f"[!.]*/**/*.{kind}"))
    content = np.frombuffer(files[k * 7 % len(files)].read_bytes().strip(), np.uint8).astype(np.int32)
    window = np.full((1, 2048), 256, np.int32)
    start, end = content[:1024], content[-1024:]
    window[0, : start.size] = start
    window[0, 2048 - end.size :] = end
    return {"bytes": window}


def _chord(model: str, rng: np.random.Generator, k: int) -> Feed:
    """Three tones with overtones over a little noise."""
    seconds = np.arange(43_844) / 22_050
    keys = rng.integers(15, 70, 3)
    wave = sum(np.sin(2 * np.pi * 27.5 * 2 ** (key / 12) * h * seconds) / h for key in keys for h in (1, 2, 3))
    sound = 0.1 * np.asarray(wave) + 0.001 * rng.standard_normal(seconds.size)
    return {"serving_default_input_2:0": sound.astype(np.float32).reshape(1, -1, 1)}


_FEEDS = {"magika": _file, "basic-pitch": _chord}


# --- the table ----------------------------------------------------------------------------------


def main() -> None:
    """Print the table: one line a model, a column a precision."""
    columns = [Recipe("fp16"), *(Recipe("int8", method) for method in METHODS)]
    sys.stdout.write("| model | " + " | ".join(_column(recipe) for recipe in columns) + " |" + "\n")
    sys.stdout.write("|---" * (len(columns) + 1) + "|" + "\n")
    for entry in lay_out(only=[*PROFILES, *ALSO_IN_THE_TABLE], told=str):
        if entry.model.id != "light-squeezenet":  # its weights are all alike: nothing can be told from its answers
            cells = [_cell(entry, recipe) for recipe in columns]
            sys.stdout.write(f"| {entry.model.id} | {' | '.join(cells)} |" + "\n")


def _column(recipe: Recipe) -> str:
    return f"INT8 {recipe.method}" if recipe.precision == "int8" else "FP16"


def _cell(entry: LaidOut, recipe: Recipe) -> str:
    with tempfile.TemporaryDirectory() as folder:
        calls = write_rows(entry.model.id, Path(folder) / "rows", 40)
        rows = read_rows(calls, inputs_of(read_model(entry.path)))
        try:
            target = Path(folder) / "converted.onnx"
            done: Converted = convert(entry.path, target, source_digest(entry.path), rows, recipe, lambda *_: None)
        except ModelRefused as exc:
            return str(exc).split(":", maxsplit=1)[0]
        gate = done.gate
        assert gate is not None
        top1 = "" if gate.top1 is None else f"{gate.top1:.1%}, "
        return f"{top1}{gate.relative_error:.2%} ({done.note.split(' nodes')[0]})"


if __name__ == "__main__":
    main()
