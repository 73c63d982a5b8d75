"""``ops/gpu-acceptance``: see there."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ops.gpu_app.measure import measure_all
from ops.gpu_app.plans import build_all
from ops.gpu_app.report import Report
from ops.gpu_app.serve import serve
from ops.models import ROOT, LayOutError
from qworker.engine.tensorrt.gpu import Gpu, open_gpu
from qworker.engine.tensorrt.library import Library, library_of, load_library
from qworker.errors import QworkerError

MODELS = "ppocr2-cls,speech-embedding,ppocr4-rec"


def main() -> int:
    parser = argparse.ArgumentParser(prog="ops/gpu-acceptance")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--precisions", default="fp32,fp16,int8")
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "ops" / "reports")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    report = Report(asked.rehearse)
    try:
        _run(report, asked)
    except (QworkerError, LayOutError, KeyboardInterrupt) as exc:
        report.check("it came to its end", False, f"{type(exc).__name__}: {exc}")
    path = report.write(asked.out)
    print(f"\n{'all checks held' if report.ok else 'SOME CHECKS FAILED'}; the report is {path}", flush=True)
    return 0 if report.ok else 1


def _run(report: Report, asked: Any) -> None:
    more: Mapping[str, str] = {}
    if asked.rehearse:
        from tests.support.fakegpu import double, environment, fake_gpu

        fake_gpu()
        library_double = library_of(double())
        more = environment()
    gpu = open_gpu()  # before anything of TensorRT exists
    library = library_double if asked.rehearse else load_library()
    _note_device(report, gpu, library)
    with tempfile.TemporaryDirectory(prefix="qworker-gpu-") as name:
        folder = Path(name)
        builds = build_all(report, folder / "store", asked.models.split(","), asked.precisions.split(","), folder)
        if not builds:
            return
        measure_all(report, gpu, library, builds)
        serve(report, builds, folder / "store", folder, asked.jobs, more)
    if not asked.rehearse:
        _run_tests(report)


def _note_device(report: Report, gpu: Gpu, library: Library) -> None:
    facts = gpu.facts(library.version)
    report.note(
        "device",
        {
            "name": gpu.name,
            "compute_capability": gpu.compute_capability,
            "bytes": gpu.memory().total,
            "tensorrt": library.version,
            "cuda": facts.cuda,
            "driver": facts.driver,
        },
    )
    report.say(f"{gpu.name}, {library.name}, driver {facts.driver}")


def _run_tests(report: Report) -> None:
    """The GPU suite, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    report.check("tests/gpu", done.returncode == 0, (done.stdout.splitlines() or [done.stderr])[-1])


if __name__ == "__main__":
    sys.exit(main())
