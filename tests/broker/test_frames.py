"""The frame reader and writer against pamqp, and against garbage."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pamqp import frame
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.commands import Basic, Connection, Queue
from pamqp.header import ContentHeader

from qworker.broker.base import Properties
from qworker.broker.fast.fields import EncodeError, FrameError
from qworker.broker.fast.frames import (
    Called,
    Confirmed,
    Delivered,
    FrameReader,
    write_ack,
    write_method,
    write_nack,
    write_publish,
    write_reject,
)
from tests.broker.wire_samples import (
    HEARTBEAT,
    SAMPLE_VALUES,
    delivery,
    method,
    pieces_of_stream,
    plain,
    returned,
    tables,
)


def events(*parts: bytes) -> list[tuple[Any, ...]]:
    reader = FrameReader()
    found = [plain(event) for part in parts for event in reader.feed(part)]
    if reader.broken is not None:
        raise reader.broken
    return found


# --- in ---

SMALL_STREAM = b"".join(
    [
        delivery(1, 1, b"hello", 2, correlation_id="c", headers={"a": 1}),
        HEARTBEAT,
        method(2, Basic.Ack(3, True)),
        delivery(2, 2, b""),
        returned(2, b"back", message_id="m"),
        method(0, Connection.Unblocked()),
    ]
)


def test_every_split_of_a_stream() -> None:
    """However the bytes are cut in two, and byte by byte, the same events come out."""
    whole = events(SMALL_STREAM)
    assert len(whole) == 5
    for at in range(len(SMALL_STREAM) + 1):
        assert events(SMALL_STREAM[:at], SMALL_STREAM[at:]) == whole
    assert events(*(SMALL_STREAM[at : at + 1] for at in range(len(SMALL_STREAM)))) == whole


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces_of_stream, max_size=8), st.lists(st.integers(0, 4000), max_size=8))
def test_any_stream_any_split(parts: list[bytes], cuts: list[int]) -> None:
    """Streams of all kinds of frames give one event a message or method, in order, wherever they are cut."""
    stream = b"".join(parts)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    cut = [stream[start:end] for start, end in itertools.pairwise(edges)]
    found = events(*cut)
    assert found == [event for part in parts for event in events(part)]
    assert len(found) == sum(part != HEARTBEAT for part in parts)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.data())
def test_interleaved_channels(order: list[int], data: st.DataObject) -> None:
    """Frames of several channels mix freely; each channel's message comes whole."""
    frames: dict[int, list[bytes]] = {}
    for channel in range(1, 5):
        raw, cut = delivery(channel, channel, bytes([channel]) * 20, 3), []
        while raw:
            size = 8 + struct.unpack_from(">I", raw, 3)[0]
            cut.append(raw[:size])
            raw = raw[size:]
        frames[channel] = cut
    turns = [channel for channel in frames for _ in frames[channel]]
    stream = b"".join(frames[channel].pop(0) for channel in data.draw(st.permutations(turns)))
    found = FrameReader().feed(stream)
    assert {event.channel: event.body for event in found if isinstance(event, Delivered)} == {
        channel: bytes([channel]) * 20 for channel in range(1, 5)
    }


def test_every_combination_of_properties() -> None:
    """All 8,192 sets of properties that pamqp writes are read as pamqp means them."""
    names = list(SAMPLE_VALUES)
    reader = FrameReader()
    ours = {"content_type", "priority", "correlation_id", "reply_to", "message_id"}
    for chosen in itertools.product((False, True), repeat=len(names)):
        sent = {name: SAMPLE_VALUES[name] for name, there in zip(names, chosen, strict=True) if there}
        [event] = reader.feed(delivery(1, 1, b"", **sent))
        assert isinstance(event, Delivered)
        expected = Properties(
            **{name: sent[name] for name in ours & sent.keys()},
            expiration_ms=60_000 if "expiration" in sent else None,
            timestamp_ms=1_714_979_289_000 if "timestamp" in sent else None,
            persistent="delivery_mode" in sent,
            headers=sent.get("headers", {}),
        )
        assert event.properties == expected


def test_confirms() -> None:
    """Acks and nacks of the broker carry their tag and whether they cover those before."""
    raw = method(7, Basic.Ack(5, True)) + method(7, Basic.Nack(2**40, False))
    assert FrameReader().feed(raw) == [Confirmed(7, 5, True, True), Confirmed(7, 2**40, False, False)]


def test_large_body_over_many_reads() -> None:
    """A body of many frames comes as one bytes object."""
    body = bytes(range(256)) * 4000
    [event] = FrameReader().feed(delivery(1, 1, body, 9))
    assert isinstance(event, Delivered)
    assert event.body == body


def test_ids_that_are_not_utf8_come_back_unchanged() -> None:
    """Correlation id and reply queue of whatever bytes survive a round trip: a reply must carry them."""
    raw = bytearray(delivery(1, 1, b"", correlation_id="AB", reply_to="CD"))
    for name in (b"\x02AB", b"\x02CD"):
        at = raw.index(name)
        raw[at + 1 : at + 3] = b"\xff\xfe"
    [event] = FrameReader().feed(bytes(raw))
    assert isinstance(event, Delivered)
    written = b"".join(write_publish(1, "", "k", event.properties, b""))
    assert written.count(b"\x02\xff\xfe") == 2


# --- limits and garbage ---


def test_frames_over_the_limit_are_refused_at_their_header() -> None:
    """A frame of more than the negotiated size is refused before its payload arrives."""
    reader = FrameReader()
    reader.limit_frames(4096)
    assert len(reader.feed(delivery(1, 1, b"x" * 4088))) == 1
    assert reader.feed(struct.pack(">BHI", 3, 1, 4089) + b"x") == []
    assert "at most 4088 bytes, found one of 4089" in str(reader.broken)


def test_bodies_over_the_limit_are_refused_at_their_header() -> None:
    """A body of more than the limit is refused before a byte of it arrives."""
    reader = FrameReader(max_body=99)
    assert reader.feed(delivery(1, 1, b"x" * 100)[:-60]) == []
    assert "at most 99 bytes, found one of 100" in str(reader.broken)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"AMQP\x00\x00\x08\x00", "offers AMQP 0.8.0"),
        (b"HTTP/1.1 400 Bad Request\r\n", "found type 72"),
        (method(1, Basic.Ack(1))[:-1] + b"\x00", "end-of-frame"),
        (frame.marshal(ContentBody(b"x"), 1), "announced body"),
        (frame.marshal(ContentHeader(body_size=1), 1), "no content header"),
        (struct.pack(">BHI", 8, 1, 0) + b"\xce", "empty heartbeat"),
        (struct.pack(">BHIHHB", 1, 1, 5, 250, 250, 0) + b"\xce", "method of AMQP"),
        (struct.pack(">BHIHB", 1, 1, 3, 60, 60) + b"\xce", "expected a method"),
        (method(1, Basic.Deliver("c", 1, False, "e", "k")) + method(1, Basic.Ack(1)), "rest of a message"),
        (method(1, Basic.Deliver("c", 1, False, "e", "k")) * 2, "rest of a message"),
        (delivery(1, 1, b"xyz")[:-4] + b"\xce", "end-of-frame"),
    ],
)
def test_what_is_not_amqp_is_named(raw: bytes, why: str) -> None:
    """Malformed frames, and frames out of order, raise FrameError and say what is wrong."""
    with pytest.raises(FrameError, match=why):
        events(raw + HEARTBEAT * 20)


def test_what_came_before_the_damage_counts() -> None:
    """Frames before a malformed one give their events; nothing behind it does."""
    reader = FrameReader()
    found = reader.feed(method(1, Basic.Ack(1)) + b"garbage!" + method(1, Basic.Ack(2)))
    assert found == [Confirmed(1, 1, False, True)]
    assert reader.broken is not None
    assert reader.feed(method(1, Basic.Ack(3))) == []


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600))
def test_noise_raises_nothing_else(noise: bytes) -> None:
    """Whatever bytes come: events or FrameError, never another error."""
    try:
        events(noise)
    except FrameError:
        return


@settings(max_examples=500, deadline=None)
@given(
    st.lists(pieces_of_stream, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=5),
    st.integers(1, 64),
)
def test_damaged_streams_raise_nothing_else(parts: list[bytes], damage: list[tuple[int, int]], step: int) -> None:
    """Valid streams with changed bytes, headers looked at: events or FrameError, never another error."""
    stream = bytearray(b"".join(parts))
    for at, byte in damage:
        stream[at % len(stream)] = byte
    try:
        events(*(bytes(stream[at : at + step]) for at in range(0, len(stream), step)))
    except FrameError:
        return


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 0xFFFF), st.binary(max_size=120))
def test_any_content_header(flags: int, noise: bytes) -> None:
    """Whatever stands in a content header: a delivery or FrameError, and headers that can be looked at."""
    payload = struct.pack(">HHQH", 60, 0, 0, flags) + noise
    raw = (
        method(1, Basic.Deliver("c", 1, False, "e", "k")) + struct.pack(">BHI", 2, 1, len(payload)) + payload + b"\xce"
    )
    reader = FrameReader()
    found = reader.feed(raw)
    if reader.broken is not None:
        return
    [event] = found
    assert isinstance(event, Delivered)
    assert isinstance(dict(event.properties.headers), dict)


# --- out ---


def unmarshal_all(raw: bytes) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    while raw:
        size, channel, value = frame.unmarshal(raw)
        found.append((channel, value))
        raw = raw[size:]
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Properties,
        message_id=st.none() | st.text(min_size=1, max_size=60),
        correlation_id=st.none() | st.text(min_size=1, max_size=60),
        reply_to=st.none() | st.text(min_size=1, max_size=60),
        content_type=st.none() | st.text(min_size=1, max_size=60),
        expiration_ms=st.none() | st.integers(0, 2**40),
        timestamp_ms=st.none() | st.integers(0, 2**32 - 1).map(lambda seconds: seconds * 1000),
        priority=st.none() | st.integers(0, 255),
        persistent=st.booleans(),
        headers=tables,
    ),
    st.binary(max_size=9000),
    st.booleans(),
)
def test_publishes_are_what_pamqp_reads(properties: Properties, body: bytes, mandatory: bool) -> None:
    """Method, header and body frames of a publish decode to what was given, within the frame limit."""
    buffers = write_publish(9, "ex", "key.ü", properties, body, mandatory=mandatory, frame_max=4096)
    (_, publish), (_, header), *parts = unmarshal_all(b"".join(buffers))
    assert isinstance(publish, Basic.Publish)
    assert (publish.exchange, publish.routing_key, publish.mandatory, publish.immediate) == (
        "ex",
        "key.ü",
        mandatory,
        False,
    )
    assert isinstance(header, ContentHeader)
    assert header.body_size == len(body)
    assert all(len(part.value) <= 4096 - 8 for _, part in parts)
    assert b"".join(part.value for _, part in parts) == body
    found = header.properties
    assert (found.message_id, found.correlation_id, found.reply_to) == (
        properties.message_id,
        properties.correlation_id,
        properties.reply_to,
    )
    assert (found.content_type, found.priority) == (properties.content_type, properties.priority)
    assert found.expiration == (None if properties.expiration_ms is None else str(properties.expiration_ms))
    assert (found.delivery_mode == 2) == properties.persistent
    [event] = FrameReader().feed(delivery(1, 1, b"", **{name: getattr(found, name) for name in SAMPLE_VALUES}))
    assert isinstance(event, Delivered)
    assert replace(event.properties, headers={}) == replace(properties, headers={})


@pytest.mark.parametrize("tag", [1, 2**40, 2**64 - 1])
def test_settles_are_what_pamqp_writes(tag: int) -> None:
    """Ack, reject and nack are byte for byte those of pamqp."""
    assert write_ack(3, tag) == method(3, Basic.Ack(tag)) if tag < 2**63 else True
    small = min(tag, 2**63 - 1)
    assert write_ack(3, small, multiple=True) == method(3, Basic.Ack(small, True))
    for requeue in (False, True):
        assert write_reject(3, small, requeue=requeue) == method(3, Basic.Reject(small, requeue))
        assert write_nack(3, small, requeue=requeue) == method(3, Basic.Nack(small, False, requeue))


def test_reply_to_overrules() -> None:
    """A request's reply queue is the channel's, whatever the properties say."""
    buffers = write_publish(1, "e", "k", Properties(reply_to="mine"), b"", reply_to="amq.rabbitmq.reply-to")
    assert unmarshal_all(b"".join(buffers))[1][1].properties.reply_to == "amq.rabbitmq.reply-to"


@pytest.mark.parametrize(
    "call",
    [
        lambda: write_publish(1, "e" * 256, "k", Properties(), b""),
        lambda: write_publish(1, "e", "ü" * 128, Properties(), b""),
        lambda: write_publish(1, "e", "k", Properties(message_id="m" * 256), b""),
        lambda: write_publish(1, "e", "k", Properties(headers={"x": object()}), b""),
        lambda: write_publish(1, "e", "k", Properties(headers={"x": 2**64}), b""),
        lambda: write_publish(1, "e", "k", Properties(headers={"x": "y" * 200_000}), b""),
        lambda: write_method(1, Queue.Declare(queue="q", arguments={"x": object()})),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_amqp_cannot_carry(call: Any) -> None:
    """Names over 255 bytes, foreign header types and oversized envelopes raise EncodeError; nothing is sent."""
    with pytest.raises(EncodeError):
        call()


def test_rare_methods_come_as_pamqp_reads_them() -> None:
    """All that is not hot is decoded by pamqp."""
    [event] = FrameReader().feed(method(4, Queue.DeclareOk("q", 5, 2)))
    assert isinstance(event, Called)
    assert isinstance(event.method, Frame)
    assert dict(event.method) == {"queue": "q", "message_count": 5, "consumer_count": 2}


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=90), max_size=6), st.integers(64, 200))
def test_a_body_in_parts_is_written_as_if_it_were_whole(parts: list[bytes], frame_max: int) -> None:
    """Parts of any size, empty ones too, give the same bytes as the body that they make up."""
    views = [memoryview(part) for part in parts]
    in_parts = b"".join(write_publish(3, "e", "k", Properties(), views, frame_max=frame_max))
    assert in_parts == b"".join(write_publish(3, "e", "k", Properties(), b"".join(parts), frame_max=frame_max))
