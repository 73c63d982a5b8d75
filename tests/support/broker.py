"""The broker implementations under test, and short ways to use a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from qworker.broker.base import Connector, Delivery, Properties, Session
from qworker.broker.fast.session import FastConnector
from qworker.broker.reference.session import AioPikaConnector
from qworker.wire.topology import Queue

CONNECTORS: dict[str, Callable[..., Connector]] = {"aio-pika": AioPikaConnector, "fast": FastConnector}
"""Every implementation passes the same suite; each takes the arguments of ``AioPikaConnector``."""


class Connect(Protocol):
    def __call__(self, url: str | None = None, **settings: Any) -> Coroutine[Any, Any, Session]: ...


class Inbox:
    """Collects deliveries: give ``inbox.take`` to ``consume``."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []

    def take(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    @property
    def bodies(self) -> list[bytes]:
        return [delivery.body for delivery in self.deliveries]

    def __len__(self) -> int:
        return len(self.deliveries)


PLAIN = Properties(persistent=True)


def quorum(name: str, **arguments: Any) -> Queue:
    return Queue(name, arguments={"x-queue-type": "quorum", **arguments})


def classic(name: str, **arguments: Any) -> Queue:
    return Queue(name, arguments={"x-queue-type": "classic", **arguments})


async def fill(session: Session, queue: str, *bodies: bytes) -> None:
    """Publish to ``queue`` by name, in order."""
    for body in bodies:
        await session.publish("", queue, body, PLAIN, mandatory=True)


async def ready(session: Session, queue: str) -> int:
    depth = await session.depth(queue)
    assert depth is not None, f"there is no queue {queue}"
    return depth.ready


async def outcome(work: Coroutine[Any, Any, object]) -> BaseException | None:
    """What ``work`` raised, or None."""
    (result,) = await asyncio.gather(work, return_exceptions=True)
    return result if isinstance(result, BaseException) else None
