"""Inputs against a signature."""

from __future__ import annotations

import numpy as np
import pytest

from qworker.errors import InvalidInput
from qworker.wire.datatypes import tensor
from qworker.wire.messages import Tensor
from qworker.wire.signature import Signature, TensorSpec, check_inputs, check_outputs

SIGNATURE = Signature(
    inputs=(
        TensorSpec("image", "FP32", ("N", 3, None)),
        TensorSpec("label", "BYTES", None),
        TensorSpec("scale", "FP64", ()),
    ),
    outputs=(TensorSpec("scores", "FP32", ("N", 10)), TensorSpec("boxes", "FP32", None)),
)


def _inputs(**changed: Tensor | None) -> list[Tensor]:
    good: dict[str, Tensor | None] = {
        "image": tensor("image", np.zeros((2, 3, 7), np.float32)),
        "label": tensor("label", [["a", "b"]]),
        "scale": tensor("scale", np.float64(1)),
    }
    return [value for value in (good | changed).values() if value is not None]


def test_good_inputs_pass_in_any_order() -> None:
    """Order is the sender's choice; symbolic and unknown sizes take any size."""
    check_inputs(SIGNATURE, _inputs())
    check_inputs(SIGNATURE, _inputs()[::-1])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scale": None}, "missing: 'scale'"),
        ({"other": tensor("other", [1])}, "not known: 'other'"),
        ({"image": tensor("picture", np.zeros((2, 3, 7), np.float32))}, "missing: 'image'; not known: 'picture'"),
        ({"again": tensor("scale", np.float64(1))}, "twice"),
        ({"image": tensor("image", np.zeros((2, 3, 7)))}, "'image': expected datatype FP32; found FP64"),
        ({"label": tensor("label", [1])}, "'label': expected datatype BYTES; found INT64"),
        ({"image": tensor("image", np.zeros((3, 7), np.float32))}, "expected shape .N, 3, .*; found .3, 7."),
        ({"image": tensor("image", np.zeros((2, 4, 7), np.float32))}, "expected shape .N, 3, .*; found .2, 4, 7."),
        ({"scale": tensor("scale", [1.0])}, "expected shape ..; found .1."),
    ],
)
def test_wrong_inputs_say_what_was_expected_and_found(changed: dict[str, Tensor | None], words: str) -> None:
    """Each mismatch is named with both sides."""
    with pytest.raises(InvalidInput, match=words):
        check_inputs(SIGNATURE, _inputs(**changed))


def test_wanted_outputs_must_exist() -> None:
    """Outputs that the model has pass; others are named beside those it has."""
    check_outputs(SIGNATURE, ())
    check_outputs(SIGNATURE, ("boxes", "scores"))
    with pytest.raises(InvalidInput, match="among 'scores', 'boxes'; found 'nope'"):
        check_outputs(SIGNATURE, ("scores", "nope"))


def test_many_names_do_not_make_a_long_message() -> None:
    """A job of a thousand unknown inputs is answered in a few lines."""
    with pytest.raises(InvalidInput) as caught:
        check_inputs(SIGNATURE, [tensor("x" * 500 + str(i), [1]) for i in range(1000)])
    assert len(str(caught.value)) < 10_000
