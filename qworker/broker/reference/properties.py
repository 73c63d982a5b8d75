"""Between our envelope and AMQP's basic properties."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aiormq import spec

from qworker.broker.base import Properties

_TRANSIENT, _PERSISTENT = 1, 2


def to_amqp(properties: Properties) -> spec.Basic.Properties:
    """Raises ValueError, TypeError or OverflowError for what AMQP cannot carry."""
    timestamp = properties.timestamp_ms
    return spec.Basic.Properties(
        message_id=properties.message_id,
        correlation_id=properties.correlation_id,
        reply_to=properties.reply_to,
        content_type=properties.content_type,
        expiration=None if properties.expiration_ms is None else str(properties.expiration_ms),
        timestamp=None if timestamp is None else datetime.fromtimestamp(timestamp / 1000, tz=UTC),
        priority=properties.priority,
        delivery_mode=_PERSISTENT if properties.persistent else _TRANSIENT,
        headers=_encodable(properties.headers) or None,
    )


def from_amqp(found: spec.Basic.Properties) -> Properties:
    """Never raises: what makes no sense is None. Times in AMQP are whole seconds."""
    return Properties(
        message_id=found.message_id,
        correlation_id=found.correlation_id,
        reply_to=found.reply_to,
        content_type=found.content_type,
        expiration_ms=_milliseconds(found.expiration),
        timestamp_ms=None if found.timestamp is None else round(found.timestamp.timestamp() * 1000),
        priority=found.priority,
        persistent=found.delivery_mode == _PERSISTENT,
        headers=found.headers or {},
    )


def _milliseconds(expiration: str | None) -> int | None:
    return int(expiration) if expiration is not None and expiration.isascii() and expiration.isdecimal() else None


def _encodable(value: Any) -> Any:
    """AMQP's tables have byte arrays, which pamqp writes from a bytearray only, and no tuples."""
    if isinstance(value, Mapping):
        return {str(key): _encodable(entry) for key, entry in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, bytes):
        return bytearray(value)
    if isinstance(value, list | tuple):
        return [_encodable(entry) for entry in value]  # pyright: ignore[reportUnknownVariableType]
    return value
