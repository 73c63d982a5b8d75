"""The byte stream beneath aiormq, made safe against what strangers publish.

aiormq ends the whole connection when pamqp cannot decode a message's properties: a time stamp in
nanoseconds or a correlation id in Latin-1 is enough. The broker then delivers the message again, to the
next connection, for ever. So each content header is tried here first, and what cannot be decoded in it is
left out before aiormq sees it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator

from pamqp import decode
from pamqp.commands import Basic, Connection
from pamqp.frame import unmarshal

_METHOD, _HEADER = 1, 2
_PREFIX = 12  # class, weight, body size
_CLOSE = struct.pack(">HH", 10, 50)
_CHANNEL_CLOSE = struct.pack(">HH", 20, 40)
_FLAGS_CONTINUE = 1

# What decoding hostile bytes can raise; a deep table ends in RecursionError, a far date in OverflowError.
_UNDECODABLE = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, OSError, struct.error)


class GuardedReader:
    """Stands for the StreamReader of one connection; asked by aiormq for 1, then 6, then n + 1 bytes a frame."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._prefix = b""
        self.close_frame: Connection.Close | None = None
        """The broker's goodbye. aiormq forgets it when it comes in the middle of the handshake."""
        self.closed_channels: set[int] = set()
        """Numbers of channels whose close by the broker was read; discarded by whoever opens them again."""

    def at_eof(self) -> bool:
        return self._reader.at_eof()

    async def read(self, limit: int = -1) -> bytes:
        return await self._reader.read(limit)

    async def readexactly(self, count: int) -> bytes:
        chunk = await self._reader.readexactly(count)
        if len(self._prefix) < 7:
            self._prefix += chunk
            return chunk
        prefix, self._prefix = self._prefix, b""
        if prefix[0] == _HEADER:
            return decodable_header(chunk)
        if prefix[0] == _METHOD and chunk.startswith(_CHANNEL_CLOSE):
            self.closed_channels.add(int.from_bytes(prefix[1:3], "big"))
        if prefix[0] == _METHOD and chunk.startswith(_CLOSE):
            frame = unmarshal(prefix + chunk)[2]
            self.close_frame = frame if isinstance(frame, Connection.Close) else None
        return chunk


def decodable_header(payload: bytes) -> bytes:
    """A content header's payload as it is, or of the same length and without what pamqp cannot decode."""
    try:
        flags = int.from_bytes(payload[_PREFIX : _PREFIX + 2], "big")
        if flags & _FLAGS_CONTINUE:
            raise ValueError("no property has a flag in a second word")
        kept, intact = 0, True
        parts: list[bytes] = []
        for flag, part, good in _properties(payload, flags):
            intact = intact and good
            if good:
                kept |= flag
                parts.append(part)
    except _UNDECODABLE:
        kept, intact, parts = 0, False, []
    if intact:
        return payload
    rebuilt = payload[:_PREFIX] + struct.pack(">H", kept) + b"".join(parts)
    return rebuilt.ljust(len(payload) - 1, b"\0") + payload[-1:]


def _properties(payload: bytes, flags: int) -> Iterator[tuple[int, bytes, bool]]:
    """Each property that is there: its flag, its bytes, and whether pamqp can decode it.

    Raises ValueError when a length points behind the end.
    """
    at, end = _PREFIX + 2, len(payload) - 1
    for name, flag in Basic.Properties.flags.items():
        if not flags & flag:
            continue
        kind = str(getattr(Basic.Properties, f"_{name}"))
        after = at + _LENGTHS[kind](payload, at)
        if after > end:
            raise ValueError(f"{name} ends behind the frame")
        part = payload[at:after]
        yield flag, part, _is_decodable(part, kind)
        at = after


def _is_decodable(part: bytes, kind: str) -> bool:
    try:
        consumed, _ = decode.by_type(part, kind)
    except _UNDECODABLE:
        return False
    return consumed == len(part)


_LENGTHS: dict[str, Callable[[bytes, int], int]] = {
    "octet": lambda _payload, _at: 1,
    "timestamp": lambda _payload, _at: 8,
    "shortstr": lambda payload, at: 1 + payload[at],
    "table": lambda payload, at: 4 + int.from_bytes(payload[at : at + 4], "big"),
}
