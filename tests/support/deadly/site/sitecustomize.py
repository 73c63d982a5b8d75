"""Makes some inputs, and some models, end this process as a fault in a native library does: without a word."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KILLS, KILLS_AT_LOAD, SWITCH = 666.0, "deadly", "DEADLY_SWITCH"

if "-c" in sys.argv[:1] or any("qworker" in word for word in sys.orig_argv):
    from qworker.engine.onnx import OnnxBackend, OnnxEngine

    _run, _load = OnnxEngine.run, OnnxBackend.load

    def run(self: OnnxEngine, inputs: Sequence[Any], outputs: Sequence[str] = ()) -> list[Any]:
        for tensor in inputs:
            if tensor.datatype == "FP32" and (tensor.array == KILLS).any():
                os.kill(os.getpid(), signal.SIGKILL)
        return _run(self, inputs, outputs)

    def load(self: OnnxBackend, source: Any) -> OnnxEngine:
        if source.model.startswith(KILLS_AT_LOAD) and Path(os.environ[SWITCH]).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return _load(self, source)

    OnnxEngine.run, OnnxBackend.load = run, load  # type: ignore[method-assign]
