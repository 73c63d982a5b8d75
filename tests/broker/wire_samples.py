"""What a broker sends, made by pamqp: the oracle of the frame tests."""

from __future__ import annotations

import string
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st
from pamqp import frame
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Connection, Queue
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from qworker.broker.fast.frames import Called, Confirmed, Delivered, Event, Returned

short_texts = st.text(max_size=40)
dates = st.integers(0, 2**32 - 1).map(lambda seconds: datetime.fromtimestamp(seconds, tz=UTC))
field_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=30)
    | st.binary(max_size=30).map(bytearray)
    | dates
    | st.decimals(min_value=0, max_value=9999, places=2)
    | st.floats(width=32, allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(string.ascii_letters, max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
tables = st.dictionaries(st.text(string.ascii_letters + "-_é", max_size=20), field_values, max_size=5)

SAMPLE_VALUES: dict[str, Any] = {
    "content_type": "application/msgpack",
    "content_encoding": "gzip",
    "headers": {"traceparent": "00-ab", "n": -3, "deep": {"list": [1, "two", None]}, "price": Decimal("1.25")},
    "delivery_mode": 2,
    "priority": 7,
    "correlation_id": "korrelation-ü",
    "reply_to": "amq.rabbitmq.reply-to.abc",
    "expiration": "60000",
    "message_id": "m-1",
    "timestamp": datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC),
    "message_type": "job",
    "user_id": "guest",
    "app_id": "app",
}


def message(method: Frame, channel: int, properties: Basic.Properties, body: bytes, pieces: int = 1) -> bytes:
    """The frames of one message, its body cut into up to ``pieces`` frames."""
    out = frame.marshal(method, channel)
    out += frame.marshal(ContentHeader(body_size=len(body), properties=properties), channel)
    size = max(1, -(-len(body) // max(1, pieces)))
    for at in range(0, len(body), size):
        out += frame.marshal(ContentBody(body[at : at + size]), channel)
    return out


def delivery(channel: int, tag: int, body: bytes, pieces: int = 1, **properties: Any) -> bytes:
    deliver = Basic.Deliver("consumer", tag, tag % 2 == 0, "qworker.jobs", f"key.{tag}")
    return message(deliver, channel, Basic.Properties(**properties), body, pieces)


def returned(channel: int, body: bytes, **properties: Any) -> bytes:
    return message(Basic.Return(312, "NO_ROUTE", "e", "k"), channel, Basic.Properties(**properties), body)


def method(channel: int, call: Frame) -> bytes:
    return frame.marshal(call, channel)


HEARTBEAT = frame.marshal(Heartbeat(), 0)

pieces_of_stream = st.one_of(
    st.builds(
        delivery,
        st.integers(1, 5),
        st.integers(1, 2**63 - 1),
        st.binary(max_size=300),
        st.integers(1, 4),
        correlation_id=st.none() | short_texts,
        headers=st.none() | tables,
        message_id=st.none() | short_texts,
    ),
    st.builds(returned, st.integers(1, 5), st.binary(max_size=50), message_id=st.none() | short_texts),
    st.builds(
        lambda channel, tag, multiple: method(channel, Basic.Ack(tag, multiple)),
        st.integers(1, 9),
        st.integers(0, 2**63 - 1),
        st.booleans(),
    ),
    st.builds(
        lambda channel, tag, multiple: method(channel, Basic.Nack(tag, multiple)),
        st.integers(1, 9),
        st.integers(0, 2**63 - 1),
        st.booleans(),
    ),
    st.sampled_from(
        [
            HEARTBEAT,
            method(0, Connection.Blocked("low on memory")),
            method(3, Channel.Close(404, "NOT_FOUND - no queue 'q'", 50, 10)),
            method(4, Queue.DeclareOk("q", 5, 2)),
            method(5, Basic.Cancel("consumer", nowait=True)),
        ]
    ),
)


def plain(event: Event) -> tuple[Any, ...]:
    """An event as a value that can be compared."""
    match event:
        case Delivered():
            head: tuple[Any, ...] = (event.tag, event.redelivered)
        case Returned():
            head = (event.code, event.reason)
        case Confirmed():
            return ("confirmed", event.channel, event.tag, event.multiple, event.ok)
        case Called():
            return ("called", event.channel, event.method.name, dict(event.method))
    properties = event.properties
    return (
        type(event).__name__,
        event.channel,
        *head,
        event.exchange,
        event.routing_key,
        properties,
        dict(properties.headers),
        event.body,
    )


def seeds() -> list[bytes]:
    """Streams of every kind of frame, for a fuzzer to start from."""
    properties = Basic.Properties(**SAMPLE_VALUES)
    deliver = Basic.Deliver(consumer_tag="c", delivery_tag=7, redelivered=True, exchange="ex", routing_key="model")
    returned = Basic.Return(reply_code=312, reply_text="NO_ROUTE", exchange="ex", routing_key="model")
    methods: list[tuple[int, Any]] = [
        (1, Basic.Ack(delivery_tag=3, multiple=True)),
        (1, Basic.Nack(delivery_tag=3)),
        (1, Basic.Cancel(consumer_tag="c")),
        (1, Channel.Close(reply_code=404, reply_text="no queue", class_id=50, method_id=10)),
        (0, Connection.Blocked(reason="memory")),
        (0, Connection.Close(reply_code=320, reply_text="shutdown", class_id=0, method_id=0)),
        (1, Queue.DeclareOk(queue="q", message_count=1, consumer_count=2)),
        (0, Connection.Tune(channel_max=2047, frame_max=131072, heartbeat=60)),
        (0, Heartbeat()),
    ]
    return [
        message(deliver, 1, properties, b"body" * 20, pieces=3),
        message(deliver, 2, Basic.Properties(), b""),
        message(returned, 1, properties, b"back"),
        *(frame.marshal(method, channel) for channel, method in methods),
    ]
