"""Limits: each one is enforced, and none by arithmetic that overflows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import ConfigError, InvalidInput
from qworker.wire.limits import MAX_DIM, Limits, check_shape


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(-1, 5), max_size=20))
def test_a_shape_that_passes_is_within_all_limits(shape: list[int]) -> None:
    """The count is the exact product, and bounded whatever zeros stand in the shape."""
    limits = Limits()
    try:
        count = check_shape("x", shape, limits)
    except InvalidInput:
        return
    assert count == math.prod(shape)
    assert len(shape) <= limits.max_rank
    assert all(0 <= dim <= MAX_DIM for dim in shape)
    assert math.prod(max(dim, 1) for dim in shape) <= limits.max_body_bytes


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([-1], "negative"),
        ([2**40 + 1], "2\\*\\*40"),
        ([2**63], "2\\*\\*40"),
        ([2**40] * 16, "more elements"),
        ([2**40, 0], "more elements"),
        ([1] * 17, "at most 16 dims"),
    ],
)
def test_impossible_shapes_say_why(shape: list[int], words: str) -> None:
    """Each refusal names the tensor and the rule."""
    with pytest.raises(InvalidInput, match=f"input 'x'.*{words}"):
        check_shape("input 'x'", shape, Limits())


@pytest.mark.parametrize("wrong", [{"max_tensors": 0}, {"max_tensors": 1025}, {"max_rank": 65}, {"max_body_bytes": -1}])
def test_limits_that_cannot_hold_are_refused(wrong: dict[str, int]) -> None:
    """Limits beyond what the decoder's types enforce are a wrong setting, not a silent one."""
    with pytest.raises(ConfigError):
        Limits(**wrong)
