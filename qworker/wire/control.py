"""Orders to workers and their replies, to bytes and back.

``schemas/control.json`` is the normative description. An order is small, and decoding refuses what is none with
InvalidInput; what the arguments of a verb must be is checked by whoever carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from qworker.errors import InvalidInput, QworkerError
from qworker.wire.codec import body_kind
from qworker.wire.messages import JSON, MSGPACK
from qworker.wire.names import check_model_id

MAX_ORDER_BYTES = 64 << 10
MAX_JOBS = 1_000
"""Jobs that one order may cancel."""
LONGEST_WATCH = 60.0
LONGEST_HOLD = 366 * 86_400.0
MAX_REASON = 500


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker is to do, and on what."""

    verb: str
    arguments: dict[str, Any] = {}


class OrderReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker says to an order: ``result``, or why it did not carry it out."""

    worker: str
    verb: str
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class Cancel(msgspec.Struct, frozen=True):
    """The arguments of the verb ``cancel``: ids of jobs, and the model where all of them are of one."""

    jobs: list[str]
    model: str | None = None


class OfModel(msgspec.Struct, frozen=True):
    """The arguments of pin, unpin, preload, evict, quarantine, release and why."""

    model: str
    seconds: float | None = None
    """For how long a pin or a quarantine holds."""
    hours: str | None = None
    """Hours of each day, as ``08:00-18:30`` (UTC), in which a pin holds."""
    reason: str = ""
    """What the jobs of a model in quarantine are told."""


class Watch(msgspec.Struct, frozen=True):
    """The arguments of ``watch``: for how long snapshots are wanted."""

    seconds: float = 10.0


def encode_order(order: Order, content_type: str = MSGPACK) -> bytes:
    return msgspec.json.encode(order) if content_type == JSON else msgspec.msgpack.encode(order)


def decode_order(body: bytes, content_type: str | None) -> Order:
    """The order in ``body``. Raises InvalidInput."""
    if len(body) > MAX_ORDER_BYTES:
        raise InvalidInput(f"an order has at most {MAX_ORDER_BYTES} bytes, this one has {len(body)}: send several")
    decode = msgspec.json.decode if body_kind(content_type, body) == JSON else msgspec.msgpack.decode
    try:
        return decode(body, type=Order)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput("expected an order, a map with verb and arguments; see schemas/control.json") from exc


def encode_order_reply(worker: str, verb: str, outcome: Mapping[str, Any] | QworkerError, content_type: str) -> bytes:
    """``outcome``: the result, or the error that kept the worker from it."""
    if isinstance(outcome, QworkerError):
        told = {"code": outcome.code, "message": str(outcome), "retryable": outcome.retryable}
        reply = OrderReply(worker, verb, error=told)
    else:
        reply = OrderReply(worker, verb, result=dict(outcome))
    return msgspec.json.encode(reply) if content_type == JSON else msgspec.msgpack.encode(reply)


def decode_order_reply(body: bytes, content_type: str | None) -> OrderReply:
    """Raises InvalidInput."""
    decode = msgspec.json.decode if body_kind(content_type, body) == JSON else msgspec.msgpack.decode
    try:
        return decode(body, type=OrderReply)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput("expected the reply to an order; see schemas/control.json") from exc


def cancel_order(job_ids: list[str], model: str | None = None) -> Order:
    arguments: dict[str, Any] = {"jobs": job_ids}
    return Order("cancel", arguments if model is None else {**arguments, "model": model})


def read_cancel(arguments: Mapping[str, Any]) -> Cancel:
    """The arguments of ``cancel``. Raises InvalidInput."""
    try:
        cancel = msgspec.convert(arguments, Cancel)
    except msgspec.ValidationError as exc:
        raise InvalidInput(f"cancel takes jobs, a list of ids, and model, an id: {exc}") from exc
    if len(cancel.jobs) > MAX_JOBS:
        raise InvalidInput(f"an order cancels at most {MAX_JOBS} jobs, this one {len(cancel.jobs)}: send several")
    return cancel


def read_of_model(verb: str, arguments: Mapping[str, Any]) -> OfModel:
    """The arguments of an order about one model. Raises InvalidInput."""
    try:
        asked = msgspec.convert(arguments, OfModel)
    except msgspec.ValidationError as exc:
        raise InvalidInput(f"{verb} takes model, an id, and perhaps seconds, hours and reason: {exc}") from exc
    check_model_id(asked.model)
    if asked.seconds is not None and not 0 < asked.seconds <= LONGEST_HOLD:
        raise InvalidInput(f"expected seconds above 0 and at most {LONGEST_HOLD:.0f} (a year), found {asked.seconds}")
    if len(asked.reason) > MAX_REASON:
        raise InvalidInput(f"a reason has at most {MAX_REASON} characters, this one has {len(asked.reason)}")
    return asked


def read_watch(arguments: Mapping[str, Any]) -> float:
    """For how many seconds somebody watches. Raises InvalidInput."""
    try:
        seconds = msgspec.convert(arguments, Watch).seconds
    except msgspec.ValidationError as exc:
        raise InvalidInput(f"watch takes seconds, a number: {exc}") from exc
    if not 0 < seconds <= LONGEST_WATCH:
        raise InvalidInput(f"expected seconds above 0 and at most {LONGEST_WATCH:.0f}, found {seconds}")
    return seconds


def encode_snapshot(snapshot: Mapping[str, Any]) -> bytes:
    return msgspec.msgpack.encode(snapshot)


def decode_snapshot(body: bytes) -> dict[str, Any]:
    """Raises InvalidInput."""
    try:
        return msgspec.msgpack.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput("expected a worker's snapshot, a MessagePack map; see schemas/snapshot.json") from exc
