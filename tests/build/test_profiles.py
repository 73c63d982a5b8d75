"""Profiles: what the command line says, and what is derived from a verified batch axis."""

from __future__ import annotations

import pytest

from qworker.build.profiles import DERIVED, Range, parse_profiles, settle_profiles
from qworker.errors import InvalidInput
from qworker.wire.signature import TensorSpec

X = TensorSpec("x", "FP32", ("n", 3, "h", "w"))
ROWS = TensorSpec("rows", "FP32", ("n", 16))
FIXED = TensorSpec("state", "FP32", (2, 16))
SHARED = TensorSpec("table", "FP32", ("k", 16))


def test_three_shapes_make_a_range() -> None:
    """Smallest, best, largest, also with a name that holds colons and slashes."""
    (profile,) = parse_profiles(["in/a:0=1x3x8x8, 4x3x8x8, 8x3x16x16"])
    assert profile == {"in/a:0": Range((1, 3, 8, 8), (4, 3, 8, 8), (8, 3, 16, 16))}


def test_one_shape_stands_for_all_three() -> None:
    """Where nothing varies."""
    assert parse_profiles(["x=1x3"])[0]["x"] == Range((1, 3), (1, 3), (1, 3))


def test_an_input_given_again_makes_a_second_profile() -> None:
    """The k-th time that an input is named belongs to the k-th profile."""
    first, second = parse_profiles(["x=1x2,2x2,4x2", "y=1x2", "x=8x2", "y=2x2"])
    assert (first["x"].max, first["y"].max) == ((4, 2), (1, 2))
    assert (second["x"].max, second["y"].max) == ((8, 2), (2, 2))


def test_values_of_a_shape_are_told_from_shapes() -> None:
    """``:=`` is for inputs that hold a shape."""
    assert parse_profiles(["shape:=1x4,2x4,8x4"])[0]["shape"] == Range((1, 4), (2, 4), (8, 4), values=True)


@pytest.mark.parametrize("text", ["x", "x=", "x=1x2,3x4", "=1x2", "x=1x-2", "x=4x2,2x2,8x2", "x=1,1x2,2x2", "x=1xN"])
def test_what_is_no_profile_is_told_with_an_example(text: str) -> None:
    """The text that is wrong is in the message."""
    with pytest.raises(InvalidInput, match="expected") as refused:
        parse_profiles([text])
    assert text in str(refused.value)


def test_a_verified_batch_axis_gets_a_profile() -> None:
    """One row, four, eight; the rest is fixed."""
    (profile,) = settle_profiles([ROWS, FIXED], (), {"rows": 0})
    assert profile == {"rows": Range(*((size, 16) for size in DERIVED))}


def test_a_batch_axis_may_be_any_axis() -> None:
    """Recurrent models count rows along the second one."""
    (profile,) = settle_profiles([TensorSpec("s", "FP32", (2, "n", 8))], (), {"s": 1})
    assert (profile["s"].min, profile["s"].max) == ((2, 1, 8), (2, 8, 8))


def test_fixed_models_need_no_profile() -> None:
    """Nothing is open: the builder makes one of its own."""
    assert settle_profiles([FIXED], (), {}) == ()


def test_another_open_axis_is_named() -> None:
    """Neither height nor width of a picture can be guessed."""
    with pytest.raises(InvalidInput, match=r"axis 2 \('h'\), axis 3 \('w'\)") as refused:
        settle_profiles([X], (), {"x": 0})
    assert "--profile x=1x3xNxN,4x3xNxN,8x3xNxN" in str(refused.value)


def test_rows_that_were_not_verified_are_not_derived() -> None:
    """The reason that registration found is given on."""
    with pytest.raises(InvalidInput, match="rows change with their neighbours"):
        settle_profiles([ROWS], (), {}, "rows change with their neighbours")


def test_an_input_that_rows_share_is_asked_for() -> None:
    """It has an open axis that counts no rows."""
    with pytest.raises(InvalidInput, match="'table' has no --profile"):
        settle_profiles([ROWS, SHARED], (), {"rows": 0})


def test_one_given_profile_wants_the_others() -> None:
    """Sizes that were chosen for one input are not mixed with derived ones of another."""
    with pytest.raises(InvalidInput, match="others have one"):
        settle_profiles(
            [ROWS, TensorSpec("more", "FP32", ("n", 4))], parse_profiles(["rows=1x16,2x16,3x16"]), {"more": 0}
        )


@pytest.mark.parametrize("text", ["rows=1x8", "rows=1x16x1", "other=1x16"])
def test_a_profile_that_does_not_fit_is_refused(text: str) -> None:
    """Fixed sizes, ranks and names are the model's."""
    with pytest.raises(InvalidInput, match="expected"):
        settle_profiles([ROWS], parse_profiles([text]), {})
