"""What the broker says no with, in our words."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Mapping

import aiormq

from qworker.broker.base import MessageTooLarge
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable, PublishFailed, TopologyMismatch
from qworker.wire.topology import DIRECT_REPLY_TO, Binding, Exchange, Queue

LIBRARY_ERRORS = (
    aiormq.AMQPError,
    aiormq.ChannelInvalidStateError,
    RuntimeError,  # "... closed", of a call on a closed connection
    EOFError,
    OSError,
)
"""All that aiormq raises when a connection or a channel is, or goes, away."""

ENCODE_ERRORS = (TypeError, ValueError, OverflowError, struct.error)
"""What pamqp raises for a value that AMQP cannot carry."""

_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>[^']*)' for (?P<kind>\w+) '(?P<name>[^']*)'.*?: received "
    r"(?:the value )?(?P<ours>.*?) but current is (?P<theirs>.*)"
)
_TOO_LARGE = re.compile(r"message size (?P<size>\d+) .*?max size (?P<limit>\d+)")
_MISSING_EXCHANGE = re.compile(r"no exchange '(?P<name>[^']*)'")
_REFUSED_EXCHANGE = re.compile(r"access to exchange '(?P<name>[^']*)'")


def described(error: BaseException) -> str:
    """The broker's or system's own words, without the library's."""
    if isinstance(error, aiormq.ChannelClosed | aiormq.ConnectionClosed) and len(error.args) == 2:
        return f"{error.args[0]} {error.args[1]}"
    if isinstance(error, asyncio.CancelledError):
        return "no heartbeat from the broker in time"
    text = ", ".join(str(argument) for argument in error.args if isinstance(argument, str | int))
    return text or type(error).__name__


def declare_error(error: aiormq.ChannelClosed, entity: Exchange | Queue | Binding) -> BrokerError:
    """Why ``entity`` could not be declared, and what to do."""
    text = described(error)
    what = _named(entity)
    if isinstance(error, aiormq.ChannelAccessRefused):
        return refused(error, f"declare {what}", "configure" if not isinstance(entity, Binding) else "write and read")
    if isinstance(error, aiormq.ChannelNotFoundEntity):
        return BrokerError(f"cannot declare {what}: {text}. Declare both of its ends first")
    if isinstance(error, aiormq.ChannelLockedResource):
        return BrokerError(f"cannot declare {what}: another connection holds it exclusively ({text})")
    return _mismatch(text, what, entity)


def refused(error: aiormq.ChannelClosed, doing: str, permission: str) -> BrokerRefused:
    return BrokerRefused(
        f"the broker refused to {doing}: {described(error)}. Give the user the {permission} permission "
        "(rabbitmqctl set_permissions)"
    )


def is_to_blame(error: aiormq.ChannelClosed, exchange: str, size: int, reply_to: str | None) -> bool | None:
    """Whether a publish of this shape closed the channel; None when the broker does not say."""
    text = described(error)
    if match := _TOO_LARGE.search(text):
        return size > int(match["limit"])
    if match := _MISSING_EXCHANGE.search(text) or _REFUSED_EXCHANGE.search(text):
        return exchange == match["name"]
    if "fast reply consumer" in text:
        return reply_to == DIRECT_REPLY_TO
    return None


def publish_error(error: aiormq.ChannelClosed, exchange: str, size: int) -> BrokerError:
    """Why the publish that is to blame for a closed channel was not taken."""
    text = described(error)
    if match := _TOO_LARGE.search(text):
        return too_large(size, int(match["limit"]))
    if isinstance(error, aiormq.ChannelAccessRefused):
        return refused(error, f"publish to exchange {exchange!r}", "write")
    if isinstance(error, aiormq.ChannelNotFoundEntity):
        return PublishFailed(f"there is no exchange {exchange!r}: {text}. Declare it first, or start a worker: it does")
    return PublishFailed(f"the broker did not take a message for exchange {exchange!r}: {text}")


def too_large(size: int, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"expected a message of at most {limit} bytes, found {size}. Send the large tensors by reference, or raise "
        "max_message_size in rabbitmq.conf and the limit here"
    )


def is_phantom(cancelled: asyncio.CancelledError) -> bool:
    """True for the CancelledError that aiormq raises for a lost connection: nobody asked us to stop."""
    del cancelled  # it says nothing; whether somebody asked is known to the task
    task = asyncio.current_task()
    return task is not None and task.cancelling() == 0


def ended(reason: BrokerUnavailable | None) -> BrokerUnavailable:
    """A fresh error for each caller, so that tracebacks do not pile up on one."""
    return BrokerUnavailable(str(reason) if reason is not None else "the broker session is closed")


def _mismatch(text: str, what: str, entity: Exchange | Queue | Binding) -> TopologyMismatch:
    ours: Mapping[str, object] = {} if isinstance(entity, Binding) else _declared(entity)
    match = _INEQUIVALENT.search(text)
    if match is None:
        return TopologyMismatch(f"the broker cannot have {what} with {ours}: {text}")
    return TopologyMismatch(
        f"{what} exists with other arguments: the broker has {match['argument']} = {_plain(match['theirs'])}, we "
        f"declare {match['argument']} = {_plain(match['ours'])} (all of ours: {ours}). Delete it on the broker if its "
        "messages may go, or start with the settings it was made with"
    )


def _plain(value: str) -> str:
    return value.partition(" of type ")[0].strip("'")


def _named(entity: Exchange | Queue | Binding) -> str:
    if isinstance(entity, Binding):
        kind = "exchange" if entity.to_exchange else "queue"
        return f"binding {entity.source!r} -> {kind} {entity.destination!r} by key {entity.routing_key!r}"
    return f"{type(entity).__name__.lower()} {entity.name!r}"


def _declared(entity: Exchange | Queue) -> Mapping[str, object]:
    if isinstance(entity, Exchange):
        fields = {"type": entity.type, "durable": entity.durable, "auto_delete": entity.auto_delete}
        return {**fields, "internal": entity.internal, **entity.arguments}
    fields = {"durable": entity.durable, "exclusive": entity.exclusive, "auto_delete": entity.auto_delete}
    return {**fields, **entity.arguments}
