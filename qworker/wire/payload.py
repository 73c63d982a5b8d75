"""The ``data`` of a tensor, in and out of MessagePack and JSON.

MessagePack: one ``bin`` of little-endian C-order bytes, read in place; BYTES is an array of ``bin``.
JSON: numbers, booleans or strings, flat in C order or nested like the shape.

``raw`` is the encoded value where it stands in the body: nothing is built from it before its header
agrees with the shape.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from qworker.errors import InvalidInput
from qworker.wire.datatypes import BF16, BYTES, bytes_array, dtype_of, to_bytes
from qworker.wire.messages import Tensor
from qworker.wire.names import shown

_BIN_HEADER = {0xC4: 2, 0xC5: 3, 0xC6: 5}
_ARRAY_HEADER = {0xDC: 3, 0xDD: 5}
_BYTES_LIST = msgspec.msgpack.Decoder(list[bytes])
_JSON_OPENING = re.compile(rb"\s*\[\s*(\[)?")
_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')
_EMPTY_JSON_BYTES = 64 << 10
_SMALL_BYTES = 8 << 10

Shape = tuple[int, ...]


def read_msgpack(where: str, datatype: str, shape: Shape, count: int, raw: msgspec.Raw) -> NDArray[Any]:
    """The array of ``count`` elements in ``raw``: a read-only view into the body (BYTES is copied)."""
    dtype = dtype_of(datatype)
    view = memoryview(raw)
    first = view[0]
    if datatype == BYTES:
        return _read_bytes_list(where, shape, count, view, first)
    header = _BIN_HEADER.get(first)
    if header is None:
        raise InvalidInput(
            f"{where}: expected data as one bin of {datatype} values (little-endian, C order); found {_kind(first)}: "
            "send the array's bytes, or send the whole job as application/json"
        )
    nbytes = len(view) - header
    if nbytes != count * dtype.itemsize:
        raise InvalidInput(
            f"{where}: the shape {list(shape)} of {datatype} takes {count * dtype.itemsize} bytes; found {nbytes}: "
            "correct the shape, the datatype or the data"
        )
    if count == 0:
        return np.empty(shape, dtype)
    array = np.frombuffer(raw, dtype, count, header)
    if datatype == "BOOL" and bool((array.view(np.uint8) > 1).any()):
        raise InvalidInput(f"{where}: a BOOL byte must be 0 or 1; found another value: send 0 or 1")
    return array.reshape(shape)


def _read_bytes_list(where: str, shape: Shape, count: int, view: memoryview, first: int) -> NDArray[Any]:
    if 0x90 <= first <= 0x9F:
        length = first & 0x0F
    elif first in _ARRAY_HEADER:
        length = int.from_bytes(view[1 : _ARRAY_HEADER[first]], "big")
    else:
        raise InvalidInput(
            f"{where}: expected data as an array of bin, one for each BYTES element; found {_kind(first)}: "
            "put the elements into an array"
        )
    _same_count(where, shape, count, length)
    try:
        return bytes_array(_BYTES_LIST.decode(view), shape)
    except msgspec.ValidationError as exc:
        raise InvalidInput(f"{where}: each BYTES element must be a bin: {exc}: pack bytes, not text") from exc
    except msgspec.DecodeError as exc:
        raise InvalidInput(f"{where}: expected an array of bin; found broken MessagePack: check the encoder") from exc


def read_json(where: str, datatype: str, shape: Shape, count: int, raw: msgspec.Raw, *, nulls: bool) -> NDArray[Any]:
    """The array of ``count`` elements in ``raw``. ``nulls`` takes null as NaN, which is how a result says it."""
    dtype = dtype_of(datatype)
    if datatype == BF16:
        raise InvalidInput(f"{where}: JSON has no form for BF16: send application/msgpack, or FP32")
    text = bytes(raw)
    depth = _json_depth(where, datatype, text, len(shape))
    if depth:
        _check_json_count(where, datatype, shape, count, text)
    elements = _parse_json(where, datatype, depth, text, nulls)
    try:
        with np.errstate(over="ignore"):
            array: NDArray[Any] = np.array(elements, dtype=dtype)
    except OverflowError as exc:
        raise InvalidInput(f"{where}: expected values within {datatype}; found one outside: send another type") from exc
    except ValueError as exc:
        raise InvalidInput(f"{where}: expected lists nested like the shape; found uneven ones: send it flat") from exc
    # nested lists end where a dim is 0: (2, 0, 3) is [[], []]
    if depth > 1 and array.shape != (shape if count else shape[: array.ndim]):
        raise InvalidInput(f"{where}: the shape is {list(shape)}; the nested data disagrees: correct one of them")
    _same_count(where, shape, count, array.size)
    if dtype.kind == "f" and bool(np.isinf(array).any()):  # JSON itself has no infinity
        raise InvalidInput(f"{where}: expected values within {datatype}; found one outside: send a wider type")
    if datatype == BYTES:
        return bytes_array(map(to_bytes, array.reshape(-1).tolist()), shape)
    return array.reshape(shape)


def _json_depth(where: str, datatype: str, text: bytes, rank: int) -> int:
    """How deep ``text`` nests: 0 for a bare value (rank 0 only), 1 when flat, else the rank."""
    opening = _JSON_OPENING.match(text)
    if opening is not None:
        return rank if rank > 1 and opening[1] else 1
    if rank == 0 and text[:1] not in b"{n":
        return 0
    raise InvalidInput(
        f"{where}: expected data as a list of {datatype} values, flat or nested like the shape; found something "
        "else: put the values into a list"
    )


def _check_json_count(where: str, datatype: str, shape: Shape, count: int, text: bytes) -> None:
    if count == 0:
        if len(text) > _EMPTY_JSON_BYTES:
            raise InvalidInput(f"{where}: the shape {list(shape)} has no elements; found some data: send an empty list")
        return
    if datatype == BYTES:  # in text, commas do not only stand between elements
        text = _JSON_STRING.sub(b"s", text)
    commas = text.count(b",")
    found = commas + 1 if commas or text.strip(b"[] \t\r\n") else 0
    _same_count(where, shape, count, found)


def _parse_json(where: str, datatype: str, depth: int, text: bytes, nulls: bool) -> Any:
    try:
        return _json_decoder(dtype_of(datatype).kind, depth, nulls).decode(text)
    except msgspec.ValidationError as exc:
        raise InvalidInput(f"{where}: the data does not fit {datatype} and its shape: {exc}: correct it") from exc
    except msgspec.DecodeError as exc:  # whoever cut the element out of the body did not look into its strings
        raise InvalidInput(
            f"{where}: expected {datatype} data as JSON in UTF-8; found other bytes: correct it"
        ) from exc


@lru_cache(maxsize=512)
def _json_decoder(kind: str, depth: int, nulls: bool) -> msgspec.json.Decoder[Any]:
    element: Any = {"b": bool, "u": int, "i": int, "f": float, "O": str}[kind]
    nested: Any = element | None if nulls and kind == "f" else element
    for _ in range(depth):
        nested = list[nested]
    return msgspec.json.Decoder(nested)


def _same_count(where: str, shape: Shape, count: int, found: int) -> None:
    if found != count:
        raise InvalidInput(
            f"{where}: the shape {list(shape)} has {count} elements; found {found}: correct the shape or the data"
        )


def _kind(first: int) -> str:
    """What the first byte of a MessagePack value says that it is."""
    if 0x90 <= first <= 0x9F or first in _ARRAY_HEADER:
        return "an array"
    if 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB:
        return "text"
    if first in _BIN_HEADER:
        return "a bin"
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return "a map"
    return "nil" if first == 0xC0 else "a single value"


def write_msgpack(tensor: Tensor) -> bytes | memoryview | list[bytes]:
    """What MessagePack packs as the ``data`` of ``tensor``."""
    array = _checked(tensor)
    if tensor.datatype == BYTES:
        return [to_bytes(element) for element in array.reshape(-1).tolist()]
    # a view costs more than a small copy
    return array.tobytes() if array.nbytes <= _SMALL_BYTES else array.reshape(-1).view(np.uint8).data


def write_json(tensor: Tensor) -> list[Any]:
    """The flat list that JSON holds as the ``data`` of ``tensor``. Non-finite floats become null."""
    array = _checked(tensor)
    if tensor.datatype == BF16:
        raise InvalidInput(f"tensor {shown(tensor.name)}: JSON has no form for BF16: ask in application/msgpack")
    flat: list[Any] = array.reshape(-1).tolist()
    if tensor.datatype != BYTES:
        return flat
    try:
        return [to_bytes(element).decode() for element in flat]
    except UnicodeDecodeError:
        raise InvalidInput(
            f"tensor {shown(tensor.name)}: JSON holds BYTES as UTF-8 text; found bytes that are none: "
            "ask in application/msgpack"
        ) from None


def _checked(tensor: Tensor) -> NDArray[Any]:
    dtype = dtype_of(tensor.datatype)
    if tensor.array.dtype == dtype and tensor.array.flags.c_contiguous:
        return tensor.array
    if tensor.array.dtype != dtype and tensor.array.dtype.newbyteorder("<") != dtype:
        raise InvalidInput(
            f"tensor {shown(tensor.name)}: {tensor.datatype} is held in an array of {dtype}; "
            f"found {tensor.array.dtype}: make tensors with qworker.wire.datatypes.tensor"
        )
    return np.asarray(tensor.array, dtype=dtype, order="C")
