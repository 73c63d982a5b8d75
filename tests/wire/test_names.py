"""Names: what is taken, and that nothing dangerous is."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import InvalidInput
from qworker.wire.names import check_job_id, check_model_id, check_tensor_name, check_version, shown


@pytest.mark.parametrize("model", ["a", "mnist-8", "vision/mnist-8", "org/team/model_v1.2", "0", "a" * 128])
def test_model_ids_that_are_taken(model: str) -> None:
    """Plain and nested ids pass unchanged."""
    assert check_model_id(model) == model


@pytest.mark.parametrize(
    "model",
    ["", ".", "..", "../x", "a/../b", "a//b", "/a", "a/", ".hidden", "a/.b", "*", "#", "a.#", "a b", "a\n", "a\x00",
     "caf\u00e9", "a\\b", "-a", "a" * 129, "/".join(["a" * 100, "b" * 100])],
)  # fmt: skip
def test_model_ids_that_are_refused(model: str) -> None:
    """Nothing that leaves a folder, breaks a routing key or is too long for a queue name."""
    with pytest.raises(InvalidInput, match="expected a model id"):
        check_model_id(model)


@given(st.text(alphabet="ab0./-_*#\n~\u00e9", max_size=12))
def test_a_model_id_is_always_a_safe_path(model: str) -> None:
    """Whatever passes stays inside its folder and holds no wildcard."""
    try:
        check_model_id(model)
    except InvalidInput:
        return
    path = PurePosixPath(model)
    assert not path.is_absolute()
    assert str(path) == model
    assert not {".", ".."} & set(path.parts)
    assert not set("*#\n") & set(model)


def test_versions_are_one_part() -> None:
    """A version is a single plain part."""
    assert check_version("1.2-rc1") == "1.2-rc1"
    for version in ("", "a/b", "..", "1\n", "a" * 129):
        with pytest.raises(InvalidInput, match="expected a version"):
            check_version(version)


def test_lengths_are_counted_in_bytes() -> None:
    """The limits of AMQP and of Limits are bytes, not characters."""
    assert check_job_id("\u00e9" * 127) == "\u00e9" * 127
    with pytest.raises(InvalidInput):
        check_job_id("\u00e9" * 128)
    assert check_tensor_name("input", "\u00e9" * 4, 8) == "\u00e9" * 4
    for name in ("", "\u00e9" * 5):
        with pytest.raises(InvalidInput, match="an input"):
            check_tensor_name("an input", name, 8)


def test_shown_is_short_and_printable() -> None:
    """A hostile name cannot fill or break a log line."""
    assert shown("a\n\u202e") == r"'a\n\u202e'"
    assert len(shown("x" * 10_000)) < 120
