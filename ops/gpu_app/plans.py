"""Plans of real models at several precisions, each under an id of its own, in a store."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.gpu_app.report import Report
from ops.models import LaidOut, lay_out
from qworker.build.profiles import parse_profiles
from qworker.build.register import register
from qworker.store.card import Card
from qworker.store.local import LocalStore
from qworker.store.plans import plan_cards
from tests.build.real_models import PROFILES, write_rows

BUILD_SECONDS = 90
ALL_BUILDS_SECONDS = 270
"""What is built until then is measured and served."""
BOUNDS = {"fp32": 0.02, "fp16": 0.05}
"""Largest error over an output's largest magnitude. What INT8 loses on made-up inputs is the gate's business."""


@dataclass(frozen=True)
class Build:
    """One model at one precision."""

    id: str
    precision: str
    source: LaidOut
    card: Card
    path: Path

    def error(self, k: int, outputs: dict[str, NDArray[Any]]) -> float:
        """The largest error against the known answer, over that answer's largest magnitude."""
        worst = 0.0
        for name, right in self.source.outputs(k).items():
            found = outputs[name]
            if found.shape != right.shape:
                return float("inf")
            scale = float(np.max(np.abs(right), initial=0.0)) or 1.0
            worst = max(worst, float(np.max(np.abs(found.astype(np.float64) - right), initial=0.0)) / scale)
        return worst

    def good(self, error: float) -> bool:
        return np.isfinite(error) and error <= BOUNDS.get(self.precision, np.inf)


def build_all(
    report: Report, store: Path, models: Sequence[str], precisions: Sequence[str], folder: Path
) -> list[Build]:
    """Build each model at each precision. What fails is a failed check."""
    store.mkdir(parents=True, exist_ok=True)
    builds: list[Build] = []
    for source in lay_out(only=list(models), told=report.say):
        rows = write_rows(source.model.id, folder / "rows" / source.model.id, 40)
        for precision in precisions:
            model = f"{source.model.id}-{precision}"
            if time.monotonic() - report.started > ALL_BUILDS_SECONDS:
                report.check(f"build {model}", False, f"no time left: {ALL_BUILDS_SECONDS} s for all builds are over")
                continue
            report.say(f"building {model}")
            started = time.monotonic()
            failed = _rehearsed(store, source, model, precision) if report.rehearsal else None
            failed = failed if report.rehearsal else _built(store, source, model, precision, rows, folder)
            seconds = round(time.monotonic() - started, 1)
            report.check(f"build {model}", failed is None, failed or f"{seconds} s")
            if failed is None:
                local = LocalStore(store)
                card = plan_cards(local, model)[-1]
                path = local.version_folder(model, card.version) / card.files[0].name
                builds.append(Build(model, precision, source, card, path))
    report.note("builds", [_facts(build) for build in builds])
    return builds


def _built(store: Path, source: LaidOut, model: str, precision: str, rows: Path, folder: Path) -> str | None:
    """By the command that a person would use; what went wrong, or None."""
    command = [sys.executable, "-m", "qworker", "build", str(source.path), "--id", model, "--precision", precision]
    command += ["--store", str(store), "--sample", str(source.folder / "sample.npz"), "--calibration", str(rows)]
    # the gate's verdict on made-up inputs is not what is tested here; its figures are in the card
    command += ["--max-top1-drop", "1", "--timing-cache", str(folder / "timing.cache")]
    for profile in PROFILES[source.model.id]:
        command += ["--profile", profile]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"not done in {BUILD_SECONDS} s"
    return None if done.returncode == 0 else done.stderr[-2000:] or f"exit code {done.returncode}"


def _rehearsed(store: Path, source: LaidOut, model: str, precision: str) -> str | None:
    from tests.support.fakegpu.store import put_plan

    register(LocalStore(store), source.path, model, sample=source.folder / "sample.npz")
    ranges = [
        {name: [bounds.min, bounds.opt, bounds.max] for name, bounds in profile.items()}
        for profile in parse_profiles(PROFILES[source.model.id])
    ]
    put_plan(store, model, precision=precision, weights=8 << 20, build={"profiles": ranges or None, "dims": (1, 4, 8)})
    return None


def _facts(build: Build) -> dict[str, Any]:
    assert build.card.plan is not None
    plan = build.card.plan.model_dump(mode="json", exclude={"profiles", "options", "source_sha256"})
    return {"id": build.id, "plan_bytes": build.card.files[0].nbytes, "resident": build.card.resident_bytes, **plan}
