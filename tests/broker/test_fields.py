"""Field tables against pamqp."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import decode, encode

from qworker.broker.base import Properties
from qworker.broker.fast.fields import FrameError, Headers, read_properties, read_table, write_table
from tests.broker.wire_samples import tables


@settings(max_examples=200, deadline=None)
@given(tables)
def test_tables_of_pamqp_are_read_as_pamqp_reads_them(table: dict[str, Any]) -> None:
    """Every type that pamqp writes comes out as it comes out of pamqp."""
    raw = encode.field_table(table)
    assert read_table(raw[4:]) == decode.field_table(raw)[1]


@settings(max_examples=200, deadline=None)
@given(tables)
def test_written_tables_are_what_pamqp_reads(table: dict[str, Any]) -> None:
    """Every table that we write decodes to itself, by pamqp and by us."""
    raw = write_table(table)
    assert decode.field_table(raw) == (len(raw), table)
    assert read_table(raw[4:]) == table


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        (b"t\x01", True),
        (b"b\xff", -1),
        (b"B\xff", 255),
        (b"s\xff\xfe", -2),
        (b"u\xff\xfe", 65534),
        (b"I\xff\xff\xff\xfd", -3),
        (b"i\xff\xff\xff\xfd", 2**32 - 3),
        (b"l\xff\xff\xff\xff\xff\xff\xff\xfc", -4),
        (b"L\xff\xff\xff\xff\xff\xff\xff\xfc", -4),
        (b"f\x3f\xc0\x00\x00", 1.5),
        (b"d\x3f\xf8\x00\x00\x00\x00\x00\x00", 1.5),
        (b"D\x02\x00\x00\x00\x7d", Decimal("1.25")),
        (b"S\x00\x00\x00\x02hi", "hi"),
        (b"S\x00\x00\x00\x02\xff\xfe", b"\xff\xfe"),
        (b"x\x00\x00\x00\x02\xff\xfe", b"\xff\xfe"),
        (b"T\x00\x00\x00\x00\x00\x00\x00\x05", datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)),
        (b"A\x00\x00\x00\x03VB\x07", [None, 7]),
        (b"F\x00\x00\x00\x03\x01kV", {"k": None}),
        (b"V", None),
        (b"\x00", None),
    ],
)
def test_every_field_type(entry: bytes, value: Any) -> None:
    """Each type letter of RabbitMQ's field tables, as pamqp reads it."""
    raw = b"\x01k" + entry
    assert read_table(raw) == {"k": value}
    assert decode.field_table(struct.pack(">I", len(raw)) + raw)[1] == {"k": value}


def test_a_year_that_datetime_does_not_know_stays_a_number() -> None:
    """A timestamp past the year 9999 comes as the integer it is."""
    assert read_table(b"\x01kT" + struct.pack(">Q", 2**63)) == {"k": 2**63}


@given(st.binary(max_size=200))
def test_noise_raises_frame_error_only(noise: bytes) -> None:
    """Whatever bytes a table has: entries or FrameError."""
    try:
        read_table(noise)
    except FrameError:
        return


@pytest.mark.parametrize("kind", [b"A", b"F"])
def test_deep_nesting_is_refused_and_counts_as_no_headers(kind: bytes) -> None:
    """A table nested thousands deep neither overflows the stack nor costs the message."""
    value = b"V"
    for _ in range(5000):
        inner = value if kind == b"A" else b"\x00" + value
        value = kind + struct.pack(">I", len(inner)) + inner
    raw = b"\x01k" + value
    with pytest.raises(FrameError, match="deep"):
        read_table(raw)
    assert Headers(raw) == {}


def test_headers_are_a_mapping() -> None:
    """Undecoded headers compare, iterate and look up as the dict that they stand for."""
    headers: Mapping[str, Any] = Headers(write_table({"a": 1, "b": [True]})[4:])
    assert headers == {"a": 1, "b": [True]}
    assert list(headers) == ["a", "b"]
    assert headers.get("a") == 1
    assert headers.get("z") is None
    assert len(headers) == 2
    assert Properties(headers=headers) == Properties(headers={"a": 1, "b": [True]})


@pytest.mark.parametrize("cut", range(2, 30))
def test_truncated_properties(cut: int) -> None:
    """Properties that end too early raise FrameError wherever they end."""
    raw = struct.pack(">H", 0x0680) + b"\x0acorrelatio" + b"\x08reply-to" + b"\x08message0"
    assert read_properties(raw, 0, len(raw)).message_id == "message0"
    with pytest.raises(FrameError):
        read_properties(raw[:cut], 0, cut)
    with pytest.raises(FrameError):
        read_properties(raw + b"next frame", 0, cut)
