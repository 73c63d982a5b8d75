"""A model of three numbers, to see whether engines still run: what ``/readyz`` asks before it says yes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from qworker.engine.base import Backend, Engine, ModelSource
from qworker.errors import QworkerError
from qworker.wire.datatypes import tensor

CANARY: Final = bytes.fromhex(
    "08083a3a0a0e0a01780a017812017922034d756c120663616e6172795a0f0a0178120a0a08080112040a020803"
    "620f0a0179120a0a08080112040a02080342040a00100d"
)
"""ONNX: y = x * x, for three numbers."""


class OnnxCanary:
    """Runs the canary on ``backend``. One thread at a time calls ``run``; the engine is made by the first."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._engine: Engine | None = None

    def run(self) -> str | None:
        """None when the answer is right, else what is wrong. Blocks."""
        try:
            if self._engine is None:
                self._engine = self._backend.load(ModelSource("canary", "1", Path("canary.onnx"), CANARY))
            [answer] = self._engine.run([tensor("x", np.array([1, 2, 3], np.float32))])
        except QworkerError as error:
            return f"the canary inference failed: {error}"
        found: list[float] = answer.array.tolist()
        return None if found == [1.0, 4.0, 9.0] else f"the canary inference gave {found} for the squares of 1, 2 and 3"
