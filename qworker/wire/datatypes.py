"""Open Inference Protocol datatypes and their numpy dtypes, and tensors made from arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qworker.errors import InvalidInput
from qworker.wire.messages import Tensor
from qworker.wire.names import shown

BYTES = "BYTES"
BF16 = "BF16"

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    BF16: np.dtype("<u2"),  # the raw two bytes of each value: numpy has no bfloat16
    BYTES: np.dtype(object),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items() if name != BF16}
DATATYPES = tuple(_DTYPES)
SUPPORTED = ", ".join(DATATYPES)


def dtype_of(datatype: str) -> np.dtype[Any]:
    """The little-endian dtype of ``datatype``. Raises InvalidInput when there is no such datatype."""
    dtype = _DTYPES.get(datatype)
    if dtype is None:
        raise InvalidInput(f"expected one of the datatypes {SUPPORTED}; found {shown(datatype)}: convert the tensor")
    return dtype


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The datatype of a numpy dtype in any byte order; strings of any kind are BYTES.

    Raises InvalidInput for dtypes that the protocol does not know (complex, datetime64, longdouble...).
    """
    known = _NAMES.get(dtype)
    if known is not None:
        return known
    if dtype.kind in "SUOT":
        return BYTES
    if dtype.name == "bfloat16":  # registered by ml_dtypes
        return BF16
    datatype = _NAMES.get(dtype.newbyteorder("<"))
    if datatype is None:
        raise InvalidInput(f"expected an array of one of {SUPPORTED}; found dtype {dtype}: convert it with astype()")
    return datatype


def itemsize(datatype: str) -> int:
    """Bytes of one element on the wire. BYTES has none: raises InvalidInput for it."""
    if datatype == BYTES:
        raise InvalidInput("BYTES elements have no common size")
    return dtype_of(datatype).itemsize


def tensor(name: str, array: ArrayLike | bytes | str, datatype: str | None = None) -> Tensor:
    """A Tensor of ``array``: C-contiguous, little-endian, copied only where it must be.

    Text and bytes become BYTES (text as UTF-8). ``datatype`` asks for another type than the array's own;
    a conversion that would lose something (a fraction, a range) raises InvalidInput. A uint16 array with
    the datatype BF16 is taken as raw bfloat16.
    """
    source = _as_array(name, array)
    try:
        found = datatype_of(source.dtype)
        wanted = found if datatype is None else datatype
        dtype = dtype_of(wanted)
    except InvalidInput as exc:
        raise InvalidInput(f"tensor {shown(name)}: {exc}") from None
    if source.size == 0:  # an empty list says nothing of its type
        converted = np.empty(source.shape, dtype)
    elif wanted == BYTES and found == BYTES:
        converted = _bytes_array(name, source)
    elif found == BF16 and wanted == BF16:
        converted = source.view(np.uint16)
    elif BYTES in (wanted, found) or found == BF16 or (wanted == BF16 and found != "UINT16"):
        what = "the values of an object array" if source.dtype == object else found
        hint = " (as raw uint16)" if wanted == BF16 else ""
        raise InvalidInput(f"tensor {shown(name)}: expected {wanted}{hint}; found {what}: convert it first")
    else:
        converted = _cast(name, source, wanted, dtype)
    # not ascontiguousarray: it makes a zero-dim array one-dimensional
    return Tensor(name, wanted, np.asarray(converted, order="C"))


def to_bytes(element: object) -> bytes:
    """One BYTES element. Raises InvalidInput when it is neither bytes nor text."""
    if type(element) is bytes:
        return element
    if isinstance(element, str):
        try:
            return element.encode()
        except UnicodeEncodeError:
            raise InvalidInput("expected text that can be sent as UTF-8; found a lone surrogate: send bytes") from None
    if isinstance(element, (bytes, bytearray, memoryview)):
        return bytes(cast("bytes | bytearray", element))
    raise InvalidInput(f"expected bytes or str elements; found {type(element).__name__}: convert them")


def bytes_array(elements: Iterable[bytes], shape: tuple[int, ...]) -> NDArray[Any]:
    """An object array of ``elements`` in ``shape``; numpy is never let guess at what they are."""
    listed = list(elements)
    array = np.empty(len(listed), dtype=object)
    array[:] = listed
    return array.reshape(shape)


def _as_array(name: str, array: ArrayLike | bytes | str) -> NDArray[Any]:
    if isinstance(array, np.ndarray):
        return np.asarray(cast("NDArray[Any]", array))
    if isinstance(array, (bytes, bytearray, str)):
        return bytes_array([to_bytes(array)], ())
    try:
        found = np.asarray(array)
        # numpy's own string dtypes cut trailing zero bytes: take the Python objects instead
        return np.asarray(array, dtype=object) if found.dtype.kind in "SU" else found
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidInput(
            f"tensor {shown(name)}: expected an array or evenly nested lists of one type; found {type(array).__name__} "
            f"that numpy cannot make an array of: give it one shape"
        ) from exc


def _bytes_array(name: str, source: NDArray[Any]) -> NDArray[Any]:
    try:
        return bytes_array(map(to_bytes, source.reshape(-1).tolist()), source.shape)
    except InvalidInput as exc:
        raise InvalidInput(f"tensor {shown(name)}: {exc}") from None


def _cast(name: str, source: NDArray[Any], datatype: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    if source.dtype == dtype:
        return source
    if np.can_cast(source.dtype, dtype, "safe"):
        return source.astype(dtype, copy=False)
    if source.dtype.kind in "iu" and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if int(source.min()) >= bounds.min and int(source.max()) <= bounds.max:
            return source.astype(dtype)
        raise InvalidInput(
            f"tensor {shown(name)}: expected values within {datatype}; found some outside: convert it first"
        )
    if not np.can_cast(source.dtype, dtype, "same_kind"):
        raise InvalidInput(f"tensor {shown(name)}: expected {datatype}; found dtype {source.dtype}: convert it first")
    with np.errstate(over="ignore"):
        cast = source.astype(dtype)
    if bool(np.any(np.isinf(cast) & np.isfinite(source))):
        raise InvalidInput(
            f"tensor {shown(name)}: expected values within {datatype}; found some outside: convert it first"
        )
    return cast
