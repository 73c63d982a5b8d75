"""Dramatiq: it keeps no results in RabbitMQ, so the answer is an actor on the client's queue; no middleware."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import dramatiq
import msgpack
from dramatiq.brokers.rabbitmq import RabbitmqBroker


class MsgpackEncoder(dramatiq.Encoder):
    """Bytes stay bytes."""

    def encode(self, data: Any) -> bytes:
        return msgpack.packb(data)

    def decode(self, data: bytes) -> Any:
        return msgpack.unpackb(data)


dramatiq.set_encoder(MsgpackEncoder())
broker = RabbitmqBroker(url=os.environ["BENCH_URL"] + "?heartbeat=0", middleware=[])
dramatiq.set_broker(broker)

answered: list[Callable[[int, bytes], None]] = []
"""The client puts what takes its answers here."""


@dramatiq.actor(queue_name="bench.dramatiq-answers")
def answer(number: int, body: bytes) -> None:
    answered[0](number, body)


@dramatiq.actor(queue_name="bench.dramatiq")
def echo(number: int, body: bytes) -> None:
    answer.send(number, body)
