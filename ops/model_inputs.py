"""Valid inputs for the real models of ``ops/models.py``, made from a seed: ``(rng, k) -> {name: array}``.

``k`` counts the different inputs of one model. Some of them mean something (a tone, a source file), so
that the answer is known without running the model; ``TRUTHS`` checks those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
Inputs = Callable[[np.random.Generator, int], Arrays]
Truth = Callable[[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]], int], str | None]
"""(inputs, outputs, k) -> what is wrong, None when the answer is right."""


def noise(name: str, *shape: int, low: float = 0.0, high: float = 1.0, dtype: str = "float32") -> Inputs:
    """One input of uniform noise; images are given in the range their model was trained on."""

    def make(rng: np.random.Generator, k: int) -> Arrays:
        return {name: rng.uniform(low, high, shape).astype(dtype)}

    return make


def normal(name: str, *shape: int, dtype: str = "float32") -> Inputs:
    def make(rng: np.random.Generator, k: int) -> Arrays:
        return {name: rng.standard_normal(shape).astype(dtype)}

    return make


def tokens(name: str, *shape: int, below: int) -> Inputs:
    """One input of token ids; the last axis grows with ``k``, as texts have different lengths."""

    def make(rng: np.random.Generator, k: int) -> Arrays:
        return {name: rng.integers(1, below, (*shape[:-1], shape[-1] + 8 * k), dtype=np.int64)}

    return make


def text_image(name: str, height: int, width: int, *, wider: int = 0) -> Inputs:
    """Dark strokes on a light ground, normalized to [-1, 1], NCHW; the width grows with ``k``."""

    def make(rng: np.random.Generator, k: int) -> Arrays:
        image = np.full((1, 3, height, width + wider * k), 0.9, np.float32)
        for _ in range(12):
            top, left = rng.integers(2, height - 12), rng.integers(2, image.shape[3] - 12)
            tall, wide = rng.integers(2, 10, 2)
            image[:, :, top : top + tall, left : left + wide] = -0.9
        return {name: image}

    return make


# --- sound ----------------------------------------------------------------------------------------------


def voice_frame(samples: int, *, rate: bool) -> Inputs:
    """One frame for voice detection with its recurrent state; ``k == 0`` is silence from a fresh state."""

    def make(rng: np.random.Generator, k: int) -> Arrays:
        frame: Arrays = {
            "input": (0.1 * k * rng.standard_normal((1, samples))).astype(np.float32),
            "state": (0.1 * k * rng.standard_normal((2, 1, 128))).astype(np.float32),
        }
        if rate:
            frame["sr"] = np.array(16_000, np.int64)
        return frame

    return make


def silence_is_no_speech(inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], k: int) -> str | None:
    probability = float(outputs["output"].reshape(-1)[0])
    if k == 0 and probability > 0.1:
        return f"silence is called speech with probability {probability:.3f}"
    return None


PITCHES = (48, 36, 55, 43)
"""Piano keys counted from A0: A4, A3, E5 and E4."""


def tone(name: str, samples: int) -> Inputs:
    """A plain piano-like tone of a known pitch, at 22,050 samples a second."""

    def make(rng: np.random.Generator, k: int) -> Arrays:
        frequency = 27.5 * 2 ** (PITCHES[k % len(PITCHES)] / 12)
        seconds = np.arange(samples) / 22_050
        wave = sum(np.sin(2 * np.pi * frequency * h * seconds) / h for h in (1, 2, 3))
        return {name: (0.3 * np.asarray(wave)).astype(np.float32).reshape(1, samples, 1)}

    return make


def pitch_is_heard(inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], k: int) -> str | None:
    heard = int(outputs["StatefulPartitionedCall:1"].mean(axis=(0, 1)).argmax())
    if heard != PITCHES[k % len(PITCHES)]:
        return f"a tone of key {PITCHES[k % len(PITCHES)]} is heard as key {heard}"
    return None


def sound(name: str, samples: int) -> Inputs:
    """16-bit sound at 16,000 samples a second, as floats; its length grows with ``k``."""

    def make(rng: np.random.Generator, k: int) -> Arrays:
        seconds = np.arange(samples + 1_280 * k) / 16_000
        wave = 8_000 * np.sin(2 * np.pi * rng.uniform(100, 900) * seconds) + 500 * rng.standard_normal(seconds.size)
        return {name: wave.astype(np.float32).reshape(1, -1)}

    return make


# --- text -----------------------------------------------------------------------------------------------


def name_encoder(rng: np.random.Generator, k: int) -> Arrays:
    length = 7 + 2 * k
    return {"src": rng.integers(4, 40, (1, length), dtype=np.int64), "src_mask": np.zeros((1, length), np.bool_)}


def mask_comes_back(inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], k: int) -> str | None:
    if not np.array_equal(inputs["src_mask"], outputs["src_mask_out"]):
        return "the mask does not come back as it went in"
    return None


def name_decoder(rng: np.random.Generator, k: int) -> Arrays:
    length = 7 + 2 * k
    return {
        "prefix": rng.integers(4, 40, (1, 2 + k), dtype=np.int64),
        "memory": rng.uniform(-1, 1, (1, length, 256)).astype(np.float32),
        "src_mask": np.zeros((1, length), np.bool_),
        "hidden": rng.uniform(-1, 1, (1, 2, 256)).astype(np.float32),
    }


def character_windows(rng: np.random.Generator, k: int) -> Arrays:
    """A window of 21 characters and their kinds for each character of a text: rows are positions."""
    rows = 6 + 5 * k
    return {
        "input_1": rng.integers(1, 178, (rows, 21)).astype(np.float32),
        "input_2": rng.integers(1, 12, (rows, 21)).astype(np.float32),
    }


# --- files ----------------------------------------------------------------------------------------------

_FILES: tuple[tuple[str, int, str], ...] = (
    (
        "python",
        143,
        (
            "import os\nfrom pathlib import Path\n\n\ndef size_of(folder: Path) -> int:\n"
            '    """Bytes of all files below a folder."""\n    total = 0\n    for name in os.listdir(folder):\n'
            "        path = folder / name\n        if path.is_dir():\n            total += size_of(path)\n"
            "        else:\n            total += path.stat().st_size\n    return total\n\n\n"
            'if __name__ == "__main__":\n    print(size_of(Path.cwd()))\n'
        ),
    ),
    (
        "json",
        87,
        (
            '{\n  "name": "orders",\n  "version": 3,\n  "fields": [\n    {"id": 1, "type": "string", "null": false},\n'
            '    {"id": 2, "type": "number", "null": true}\n  ],\n  "owner": {"team": "sales", "since": 2019}\n}\n'
        ),
    ),
    (
        "html",
        71,
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Tides</title></head>\n<body>\n'
            "<h1>Tides</h1>\n<p>High water is at <b>11:40</b>.</p>\n<ul><li>Monday</li><li>Tuesday</li></ul>\n"
            "</body>\n</html>\n"
        ),
    ),
    (
        "shell",
        161,
        (
            '#!/bin/sh\nset -eu\nfor f in *.log; do\n  if [ -s "$f" ]; then\n    gzip -9 "$f" && echo "packed $f"\n'
            "  fi\ndone\nexit 0\n"
        ),
    ),
)
"""A file's kind, its place among the model's labels, and its text."""


def file_bytes(rng: np.random.Generator, k: int) -> Arrays:
    """A file as its type detector sees it: the first and the last 1,024 bytes, 256 where there are none."""
    text = np.frombuffer(_FILES[k % len(_FILES)][2].strip().encode(), np.uint8).astype(np.int32)[:1024]
    window = np.full((1, 2048), 256, np.int32)
    window[0, : text.size] = text
    window[0, 2048 - text.size :] = text
    return {"bytes": window}


def kind_is_known(inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], k: int) -> str | None:
    kind, label, _ = _FILES[k % len(_FILES)]
    found = int(outputs["target_label"].reshape(-1).argmax())
    return None if found == label else f"a {kind} file (label {label}) is taken for label {found}"


# --- the small ones that come with inputs and answers of their own -----------------------------------------


def words(name: str, count: int) -> Inputs:
    days = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")

    def make(rng: np.random.Generator, k: int) -> Arrays:
        # Exactly one is the stop word of the model, which declares one word less in its output.
        chosen = [days[i] for i in rng.permutation(len(days) - 1)[: count - 1] + 1]
        return {name: np.array(["monday", *chosen], dtype=np.str_)}

    return make


def expand(rng: np.random.Generator, k: int) -> Arrays:
    return {"X": rng.standard_normal((1, 3, 1)).astype(np.float32), "shape": np.array([3, 1], np.int64)}


def three_tensors(rng: np.random.Generator, k: int) -> Arrays:
    return {name: rng.standard_normal((2, 3, 4)).astype(np.float32) for name in ("X", "Y", "Z")}


INPUTS: dict[str, Inputs] = {
    "silero-vad": voice_frame(576, rate=True),
    "silero-vad-op18": voice_frame(576, rate=True),
    "silero-vad-half": voice_frame(576, rate=False),
    "silero-vad-fixed": voice_frame(576, rate=False),
    "magika": file_bytes,
    "ppocr4-det": text_image("x", 96, 128, wider=32),
    "ppocr4-rec": text_image("x", 48, 160, wider=32),
    "ppocr2-cls": text_image("x", 48, 192),
    "basic-pitch": tone("serving_default_input_2:0", 43_844),
    "melspectrogram": sound("input", 12_400),
    "speech-embedding": normal("input_1", 1, 76, 32, 1),
    "thai-attacut": tokens("input", 1, 2, 32, below=40),
    "thai-deepcut": character_windows,
    "tashkeel-bilstm": tokens("input_ids", 1, 24, below=40),
    "tashkeel-rawi": tokens("input", 1, 24, below=40),
    "romanizer-enc": name_encoder,
    "romanizer-dec": name_decoder,
    "traffic-function": normal("X", 1, 229, dtype="float64"),
    "traffic-decode": normal("X", 3, 25, dtype="float64"),
    "traffic-lanes": normal("X", 2, 508, dtype="float64"),
    "traffic-pair": normal("x", 2, 15, 64),
    "light-resnet50": noise("gpu_0/data_0", 1, 3, 224, 224),
    "light-squeezenet": noise("data_0", 1, 3, 224, 224),
    "light-shufflenet": noise("gpu_0/data_0", 1, 3, 224, 224),
    "light-inception-v1": noise("data_0", 1, 3, 224, 224),
    "light-inception-v2": noise("data_0", 1, 3, 224, 224),
    "light-densenet121": noise("data_0", 1, 3, 224, 224),
    "onnx-words": words("x", 4),
    "onnx-expand": expand,
    "onnx-sequence": three_tensors,
}
"""How to feed each model of ``models.toml``."""

TRUTHS: dict[str, Truth] = {
    "silero-vad": silence_is_no_speech,
    "silero-vad-op18": silence_is_no_speech,
    "silero-vad-half": silence_is_no_speech,
    "silero-vad-fixed": silence_is_no_speech,
    "magika": kind_is_known,
    "basic-pitch": pitch_is_heard,
    "romanizer-enc": mask_comes_back,
}
"""What is known of a model's answers without running it."""
