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

MAX_ORDER_BYTES = 64 << 10
MAX_JOBS = 1_000
"""Jobs that one order may cancel."""


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
