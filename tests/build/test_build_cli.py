"""``qworker build`` and ``qworker build-all`` at the shell, with TensorRT-RTX on the CPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from qworker.build.build_all import read_matrix
from qworker.cli import build
from qworker.errors import ConfigError
from tests.build.test_convert import floats, graph, node
from tests.support import models

pytestmark = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="tensorrt-rtx-cu13-bindings is for Linux on x86-64 only"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models that can be built, one that cannot, and rows for the first."""
    below = tmp_path / "models"
    (below / "layer").mkdir(parents=True)
    layer = graph([node("MatMul", "x w", "h"), node("Relu", "h", "y")], w=floats(4, 4)).SerializeToString()
    (below / "layer" / "model.onnx").write_bytes(layer)
    (below / "same.onnx").write_bytes(models.identity())
    (below / "text.onnx").write_bytes(models.labels())
    np.savez(below / "layer" / "rows.npz", x=floats(20, 4))
    return below


def run(store: Path, *arguments: str | Path) -> Result:
    """A command in this process."""
    app = typer.Typer()
    build.register(app)
    return CliRunner().invoke(app, [*map(str, arguments), "--store", str(store)], catch_exceptions=False)


def test_a_build_prints_its_card(folder: Path, tmp_path: Path) -> None:
    """And as JSON, the whole card."""
    arguments = ("build", folder / "layer", "--target", "rtx", "--calibration", folder / "layer" / "rows.npz")
    done = run(tmp_path / "store", *arguments)
    assert done.exit_code == 0, done.output
    assert "layer-1.rtx1.7.any.fp16.engine" in done.stdout
    assert "no TensorRT worker loads it" in done.stdout
    assert "accuracy gate" in done.stderr
    card = json.loads(run(tmp_path / "store", *arguments, "--json").stdout)["card"]
    assert card["plan"]["precision"] == "fp16"


def test_a_build_that_needs_a_gpu_says_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3: not failed, not done."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(tmp_path / "store", "build", folder / "layer", "--json")
    assert done.exit_code == 3
    assert "What is left is the builder" in done.stderr
    assert json.loads(done.stdout)["card"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("text.onnx", "--target", "rtx"), 1, "string tensor"),
        (("none.onnx",), 1, "does not exist"),
        (("layer", "--precision", "fp8"), 2, "fp32, fp16, int8"),
        (("layer", "--workspace", "much"), 2, "4GiB"),
    ],
)
def test_failures_have_their_exit_codes(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    """1 for the model, 2 for the command line."""
    done = run(tmp_path / "store", "build", folder / arguments[0], *arguments[1:])
    assert done.exit_code == code, done.output
    assert words in done.stderr


MATRIX = """
[defaults]
target = "rtx"
precision = ["fp32"]

[[model]]
path = "text.onnx"

[[model]]
path = "layer/model.onnx"
id = "org/layer"
precision = ["fp16", "int8"]
calibration = "layer/rows.npz"
max_top1_drop = 1.0

[[model]]
path = "sam*.onnx"
"""


def test_a_matrix_is_built_to_its_end_and_goes_on(folder: Path, tmp_path: Path) -> None:
    """One failure stops nothing; the second run finds what is there."""
    matrix = tmp_path / "matrix.toml"
    matrix.write_text(MATRIX)
    done = run(tmp_path / "store", "build-all", folder, "--matrix", matrix, "--json")
    table = json.loads(done.stdout)
    assert [(row["model"], row["precision"], row["state"]) for row in table] == [
        ("text", "fp32", "failed"),
        ("org/layer", "fp16", "built"),
        ("org/layer", "int8", "built"),
        ("same", "fp32", "built"),
    ]
    assert "string tensor" in table[0]["words"]
    assert done.exit_code == 1
    matrix.write_text(MATRIX.replace('[[model]]\npath = "text.onnx"\n', ""))
    done = run(tmp_path / "store", "build-all", folder, "--matrix", matrix)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("there") == 3
    assert "built" not in done.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[defaults", "TOML"),
        ("[[models]]\npath = 'x'", "models"),
        ("[[model]]\npath = 'x.onnx'\nprecison = ['fp16']", "precison"),
        ("[[model]]\npath = 'x.onnx'\nprecision = ['fp8']", "fp32"),
        ("[[model]]\npath = 'none/*.onnx'", "nothing in"),
        ("[[model]]\npath = '*.onnx'\nid = 'one'", "leave the id out"),
    ],
)
def test_a_wrong_matrix_is_told_before_anything_is_built(folder: Path, tmp_path: Path, text: str, words: str) -> None:
    """The entry, and what is wrong with it."""
    matrix = tmp_path / "matrix.toml"
    matrix.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_matrix(folder, matrix)


def test_a_matrix_without_models_takes_all_below_the_folder(folder: Path, tmp_path: Path) -> None:
    """In the order of their paths."""
    matrix = tmp_path / "matrix.toml"
    matrix.write_text("[defaults]\nprecision = ['fp32', 'fp16']")
    requests = read_matrix(folder, matrix)
    assert [request.path.name for request in requests[::2]] == ["model.onnx", "same.onnx", "text.onnx"]
    assert [request.recipe.precision for request in requests[:2]] == ["fp32", "fp16"]
