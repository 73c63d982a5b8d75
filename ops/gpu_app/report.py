"""The acceptance report: what ran, what was measured, and which checks held."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass
class Report:
    """Everything that is written down. ``ok`` when all checks held."""

    rehearsal: bool
    started: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    checks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def note(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def check(self, name: str, ok: bool, found: Any) -> None:
        """One thing that must hold, and what was found."""
        self.checks.append({"name": name, "ok": bool(ok), "found": found})
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {found}", flush=True)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {line}", flush=True)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check["ok"] for check in self.checks)

    def write(self, folder: Path) -> Path:
        """Write it; the file."""
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC)
        told = {
            "what": "rehearsal over a driver that is none: says nothing of a GPU" if self.rehearsal else "on a GPU",
            "ok": self.ok,
            "when": now.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self.started, 1),
            "host": {"system": platform.platform(), "python": platform.python_version(), "machine": platform.machine()},
            **self.facts,
            "checks": self.checks,
        }
        kind = "rehearsal" if self.rehearsal else "gpu"
        path = folder / f"{kind}-{now:%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        return path
