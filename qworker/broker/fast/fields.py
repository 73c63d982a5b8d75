"""Field tables and message properties: between AMQP's bytes and our types. Pure, no I/O.

Tables come from whoever publishes, so the reader works in place on offsets, with a limit on depth: a
reader that slices copies is quadratic in the number of entries, and one that recurses freely can be
made to overflow the stack by one message that would then be delivered again and again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, cast

from qworker.broker.base import Properties
from qworker.errors import BrokerUnavailable, PublishFailed

MAX_TABLE_DEPTH: Final = 32
_MILLISECONDS_FROM: Final = 0xFFFFFFFF
"""A timestamp above this is taken for milliseconds: as seconds it would be after the year 2106."""
_LAST_MILLISECOND: Final = 253_402_300_799_999
"""The end of the year 9999. What is later is no time: some publishers send nanoseconds."""

Octets = bytes | bytearray

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_I64 = struct.Struct(">q")
_TAGGED_I32 = struct.Struct(">ci")
_TAGGED_I64 = struct.Struct(">cq")
_TAGGED_F64 = struct.Struct(">cd")
_TAGGED_LENGTH = struct.Struct(">cI")

_FIXED: Final[dict[int, struct.Struct]] = {
    ord(letter): struct.Struct(f">{form}")
    for letter, form in {
        "b": "b",
        "B": "B",
        "s": "h",
        "u": "H",
        "I": "i",
        "i": "I",
        "l": "q",
        "L": "q",
        "f": "f",
        "d": "d",
    }.items()
}

_WITH_LENGTH: Final = frozenset(b"SxFA")
_VOID: Final = frozenset(b"V\x00")  # some clients send a zero byte


class FrameError(BrokerUnavailable):
    """Bytes from the broker that are not AMQP 0-9-1 as it was negotiated. The link is closed."""


class EncodeError(PublishFailed):
    """A message that AMQP cannot carry: a name over 255 bytes, or a header of a foreign type."""

    retryable = False


# --- tables -------------------------------------------------------------------------------------


class Headers(Mapping[str, Any]):
    """A headers table that is decoded when it is first looked at; most jobs' headers never are.

    One that cannot be decoded counts as empty: an error would come back with each delivery of the message.
    """

    __slots__ = ("_decoded", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._decoded: dict[str, Any] | None = None

    def __getitem__(self, key: str) -> Any:
        return self._table()[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._table().get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())

    def __repr__(self) -> str:
        return repr(self._table())

    def _table(self) -> dict[str, Any]:
        table = self._decoded
        if table is None:
            try:
                table = self._decoded = read_table(self._raw)
            except FrameError:
                table = self._decoded = {}
        return table


def read_table(raw: bytes) -> dict[str, Any]:
    """Decode the entries of a field table (without its length prefix).

    Strings that are not UTF-8 come as bytes, timestamps as datetimes in UTC. Raises FrameError.
    """
    try:
        return _read_table(raw, 0, len(raw), 0)
    except (struct.error, IndexError) as exc:
        raise FrameError(f"expected a field table, found {len(raw)} bytes that end within an entry") from exc


def _read_table(raw: bytes, at: int, end: int, depth: int) -> dict[str, Any]:
    table: dict[str, Any] = {}
    while at < end:
        key_end = at + 1 + raw[at]
        key = _decoded(raw[at + 1 : key_end], "replace")
        if key_end + 9 <= end and raw[key_end] == 0x6C:  # l: our own headers are times
            table[key] = _I64.unpack_from(raw, key_end + 1)[0]
            at = key_end + 9
        else:
            table[key], at = _read_value(raw, key_end, end, depth)
    return table


def _read_array(raw: bytes, at: int, end: int, depth: int) -> list[Any]:
    values: list[Any] = []
    while at < end:
        value, at = _read_value(raw, at, end, depth)
        values.append(value)
    return values


def _read_value(raw: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:  # noqa: C901  # one branch a field type
    """One tagged value and the offset behind it."""
    value: Any
    if at >= end:
        raise FrameError("expected a value in a field table, found its end")
    kind = raw[at]
    at += 1
    fixed = _FIXED.get(kind)
    if fixed is not None:
        value, after = fixed.unpack_from(raw, at)[0], at + fixed.size
    elif kind in _WITH_LENGTH:
        start = at + 4
        after = start + _U32.unpack_from(raw, at)[0]
        if after > end:
            raise FrameError(f"expected a field of {after - start} bytes, found {end - start}")
        if kind == 0x53:
            value = _text_or_bytes(raw[start:after])
        elif kind == 0x78:
            value = raw[start:after]
        elif depth >= MAX_TABLE_DEPTH:
            raise FrameError(f"expected a field table at most {MAX_TABLE_DEPTH} deep, found a deeper one")
        else:
            value = (_read_table if kind == 0x46 else _read_array)(raw, start, after, depth + 1)
    elif kind == 0x74:  # t
        value, after = raw[at] != 0, at + 1
    elif kind == 0x54:  # T
        value, after = _moment(_U64.unpack_from(raw, at)[0]), at + 8
    elif kind == 0x44:  # D
        scale, mantissa = struct.unpack_from(">Bi", raw, at)
        value, after = Decimal(mantissa).scaleb(-scale), at + 5
    elif kind in _VOID:
        value, after = None, at
    else:
        raise FrameError(f"expected a known field type, found {chr(kind)!r}")
    if after > end:
        raise FrameError("expected a field within its table, found one that runs past its end")
    return value, after


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _moment(value: int) -> datetime | int:
    try:
        return datetime.fromtimestamp(value / 1000 if value > _MILLISECONDS_FROM else value, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return value  # a year that datetime does not know


def write_table(table: Mapping[str, Any]) -> bytes:
    """Encode a field table, length prefix included. Raises EncodeError."""
    out: list[bytes] = []
    for key, value in table.items():
        out.append(_repeated_short_string(key, "header name"))
        if type(value) is int and 0x7FFFFFFF < value <= 0x7FFFFFFFFFFFFFFF:  # our own headers are times
            out.append(_TAGGED_I64.pack(b"l", value))
        else:
            out.append(_write_value(value, 0))
    entries = b"".join(out)
    return _U32.pack(len(entries)) + entries


def _write_value(value: Any, depth: int) -> bytes:
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogateescape")
        return _TAGGED_LENGTH.pack(b"S", len(raw)) + raw
    if isinstance(value, bool):
        return b"t\x01" if value else b"t\x00"
    if isinstance(value, int):
        if -0x80000000 <= value <= 0x7FFFFFFF:
            return _TAGGED_I32.pack(b"I", value)
        if -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
            return _TAGGED_I64.pack(b"l", value)
        raise EncodeError(f"expected a header integer of 64 bits, found {value}: send it as a string")
    if isinstance(value, float):
        return _TAGGED_F64.pack(b"d", value)
    if value is None:
        return b"V"
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(cast("bytes", value))
        return _TAGGED_LENGTH.pack(b"x", len(raw)) + raw
    return _write_rare_value(value, depth)


def _write_rare_value(value: Any, depth: int) -> bytes:
    if depth >= MAX_TABLE_DEPTH:
        raise EncodeError(f"expected headers at most {MAX_TABLE_DEPTH} deep, found deeper ones")
    if isinstance(value, Mapping):
        entries = b"".join(
            short_string(key, "header name") + _write_value(nested, depth + 1)
            for key, nested in cast("Mapping[str, Any]", value).items()
        )
        return _TAGGED_LENGTH.pack(b"F", len(entries)) + entries
    if isinstance(value, list | tuple):
        entries = b"".join(_write_value(nested, depth + 1) for nested in cast("list[Any]", value))
        return _TAGGED_LENGTH.pack(b"A", len(entries)) + entries
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return b"T" + _U64.pack(max(0, int(moment.timestamp())))
    if isinstance(value, Decimal):
        return _write_decimal(value)
    raise EncodeError(f"expected a header of a type that AMQP knows, found {type(value).__name__}: send it as a string")


def _write_decimal(value: Decimal) -> bytes:
    exponent = value.as_tuple().exponent
    if isinstance(exponent, int) and exponent >= -255:
        scale = max(0, -exponent)
        mantissa = int(value.scaleb(scale))
        if -0x80000000 <= mantissa <= 0x7FFFFFFF:
            return struct.pack(">cBi", b"D", scale, mantissa)
    raise EncodeError(f"expected a decimal of 32 bits, found {value}: send it as a string")


# --- properties ---------------------------------------------------------------------------------


def short_string(value: str, what: str) -> bytes:
    """A string with its length in one byte. Raises EncodeError over 255 bytes, naming ``what``."""
    raw = value.encode("utf-8", "surrogateescape")
    if len(raw) > 255:
        raise EncodeError(f"expected a {what} of at most 255 bytes, found {len(raw)}")
    return _LENGTHS[len(raw)] + raw


_LENGTHS: Final = tuple(bytes((length,)) for length in range(256))
_repeated_short_string = lru_cache(maxsize=1024)(short_string)  # one for all jobs of a caller


def write_properties(properties: Properties, reply_to: str | None = None) -> bytes:
    """The flags and values of a content header; ``reply_to`` overrules theirs. Raises EncodeError."""
    reply_to = reply_to or properties.reply_to
    flags = 0
    correlation = b""
    parts: list[bytes] = []
    if properties.content_type is not None:
        flags |= 0x8000
        parts.append(_repeated_short_string(properties.content_type, "content type"))
    if properties.headers:
        flags |= 0x2000
        parts.append(write_table(properties.headers))
    if properties.persistent:
        flags |= 0x1000
        parts.append(b"\x02")
    if properties.priority is not None:
        flags |= 0x0800
        parts.append(bytes((max(0, min(255, properties.priority)),)))
    correlation_id = properties.correlation_id
    if correlation_id is not None:
        flags |= 0x0400
        correlation = short_string(correlation_id, "correlation id")
        parts.append(correlation)
    if reply_to is not None:
        flags |= 0x0200
        parts.append(_repeated_short_string(reply_to, "reply queue"))
    if properties.expiration_ms is not None:
        flags |= 0x0100
        parts.append(short_string(str(max(0, properties.expiration_ms)), "expiration"))
    message_id = properties.message_id
    if message_id is not None:
        flags |= 0x0080
        # a job of ours has one id for both
        parts.append(correlation if message_id is correlation_id else short_string(message_id, "message id"))
    if properties.timestamp_ms is not None:
        flags |= 0x0040
        parts.append(_U64.pack(max(0, properties.timestamp_ms // 1000)))
    return _U16.pack(flags) + b"".join(parts)


def read_properties(raw: Octets, at: int, end: int) -> Properties:
    """Read flags and values from ``raw[at:end]``. Raises FrameError when they do not fit in there.

    The ids that a reply must carry back unchanged survive bytes that are not UTF-8.
    """
    try:
        return _read_properties(raw, at, end)
    except (struct.error, IndexError) as exc:
        raise FrameError("expected message properties, found a content header that ends within them") from exc


def _read_properties(raw: Octets, at: int, end: int) -> Properties:  # noqa: C901  # one branch a property
    flags: int = _U16.unpack_from(raw, at)[0]
    at += 2  # the last two flags mean nothing; RabbitMQ lets them pass, so refusing them would be a poison message
    content_type = correlation_id = reply_to = expiration = message_id = None
    priority: int | None = None
    timestamp: int | None = None
    persistent = False
    headers: Mapping[str, Any] | None = None
    if flags & 0x8000:
        start, at = at + 1, at + 1 + raw[at]
        content_type = _decoded(bytes(raw[start:at]), "replace")
    if flags & 0x4000:
        at += 1 + raw[at]
    if flags & 0x2000:
        start = at + 4
        if start > end:  # what lies behind is another frame's, or was
            raise FrameError("expected message properties, found a content header that ends within them")
        at = start + _U32.unpack_from(raw, at)[0]
        if at > end:
            raise FrameError(f"expected a headers table of {at - start} bytes, found {end - start}")
        if at > start:
            headers = Headers(bytes(raw[start:at]))
    if flags & 0x1000:
        persistent = raw[at] == 2
        at += 1
    if flags & 0x0800:
        priority = raw[at]
        at += 1
    if flags & 0x0400:
        start, at = at + 1, at + 1 + raw[at]
        correlation_id = raw[start:at].decode("utf-8", "surrogateescape")
    if flags & 0x0200:
        start, at = at + 1, at + 1 + raw[at]
        reply_to = _decoded(bytes(raw[start:at]), "surrogateescape")
    if flags & 0x0100:
        expiration, at = _short(raw, at, "replace")
    if flags & 0x0080:
        start, at = at + 1, at + 1 + raw[at]
        message_id = raw[start:at].decode("utf-8", "replace")
    if flags & 0x0040:
        timestamp = _U64.unpack_from(raw, at)[0]
        at += 8
    if flags & 0x003C:  # type, user id, app id, cluster id: nothing of ours
        for flag in (0x0020, 0x0010, 0x0008, 0x0004):
            if flags & flag:
                at += 1 + raw[at]
    if at > end:
        raise FrameError("expected message properties, found a content header that ends within them")
    return Properties(
        message_id,
        correlation_id,
        reply_to,
        content_type,
        int(expiration) if expiration is not None and expiration.isascii() and expiration.isdecimal() else None,
        _milliseconds(timestamp),
        priority,
        persistent,
        headers if headers is not None else {},
    )


def _short(raw: Octets, at: int, errors: str) -> tuple[str, int]:
    start = at + 1
    after = start + raw[at]
    return str(raw[start:after], "utf-8", errors), after


@lru_cache(maxsize=1024)
def _decoded(raw: bytes, errors: str) -> str:
    return raw.decode("utf-8", errors)


def _milliseconds(timestamp: int | None) -> int | None:
    if timestamp is None or timestamp > _LAST_MILLISECOND:
        return None
    return timestamp if timestamp > _MILLISECONDS_FROM else timestamp * 1000
