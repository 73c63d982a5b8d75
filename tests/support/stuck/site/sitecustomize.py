"""Python runs this before a worker that has it in its path: faults that no file or message can cause."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

SWITCH = os.environ.get("STUCK_SWITCH")

if SWITCH:
    from qworker.engine.onnx import OnnxBackend
    from qworker.worker.hot_zone import HotZone

    load, used = OnnxBackend.load, HotZone.used

    def hanging_load(self: OnnxBackend, source: Any) -> Any:
        while Path(SWITCH).exists():
            Path(f"{SWITCH}-hangs").touch()
            time.sleep(0.05)
        return load(self, source)

    def hanging_loop(self: HotZone, model: str) -> None:
        if Path(SWITCH).exists():
            time.sleep(3600)
        used(self, model)

    if os.environ.get("STUCK_WHERE") == "loop":
        HotZone.used = hanging_loop
    else:
        OnnxBackend.load = hanging_load
