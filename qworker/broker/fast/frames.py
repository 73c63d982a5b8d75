"""AMQP 0-9-1 frames: bytes in, events out; calls in, buffers out. No I/O, no asyncio.

The frames that move messages (deliver, header, body, publish, ack, nack, reject, return) are read and
written here, in place; all others go through pamqp. The reader owns its buffer, so that a socket can
receive straight into it, and a body is copied once on its way in.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Final

from pamqp import frame as pamqp_frame
from pamqp.base import Frame
from pamqp.exceptions import PAMQPException

from qworker.broker.base import Body, Properties
from qworker.broker.fast.fields import EncodeError, FrameError, read_properties, short_string, write_properties

PROTOCOL_HEADER: Final = b"AMQP\x00\x00\x09\x01"
HEARTBEAT: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"
FRAME_MAX: Final = 131_072
"""The largest frame, envelope included, that we take; RabbitMQ's default."""
MAX_BODY: Final = 512 << 20
"""The largest body that RabbitMQ can be configured to let pass."""

_TAKEN_IN_ADVANCE: Final = 16 << 20
_OVERHEAD = 8
_END = b"\xce"
_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8
_KINDS = frozenset((_METHOD, _HEADER, _BODY, _HEARTBEAT))
_DELIVER, _RETURN, _ACK, _NACK = 0x003C003C, 0x003C0032, 0x003C0050, 0x003C0078
_PUBLISH, _REJECT = 0x003C0028, 0x003C005A
_CLOSES = frozenset((0x00140028, 0x00140029))  # channel.close, channel.close-ok
_CONFIRMS = frozenset((_ACK, _NACK))
_CONFIRM_SIZE = 13

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_ENVELOPE = struct.Struct(">BHI")
_CONTENT = struct.Struct(">HHQ")
_TAG_AND_BITS = struct.Struct(">QB")
_SETTLE = struct.Struct(">BHIIQBB")

Buffer = bytes | memoryview


# --- events -------------------------------------------------------------------------------------


class Delivered:
    """A message for a consumer of ``channel``."""

    __slots__ = ("body", "channel", "exchange", "properties", "redelivered", "routing_key", "tag")

    def __init__(self, channel: int, tag: int, redelivered: bool, exchange: str, routing_key: str) -> None:
        self.channel = channel
        self.tag = tag
        self.redelivered = redelivered
        self.exchange = exchange
        self.routing_key = routing_key
        self.properties = _NO_PROPERTIES
        self.body = b""


class Returned:
    """A mandatory message of ours that no queue took, and why."""

    __slots__ = ("body", "channel", "code", "exchange", "properties", "reason", "routing_key")

    def __init__(self, channel: int, code: int, reason: str, exchange: str, routing_key: str) -> None:
        self.channel = channel
        self.code = code
        self.reason = reason
        self.exchange = exchange
        self.routing_key = routing_key
        self.properties = _NO_PROPERTIES
        self.body = b""


@dataclass(slots=True)
class Confirmed:
    """The broker took (or, not ``ok``, refused) our publish ``tag``; with ``multiple`` all up to it."""

    channel: int
    tag: int
    multiple: bool
    ok: bool


@dataclass(slots=True)
class Called:
    """Any other method, as pamqp reads it."""

    channel: int
    method: Frame


Event = Delivered | Returned | Confirmed | Called

_NO_PROPERTIES: Final = Properties()


# --- bytes in -----------------------------------------------------------------------------------


class _Content:
    """A message whose header or body is still to come."""

    __slots__ = ("body", "message", "missing")

    def __init__(self, message: Delivered | Returned) -> None:
        self.message = message
        self.missing = -1  # until the header tells
        self.body: BytesIO | None = None  # of a message in several frames


class FrameReader:
    """Turns received bytes into events.

    Use: receive into ``space()``, then tell how much came to ``received(n)``. Once ``broken`` is set the
    reader is spent, and the connection has to be closed.
    """

    broken: FrameError | None = None
    """What was wrong with the bytes behind the last event."""

    def __init__(self, *, max_body: int = MAX_BODY, capacity: int = 2 * FRAME_MAX) -> None:
        self._buffer = bytearray(capacity)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._max_body = max_body
        self._max_payload = min(FRAME_MAX, capacity) - _OVERHEAD
        self._contents: dict[int, _Content] = {}

    def limit_frames(self, frame_max: int) -> None:
        """Refuse larger frames from now on: what was negotiated."""
        self._max_payload = min(frame_max - _OVERHEAD, self._max_payload)

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < len(self._buffer) // 2:
            rest = self._end - self._start
            self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :]

    def feed(self, received: bytes) -> list[Event]:
        """``space`` and ``received`` in one, for bytes that are somewhere else."""
        events: list[Event] = []
        at = 0
        while at < len(received) and self.broken is None:
            space = self.space()
            part = received[at : at + len(space)]
            space[: len(part)] = part
            at += len(part)
            events += self.received(len(part))
        return events

    def received(self, nbytes: int) -> list[Event]:
        """The events of all frames that are complete now; sets ``broken`` at the first malformed one."""
        self._end += nbytes
        events: list[Event] = []
        if self.broken is None:
            try:
                self._read_frames(events)
            except FrameError as exc:
                self.broken = exc
        return events

    def _read_frames(self, events: list[Event]) -> None:
        buffer = self._buffer
        end = self._end
        while end - self._start >= _OVERHEAD:
            at = self._start
            kind, channel, size = _ENVELOPE.unpack_from(buffer, at)
            payload = at + 7
            after = payload + size
            if kind not in _KINDS:
                raise self._foreign(at, kind)
            if size > self._max_payload:
                raise FrameError(f"expected a frame of at most {self._max_payload} bytes, found one of {size}")
            if after >= end:
                return
            if buffer[after] != 0xCE:
                raise FrameError(f"expected the end-of-frame octet, found {buffer[after]:#04x}")
            if kind == _BODY:
                self._body(channel, payload, after, events)
            elif kind == _METHOD:
                behind = self._whole_delivery(channel, payload, after, events)
                if behind:
                    self._start = behind
                    continue
                self._method(channel, payload, after, events)
            elif kind == _HEADER:
                self._header(channel, payload, after, events)
            elif size or channel:
                raise FrameError(f"expected an empty heartbeat, found {size} bytes on channel {channel}")
            self._start = after + 1

    def _whole_delivery(self, channel: int, at: int, end: int, events: list[Event]) -> int:
        """Read a delivery that is here in full, in one body frame, as nearly all are; where the next frame begins.

        0, and nothing is read, for all else: the long way finds out what it is, or what is wrong with it.
        """
        buffer = self._buffer
        head = end + 8  # the content header's payload
        if self._end - head < 22 or _U32.unpack_from(buffer, at)[0] != _DELIVER or channel in self._contents:
            return 0
        kind, number, size = _ENVELOPE.unpack_from(buffer, end + 1)
        head_end = head + size
        if kind != _HEADER or number != channel or not 14 <= size <= self._max_payload or self._end - head_end < 9:
            return 0
        class_id, _, nbytes = _CONTENT.unpack_from(buffer, head)
        kind, number, size = _ENVELOPE.unpack_from(buffer, head_end + 1)
        body = head_end + 8
        body_end = body + nbytes
        if (
            class_id != 60
            or kind != _BODY
            or number != channel
            or size != nbytes
            or not 0 < nbytes <= min(self._max_payload, self._max_body)
            or body_end >= self._end
            or buffer[head_end] != 0xCE
            or buffer[body_end] != 0xCE
        ):
            return 0
        message = self._deliver(channel, at + 4, end)
        message.properties = read_properties(buffer, head + 12, head_end)
        message.body = bytes(self._view[body:body_end])
        events.append(message)
        return body_end + 1

    def _foreign(self, at: int, kind: int) -> FrameError:
        if bytes(self._buffer[at : at + 4]) == b"AMQP":
            version = ".".join(str(part) for part in self._buffer[at + 5 : at + 8])
            return FrameError(f"expected AMQP 0-9-1, found a server that offers AMQP {version}: check the address")
        return FrameError(f"expected an AMQP frame, found type {kind}: is this address a RabbitMQ listener?")

    def _method(self, channel: int, at: int, end: int, events: list[Event]) -> None:
        buffer = self._buffer
        if end - at < 4:
            raise FrameError(f"expected a method, found {end - at} bytes")
        method: int = _U32.unpack_from(buffer, at)[0]
        if channel in self._contents and method not in _CLOSES:
            raise FrameError(f"expected the rest of a message on channel {channel}, found method {method:#010x}")
        if method == _DELIVER:
            self._contents[channel] = _Content(self._deliver(channel, at + 4, end))
        elif method in _CONFIRMS:
            if end - at != _CONFIRM_SIZE:
                raise FrameError(f"expected a confirm of {_CONFIRM_SIZE} bytes, found {end - at}")
            tag, bits = _TAG_AND_BITS.unpack_from(buffer, at + 4)
            events.append(Confirmed(channel, tag, bits & 1 == 1, method == _ACK))
        elif method == _RETURN:
            self._contents[channel] = self._return(channel, at + 4, end)
        else:
            if method in _CLOSES:
                self._contents.pop(channel, None)
            events.append(Called(channel, read_method(bytes(self._view[at - 7 : end + 1]))))

    def _deliver(self, channel: int, at: int, end: int) -> Delivered:
        buffer, view = self._buffer, self._view
        at += 1 + buffer[at]  # the consumer tag: each consumer has a channel of its own
        if end - at < 11:
            raise FrameError("expected a delivery, found a method that ends within it")
        tag, bits = _TAG_AND_BITS.unpack_from(buffer, at)
        exchange, key = _exchange_and_key(bytes(view[at + 9 : end]))
        return Delivered(channel, tag, bits & 1 == 1, exchange, key)

    def _return(self, channel: int, at: int, end: int) -> _Content:
        code: int = _U16.unpack_from(self._buffer, at)[0]
        at += 2
        texts: list[str] = []
        for _ in range(3):
            if at >= end:
                raise FrameError("expected a returned message, found a method that ends within it")
            after = at + 1 + self._buffer[at]
            texts.append(str(self._view[at + 1 : after], "utf-8", "replace"))
            at = after
        if at != end:
            raise FrameError("expected a returned message, found a method of another length")
        return _Content(Returned(channel, code, *texts))

    def _header(self, channel: int, at: int, end: int, events: list[Event]) -> None:
        content = self._contents.get(channel)
        if content is None or content.missing >= 0:
            raise FrameError(f"expected no content header on channel {channel}, found one")
        if end - at < 14:
            raise FrameError(f"expected a content header, found {end - at} bytes")
        class_id, _, size = _CONTENT.unpack_from(self._buffer, at)
        if class_id != 60:
            raise FrameError(f"expected a message of class basic, found class {class_id}")
        if size > self._max_body:
            raise FrameError(f"expected a body of at most {self._max_body} bytes, found one of {size}")
        content.message.properties = read_properties(self._buffer, at + 12, end)
        content.missing = size
        if not size:
            del self._contents[channel]
            events.append(content.message)

    def _body(self, channel: int, at: int, end: int, events: list[Event]) -> None:
        content = self._contents.get(channel)
        missing = -1 if content is None else content.missing - (end - at)
        if content is None or missing < 0:
            raise FrameError(f"expected at most the announced body on channel {channel}, found {end - at} bytes more")
        whole = content.body
        if whole is not None:
            whole.write(self._view[at:end])
        elif missing:
            content.body = self._room_for(content.missing)
            content.body.write(self._view[at:end])
        if missing:
            content.missing = missing
            return
        # A BytesIO gives its buffer away as it is: the body has been copied once.
        content.message.body = bytes(self._view[at:end]) if whole is None else whole.getvalue()
        del self._contents[channel]
        events.append(content.message)

    @staticmethod
    def _room_for(size: int) -> BytesIO:
        """A buffer of the announced size, up to what may be taken before a byte of it has come."""
        whole = BytesIO()
        whole.seek(min(size, _TAKEN_IN_ADVANCE) - 1)
        whole.write(b"\0")
        whole.seek(0)
        return whole


@lru_cache(maxsize=4096)
def _exchange_and_key(raw: bytes) -> tuple[str, str]:
    """The end of a delivery's method, which is the same for all jobs of a model. Raises FrameError."""
    exchange_end = 1 + raw[0]
    if exchange_end >= len(raw):
        raise FrameError("expected a delivery, found a method that ends within its exchange name")
    if exchange_end + 1 + raw[exchange_end] != len(raw):
        raise FrameError("expected a delivery, found a method that ends elsewhere than its routing key")
    return raw[1:exchange_end].decode("utf-8", "replace"), raw[exchange_end + 1 :].decode("utf-8", "replace")


def read_method(raw: bytes) -> Frame:
    """Decode one whole method frame by pamqp. Raises FrameError."""
    try:
        _, _, method = pamqp_frame.unmarshal(raw)
    except (
        PAMQPException,
        struct.error,
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        OSError,
        RecursionError,
    ) as exc:
        raise FrameError(f"expected a method of AMQP 0-9-1, found {raw[7:27].hex()}: {exc}") from exc
    if not isinstance(method, Frame):
        raise FrameError(f"expected a method of AMQP 0-9-1, found {type(method).__name__}")
    return method


# --- bytes out ----------------------------------------------------------------------------------


def write_publish(
    channel: int,
    exchange: str,
    routing_key: str,
    properties: Properties,
    body: Body,
    *,
    mandatory: bool = False,
    frame_max: int = FRAME_MAX,
    reply_to: str | None = None,
) -> list[Buffer]:
    """The buffers of one message; the body is not copied. ``reply_to`` overrules the properties'.

    Raises EncodeError.
    """
    parts: Sequence[Buffer] = (body,) if isinstance(body, bytes) else body
    size = len(body) if isinstance(body, bytes) else sum(map(len, parts))
    values = write_properties(properties, reply_to)
    room = frame_max - _OVERHEAD
    if 12 + len(values) > room:
        raise EncodeError(
            f"expected an envelope of at most {room} bytes, found {12 + len(values)}: shorten the headers"
        )
    head = b"".join(
        (
            _publish_method(channel, exchange, routing_key, mandatory),
            _ENVELOPE.pack(_HEADER, channel, 12 + len(values)),
            _CONTENT.pack(60, 0, size),
            values,
            _END,
        )
    )
    if not size:
        return [head]
    if size <= room:
        return [head + _ENVELOPE.pack(_BODY, channel, size), *parts, _END]
    return [head, *_body_frames(channel, parts, size, room)]


def _body_frames(channel: int, parts: Sequence[Buffer], size: int, room: int) -> Iterator[Buffer]:
    """The frames of a body of more than ``room`` bytes."""
    free = 0  # bytes that the frame at hand still takes
    for part in parts:
        view = memoryview(part)
        at = 0
        while at < len(view):
            if not free:
                free = min(room, size)
                size -= free
                yield _ENVELOPE.pack(_BODY, channel, free)
            piece = view[at : at + free]
            at += len(piece)
            free -= len(piece)
            yield piece
            if not free:
                yield _END


@lru_cache(maxsize=4096)
def _publish_method(channel: int, exchange: str, routing_key: str, mandatory: bool) -> bytes:
    names = short_string(exchange, "exchange name") + short_string(routing_key, "routing key")
    size = 4 + 2 + len(names) + 1
    return (
        _ENVELOPE.pack(_METHOD, channel, size)
        + _U32.pack(_PUBLISH)
        + b"\x00\x00"
        + names
        + (b"\x01\xce" if mandatory else b"\x00\xce")
    )


def write_ack(channel: int, tag: int, *, multiple: bool = False) -> bytes:
    return _SETTLE.pack(_METHOD, channel, _CONFIRM_SIZE, _ACK, tag, multiple, 0xCE)


def write_reject(channel: int, tag: int, *, requeue: bool) -> bytes:
    return _SETTLE.pack(_METHOD, channel, _CONFIRM_SIZE, _REJECT, tag, requeue, 0xCE)


def write_nack(channel: int, tag: int, *, requeue: bool) -> bytes:
    return _SETTLE.pack(_METHOD, channel, _CONFIRM_SIZE, _NACK, tag, requeue << 1, 0xCE)


def write_method(channel: int, method: Frame) -> bytes:
    """Encode any other method by pamqp. Raises EncodeError."""
    try:
        return pamqp_frame.marshal(method, channel)
    except (struct.error, ValueError, TypeError, LookupError) as exc:
        raise EncodeError(f"expected arguments that AMQP can carry, found {method.name}: {exc}") from exc
