"""Arrays to tensors: what is taken, and what would be lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from qworker.errors import InvalidInput
from qworker.wire.datatypes import BF16, BYTES, DATATYPES, datatype_of, dtype_of, itemsize, tensor

_ARRAYS = npst.arrays(
    dtype=st.sampled_from([*"?BHIQbhilefd", ">i4", ">f8"]).map(np.dtype),
    shape=npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


@pytest.mark.parametrize("datatype", [d for d in DATATYPES if d != BF16])
def test_datatype_and_dtype_are_inverse(datatype: str) -> None:
    """Each datatype but BF16 comes back from its dtype."""
    assert datatype_of(dtype_of(datatype)) == datatype


def test_sizes_are_those_of_the_protocol() -> None:
    """The bytes of an element are what the datatype's name says."""
    sizes = {d: itemsize(d) for d in DATATYPES if d != BYTES}
    assert sizes == {
        "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4,
        "INT64": 8, "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2,
    }  # fmt: skip
    with pytest.raises(InvalidInput):
        itemsize(BYTES)


@given(_ARRAYS, st.booleans())
def test_tensor_is_contiguous_little_endian_and_equal(array: np.ndarray, flipped: bool) -> None:
    """Any layout and byte order becomes the wire's own, with the same values and shape."""
    source = array.T if flipped else array
    made = tensor("x", source)
    assert made.array.shape == source.shape
    assert made.array.flags.c_contiguous
    assert made.array.dtype == dtype_of(made.datatype)
    assert np.array_equal(made.array, source, equal_nan=source.dtype.kind == "f")


def test_tensor_does_not_copy_what_fits() -> None:
    """An array in the wire's own layout is taken as it is."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(tensor("x", array).array, array)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("gr\u00fc\u00dfe", "gr\u00fc\u00dfe".encode()),
        (b"a\x00", b"a\x00"),
        (bytearray(b"ab"), b"ab"),
        ([b"a\x00", b"\x00"], [b"a\x00", b"\x00"]),
        (["a", "bc"], [b"a", b"bc"]),
        (np.array(["a", "bc"]), [b"a", b"bc"]),
        (np.array([b"a", b"bc"]), [b"a", b"bc"]),
        (np.array(["a", b"b", memoryview(b"c")], dtype=object), [b"a", b"b", b"c"]),
        (np.array(["a", "b"], dtype=np.dtypes.StringDType()), [b"a", b"b"]),
        ([["a"], ["b"]], [[b"a"], [b"b"]]),
    ],
)
def test_text_and_bytes_become_bytes(source: object, expected: object) -> None:
    """Every kind of string becomes BYTES, trailing zero bytes included."""
    made = tensor("x", source)  # pyright: ignore[reportArgumentType]
    assert made.datatype == BYTES
    assert made.array.tolist() == expected


@pytest.mark.parametrize(
    ("source", "datatype", "dtype"),
    [
        ([1, 2], "FP32", "<f4"),
        ([1, 2], "UINT8", "u1"),
        ([], "INT64", "<i8"),
        ([], "BYTES", "O"),
        (np.array([1.5]), "FP16", "<f2"),
        (np.array([True]), "INT32", "<i4"),
        (np.array([1], np.uint16), "BF16", "<u2"),
    ],
)
def test_tensor_converts_when_nothing_is_lost(source: object, datatype: str, dtype: str) -> None:
    """A wanted datatype is given when each value fits into it."""
    made = tensor("x", source, datatype)  # pyright: ignore[reportArgumentType]
    assert (made.datatype, made.array.dtype) == (datatype, np.dtype(dtype))


@pytest.mark.parametrize(
    ("source", "datatype"),
    [
        ([1.5], "INT64"),
        ([300], "UINT8"),
        ([-1], "UINT64"),
        ([1e6], "FP16"),
        ([70_000], "FP16"),
        ([1], "BOOL"),
        (["1"], "INT64"),
        ([1], "BYTES"),
        ([1.0], "BF16"),
        ([1], "COMPLEX"),
        ([1j], None),
        (np.array(["2024-01-01"], dtype="M8[D]"), None),
        (np.array([1], np.longdouble), None),
        ([[1], [2, 3]], None),
        ([2**64], None),
        ([None], None),
        ("\ud800", None),
        ({"a": 1}, None),
    ],
)
def test_tensor_refuses_what_would_be_lost(source: object, datatype: str | None) -> None:
    """No fraction, range or unknown type is lost in silence."""
    with pytest.raises(InvalidInput):
        tensor("x", source, datatype)  # pyright: ignore[reportArgumentType]


def test_unsupported_dtype_names_the_supported_ones() -> None:
    """Whoever sends a complex array is told what to send, and which tensor it was."""
    with pytest.raises(InvalidInput, match=r"'x'.*BOOL.*FP32.*BYTES.*complex128"):
        tensor("x", np.zeros(2, complex))
