"""What onnxruntime says of a run that failed goes to the requester and into the log: without the inputs' values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend
from qworker.errors import JobError
from qworker.wire.datatypes import tensor
from tests.support.models import model, value

SECRET = 718_281_828_459


@pytest.mark.parametrize(
    ("operator", "declared", "given", "words"),
    [
        ("Reshape", TensorProto.INT64, np.array([SECRET, -1]), "cannot be reshaped"),
        ("Gather", TensorProto.INT64, np.array([SECRET]), "out of data bounds"),
        ("TopK", TensorProto.INT64, np.array([1234]), "should not be greater"),
    ],
)
def test_no_values_in_what_the_library_says(
    operator: str,
    declared: int,
    given: np.ndarray,
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error tells what is wrong, and not with which number; the library logs nothing by itself."""
    outputs = ["y", "i"] if operator == "TopK" else ["y"]
    node = helper.make_node(operator, ["x", "z"], outputs)
    inputs = [value("x", TensorProto.FLOAT, ("n", "m")), value("z", declared, ("k",))]
    ends = [value("y", TensorProto.FLOAT, None), value("i", TensorProto.INT64, None)][: len(outputs)]
    engine = OnnxBackend().load(ModelSource("m", "1", Path("-"), model([node], inputs, ends)))
    with pytest.raises(JobError, match=words) as refused:
        engine.run((tensor("x", np.zeros((2, 3), np.float32)), tensor("z", given)))
    engine.close()
    said = str(refused.value) + "".join(capfd.readouterr())
    assert str(SECRET) not in said
    assert "1234" not in said


def test_shapes_are_still_told() -> None:
    """What is wrong with a shape is seen before the run, and its numbers help."""
    node = helper.make_node("Identity", ["x"], ["y"])
    ends = [value("y", TensorProto.FLOAT, None)]
    engine = OnnxBackend().load(
        ModelSource("m", "1", Path("-"), model([node], [value("x", TensorProto.FLOAT, ("n", 3))], ends))
    )
    with pytest.raises(JobError, match="Got: 4 Expected: 3"):
        engine.run((tensor("x", np.zeros((2, 4), np.float32)),))
    engine.close()
