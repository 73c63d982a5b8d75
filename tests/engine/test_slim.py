"""Models without their large weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from hypothesis import given, settings
from hypothesis import strategies as st

from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend
from qworker.engine.slim import WEIGHTS, slim
from qworker.wire.datatypes import tensor
from tests.support.models import heavy, identity


def test_the_slim_model_finds_its_weights_in_the_whole_one() -> None:
    """It is small, it is a valid model, and it computes the same."""
    whole = heavy(2)
    light = slim(whole)
    assert light is not None
    assert len(light) < 1000
    options = onnxruntime.SessionOptions()
    options.add_external_initializers_from_files_in_memory([WEIGHTS], [whole], [len(whole)])
    slimmed = onnxruntime.InferenceSession(light, options, providers=["CPUExecutionProvider"])
    plain = onnxruntime.InferenceSession(whole, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((3, plain.get_inputs()[0].shape[1])).astype(np.float32)
    np.testing.assert_array_equal(slimmed.run(None, {"x": x})[0], plain.run(None, {"x": x})[0])


def test_all_else_of_the_model_stays() -> None:
    """Nodes, inputs, outputs, opsets and small weights are those of the whole one."""
    whole = onnx.load_from_string(heavy(2))
    light = onnx.load_from_string(slim(whole.SerializeToString()) or b"")
    assert light.graph.node == whole.graph.node
    assert (light.graph.input, light.graph.output) == (whole.graph.input, whole.graph.output)
    assert light.opset_import == whole.opset_import
    assert [each.dims for each in light.graph.initializer] == [each.dims for each in whole.graph.initializer]


def test_a_model_without_large_weights_is_left_alone() -> None:
    """There is nothing to gain."""
    assert slim(identity()) is None


def test_the_backend_runs_a_slimmed_model() -> None:
    """The engine answers as the model does, after the bytes it came from are gone."""
    content = heavy(4)
    weights = onnx.numpy_helper.to_array(onnx.load_from_string(content).graph.initializer[0])
    engine = OnnxBackend().load(ModelSource("m", "1", Path("-"), content))
    del content
    x = np.ones((1, weights.shape[0]), np.float32)
    (y,) = engine.run([tensor("x", x)])
    np.testing.assert_allclose(y.array, x @ weights, rtol=1e-3, atol=1e-3)
    engine.close()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2000))
def test_no_bytes_break_it(garbage: bytes, cut: int) -> None:
    """Garbage, and a model that is cut short, are left to the library."""
    for content in (garbage, heavy(1)[: cut % 300] + garbage):
        light = slim(content)
        assert light is None or len(light) <= len(content) + 300
