"""What happened to models here of late: loads, failures, evictions, orders. For people who ask why.

Owner: the event loop. Nothing is noted for a job.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Literal

MOST_NOTES: Final = 400
LONGEST_REASON: Final = 600

Kind = Literal["loaded", "preloaded", "unloaded", "evicted", "failed", "no_room", "refused", "ordered"]


@dataclass(frozen=True, slots=True)
class Note:
    """``at``: unix seconds. ``seconds``: how long a load took."""

    number: int
    at: float
    kind: Kind
    model: str
    reason: str = ""
    seconds: float | None = None
    stages: dict[str, float] | None = None
    """Of a load: what each of its stages took."""

    def as_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {"number": self.number, "at": round(self.at, 3), "kind": self.kind, "model": self.model}
        if self.reason:
            told["reason"] = self.reason
        if self.stages:
            told["stages"] = {stage: round(seconds, 4) for stage, seconds in self.stages.items()}
        return told if self.seconds is None else {**told, "seconds": round(self.seconds, 4)}


@dataclass(slots=True)
class Chronicle:
    """The last few hundred notes, and the stage that each load in progress is at."""

    notes: deque[Note] = field(default_factory=lambda: deque[Note](maxlen=MOST_NOTES))
    stages: dict[str, tuple[str, float, float]] = field(default_factory=dict[str, tuple[str, float, float]])
    """By model: the stage, since when (monotonic), and the load seconds that its card expects."""
    _spent: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    _number: int = 0

    def note(self, kind: Kind, model: str, reason: str = "", seconds: float | None = None) -> None:
        self._number += 1
        stages = None
        if kind == "loaded":
            self._close_stage(model)
            stages = self._spent.get(model)
        self.notes.append(Note(self._number, time.time(), kind, model, reason[:LONGEST_REASON], seconds, stages))

    def enter(self, model: str, stage: str, expected: float = 0.0) -> None:
        """The load of ``model`` has come to ``stage``."""
        self._close_stage(model)
        self.stages[model] = (stage, time.monotonic(), expected)

    def leave(self, model: str) -> None:
        """The load of ``model`` is over, well or not."""
        self.stages.pop(model, None)
        self._spent.pop(model, None)

    def of(self, model: str, most: int) -> list[dict[str, Any]]:
        """The last ``most`` notes on one model, oldest first."""
        return [note.as_dict() for note in self.notes if note.model == model][-most:]

    def stages_of_last_load(self, model: str) -> dict[str, float]:
        """Seconds of the stages of the last load of one model that went well."""
        for note in reversed(self.notes):
            if note.model == model and note.kind == "loaded":
                return note.stages or {}
        return {}

    def since(self, number: int, most: int) -> list[dict[str, Any]]:
        """Notes after the one of that number, at most the last ``most``."""
        fresh: list[dict[str, Any]] = []
        for note in reversed(self.notes):
            if note.number <= number or len(fresh) >= most:
                break
            fresh.append(note.as_dict())
        return fresh[::-1]

    def loading(self) -> list[dict[str, Any]]:
        """Loads in progress: stage, seconds in it, and the seconds that a load is expected to take."""
        now = time.monotonic()
        return [
            {"model": model, "stage": stage, "seconds": round(now - since, 3), "expected": round(expected, 4)}
            for model, (stage, since, expected) in self.stages.items()
        ]

    def _close_stage(self, model: str) -> None:
        """Add up what the stage that ends now has taken."""
        if model in self.stages:
            stage, since, expected = self.stages[model]
            now, spent = time.monotonic(), self._spent.setdefault(model, {})
            spent[stage] = spent.get(stage, 0.0) + now - since
            self.stages[model] = (stage, now, expected)
