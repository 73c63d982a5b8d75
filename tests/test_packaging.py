"""What is shipped: metadata, the wheel, the images, and the rules that hold the layers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import qworker

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def metadata() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


# --- metadata and the wheel -----------------------------------------------------------------------------


def test_the_version_is_told_in_one_voice() -> None:
    """pyproject, the installed package, ``qworker.__version__`` and the command agree."""
    wanted = metadata()["project"]["version"]
    said = subprocess.run([BIN / "qworker", "--version"], capture_output=True, text=True, check=True).stdout.split()
    assert (version("qworker"), qworker.__version__, said[-1]) == (wanted, wanted, wanted)


def test_extras_are_there() -> None:
    """Each optional part has its extra."""
    assert set(metadata()["project"]["optional-dependencies"]) >= {"gpu", "rtx", "batch", "s3", "otel", "fast", "dev"}


def test_every_dependency_has_both_ends() -> None:
    """A range without an upper end breaks on the next major version, one without a lower end on an old one."""
    project = metadata()["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    open_ended = [wanted for wanted in requirements if not re.fullmatch(r"[\w.-]+>=[\w.]+,<[\w.]+(; .*)?", wanted)]
    assert open_ended == []


def test_the_lock_covers_every_dependency() -> None:
    """A dependency that was added without ``ops/lock`` would be missing after a set-up from nothing."""
    project = metadata()["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *chain(*(extras[name] for name in extras if name != "gpu"))]
    locked = set(
        re.findall(r"^([\w.-]+)==", (ROOT / "ops/requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {name.split(">=")[0] for name in wanted} <= locked


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    """The wheel has the typing marker, the licence and the command, and no tests or scripts."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [entry_points] = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert {name.split("/")[0] for name in names} == {"qworker", f"qworker-{qworker.__version__}.dist-info"}
    assert "qworker/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "qworker = qworker.cli.main:main" in entry_points


# --- layers -----------------------------------------------------------------------------------------------


FORBIDDEN = {
    "policy/ is pure": ["policy.residency -> asyncio", "policy.residency -> time", "policy.residency -> random"],
    "wire/ is pure": ["wire.codec -> asyncio", "wire.topology -> logging"],
    "AMQP libraries stay in broker/": ["worker.worker -> aio_pika", "client.client -> pamqp", "config -> aiormq"],
    "GPU libraries stay in engine/tensorrt": ["engine.base -> tensorrt", "worker.loader -> cuda"],
    "worker/ and client/ see contracts": ["worker.worker -> qworker.engine.onnx", "client.link -> qworker.broker.node"],
    "Imports go down only": [
        "wire.codec -> qworker.policy.residency",
        "broker.base -> qworker.worker.worker",
        "worker.worker -> qworker.client.client",
        "errors -> qworker.config",
    ],
}
"""The start of each contract's name, and imports that it forbids."""


def test_a_forbidden_import_turns_the_linter_red(tmp_path: Path) -> None:
    """In a copy of the package each rule is broken, and each broken import is named."""
    shutil.copytree(ROOT / "qworker", tmp_path / "qworker", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for broken in chain(*FORBIDDEN.values()):
        importer, _, imported = broken.partition(" -> ")
        with (tmp_path / "qworker" / f"{importer.replace('.', '/')}.py").open("a", encoding="utf-8") as module:
            module.write(f"\nimport {imported}\n")
    done = subprocess.run(
        [BIN / "lint-imports", "--no-logo", "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    for contract, imports in FORBIDDEN.items():
        assert re.search(rf"{re.escape(contract)}[^.]*? BROKEN", said), f"{contract} is not broken:\n{done.stdout}"
        missing = [broken for broken in imports if f"qworker.{broken} " not in said]
        assert missing == [], f"not named for '{contract}'"


# --- images -----------------------------------------------------------------------------------------------


def stages() -> dict[str, list[tuple[str, str]]]:
    """Stage name → its (instruction, argument) pairs, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        instruction, _, argument = line.strip().partition(" ")
        if instruction == "FROM":
            name = argument.rpartition(" AS ")[2]
            found[name] = []
        found[name].append((instruction, argument.strip()))
    return found


@pytest.mark.parametrize(("target", "base"), [("cpu", "python:3.12-slim"), ("gpu", "nvidia/cuda:13.")])
def test_an_image_runs_without_rights_and_tells_its_health(target: str, base: str) -> None:
    """The target starts from its base, runs as a numbered user, has a health check and starts qworker."""
    stage = stages()[target]
    told = dict(stage)
    assert told["FROM"].startswith(base)
    assert told["USER"].isdecimal()
    assert int(told["USER"]) > 0
    assert "/healthz" in told["HEALTHCHECK"]
    assert told["ENTRYPOINT"] == '["qworker"]'
    order = [instruction for instruction, _ in stage]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert "pip install" not in told.get("RUN", ""), "build tools belong in an earlier stage"


def test_what_the_images_copy_reaches_the_builder() -> None:
    """Everything that is copied from the source tree exists and is let through by .dockerignore."""
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for stage in stages().values()
        for instruction, argument in stage
        if instruction == "COPY" and not argument.startswith("--from")
        for source in argument.split()[:-1]
    }
    assert copied
    assert {source for source in copied if not (ROOT / source).exists()} == set()
    assert copied <= let_through


# --- the tree ---------------------------------------------------------------------------------------------


def test_no_tracked_file_depends_on_one_machine() -> None:
    """No package index, no absolute path of a developer's machine, nowhere."""
    # Put together here, so that this file is not a finding itself.
    hosts = [
        *(
            ".".join(parts)
            for parts in (("pypi", "org"), ("pythonhosted", "org"), ("registry", "npmjs"), ("debian", "org"))
        ),
        "find-" + "links =",
    ]
    paths = ["/" + "work/", "/home/" + "user", "/Us" + "ers/"]
    findings = [
        f"{path.relative_to(ROOT)}: {needle}"
        for path in tracked_files()
        if path.suffix not in {".npz", ".msgpack", ".onnx", ".png"}
        for needle in [*hosts, *paths]
        if needle in path.read_text(encoding="utf-8", errors="replace")
    ]
    assert findings == []


def test_scripts_can_be_run() -> None:
    """Each script is executable, stops at its first error and works from any folder."""
    for name in ("ops/check", "ops/test", "ops/demo", "ops/lock", ".ci/run"):
        script = ROOT / name
        text = script.read_text(encoding="utf-8")
        assert script.stat().st_mode & 0o111 == 0o111, name
        assert text.startswith("#!/usr/bin/env bash\n"), name
        assert "set -euo pipefail" in text, name
        assert "BASH_SOURCE" in text, name
