"""``ops/gpu-acceptance`` in rehearsal: the script works; its figures say nothing of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ops.models import ROOT
from tests.support.fakegpu import environment

# It builds and serves four plans on the CPU: half a minute alone, and minutes on a machine with other work.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(400)]


def test_rehearsal_of_the_acceptance_run(tmp_path: Path) -> None:
    """Builds, measures, serves and writes its report, which says that it is a rehearsal."""
    command = [sys.executable, "-m", "ops.gpu_app", "--rehearse", "--jobs", "40", "--out", str(tmp_path)]
    command += ["--models", "speech-embedding,ppocr2-cls", "--precisions", "fp32,fp16"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (path,) = tmp_path.glob("rehearsal-*.json")
    report = json.loads(path.read_text())
    assert report["ok"]
    assert "says nothing of a GPU" in report["what"]
    assert len(report["builds"]) == len(report["engines"]) == 4
    assert report["arena"]["shared"] < report["arena"]["private"]
    assert report["service"]["calls"] == 40
    assert report["service"]["state"]["device"]["device"] == "FakeGPU 0"
    figures = report["engines"][0]
    assert {"cold_s", "plan_bytes", "hot_ms", "hot_with_graphs_ms", "bare", "over_bare_ms"} <= figures.keys()
