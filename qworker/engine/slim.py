"""An ONNX model without its large weights, which are then found in the file's bytes where they lie.

ONNX Runtime parses a model while it holds the interpreter: for as long as it takes to copy all of its weights, and
nothing else runs in the process. What is left after this is parsed in no time; the weights are taken over later,
in the part of a load that lets others run. Pure: a walk over the protobuf's lengths, nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator

WEIGHTS = "weights"
"""What the slim model calls the file that its weights are in: all bytes of the model that it was made of."""
LARGE = 64 << 10
"""Smaller tensors stay: some of them are shapes and axes, which the library wants to see early."""

_GRAPH, _INITIALIZER = 7, 5  # of ModelProto, of GraphProto
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14  # of TensorProto
_KEY, _VALUE = 1, 2  # of StringStringEntryProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def slim(content: bytes) -> bytes | None:
    """The slim model, or None where there is nothing to gain or the bytes are not what they should be."""
    try:
        return _slim_model(content)
    except (IndexError, ValueError):
        return None  # the library says what is wrong with it


def _slim_model(content: bytes) -> bytes | None:
    view = memoryview(content)
    model: list[bytes | memoryview] = []
    found = False
    for number, start, payload, end in _fields(view, 0, len(content)):
        if number == _GRAPH:
            graph = list(_slim_graph(view, payload, end))
            found = found or any(type(part) is bytes for part in graph)
            model.append(_length_delimited(_GRAPH, b"".join(graph)))
        else:
            model.append(view[start:end])
    return b"".join(model) if found else None


def _slim_graph(view: memoryview, start: int, end: int) -> Iterator[bytes | memoryview]:
    """The graph's fields: views of those that stay, new bytes for weights that do not."""
    for number, at, payload, behind in _fields(view, start, end):
        tensor = _slim_tensor(view, payload, behind) if number == _INITIALIZER and behind - payload > LARGE else None
        yield view[at:behind] if tensor is None else _length_delimited(_INITIALIZER, tensor)


def _slim_tensor(view: memoryview, start: int, end: int) -> bytes | None:
    kept: list[bytes | memoryview] = []
    raw: tuple[int, int] | None = None
    for number, at, payload, behind in _fields(view, start, end):
        if number in (_EXTERNAL_DATA, _DATA_LOCATION):
            return None
        if number == _RAW_DATA:
            raw = payload, behind
        else:
            kept.append(view[at:behind])
    if raw is None or raw[1] - raw[0] < LARGE:
        return None
    where = {"location": WEIGHTS, "offset": str(raw[0]), "length": str(raw[1] - raw[0])}
    entries = [
        _length_delimited(
            _EXTERNAL_DATA, _length_delimited(_KEY, key.encode()) + _length_delimited(_VALUE, value.encode())
        )
        for key, value in where.items()
    ]
    return b"".join((*kept, *entries, _varint(_DATA_LOCATION << 3 | _VARINT), b"\x01"))


def _fields(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Each field's number, where it begins, where its payload begins, and where it ends. Raises ValueError."""
    while at < end:
        start = at
        tag, at = _read_varint(view, at)
        kind = tag & 7
        payload = at
        if kind == _BYTES:
            size, payload = _read_varint(view, at)
            at = payload + size
        elif kind == _VARINT:
            _, at = _read_varint(view, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"expected a protobuf field, found one of kind {kind}")
        if at > end:
            raise ValueError("expected a field within its message, found one that runs past its end")
        yield tag >> 3, start, payload, at


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("expected a number of at most 64 bits")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _length_delimited(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(payload)) + payload
