"""``python -m qworker.build.build_all_child``: one build of a matrix, a request as JSON on stdin, and an
answer as JSON on what was stdout (libraries may print to the new one)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from qworker.build.build_all import REQUEST
from qworker.build.plan import PlanOutcome, PlanRequest, build
from qworker.build.tensorrt import NoWatch, Watch
from qworker.errors import QworkerError
from qworker.store.local import LocalStore
from qworker.telemetry.log import configure_logging


class _Lines:
    """Tells in lines, to what becomes the caller's stderr."""

    def say(self, line: str) -> None:
        sys.stderr.write(f"  {line}\n")

    def stage(self, name: str, done: int, total: int) -> None:
        """Too much for lines."""

    @property
    def watch(self) -> Watch:
        return NoWatch()


def main() -> int:
    """The child: one request, one answer."""
    order: dict[str, Any] = json.loads(sys.stdin.read())
    request = REQUEST.validate_python(order["request"])
    configure_logging("warning", "auto")
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            outcome = build(LocalStore(Path(order["store"])), request, _Lines())
        except QworkerError as exc:
            json.dump(_failed(request, str(exc)), answer)
        except KeyboardInterrupt:
            return 130
        else:
            json.dump(_told(outcome), answer)
    return 0


def _failed(request: PlanRequest, words: str) -> dict[str, Any]:
    model = request.model or (request.path.parent.name if request.path.name == "model.onnx" else request.path.stem)
    return {"model": model, "version": request.version, "state": "failed", "words": words, "top1": None}


def _told(outcome: PlanOutcome) -> dict[str, Any]:
    state = "left" if outcome.card is None else "there" if outcome.reused else "built"
    return {
        "model": outcome.model,
        "version": outcome.version,
        "state": state,
        "words": outcome.left or ("" if outcome.card is None else outcome.card.files[0].name),
        "top1": None if outcome.gate is None else outcome.gate.top1,
    }


if __name__ == "__main__":
    sys.exit(main())
