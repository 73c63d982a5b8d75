"""Names and shapes of everything that we declare on the broker. Pure: see ``broker`` for the doing.

Every argument is given explicitly: an argument that is left out means something else on another
RabbitMQ version (a declare without a type is a classic queue, say).

How a cold model wakes: each model's key is also bound from the job exchanges to ``PRESENCE``. While no
worker has bound an exchange of its own there, a copy of each job (a *hint*) falls through to
``ACTIVATION``. The worker that claims the model binds ``hot_exchange``, which hangs on its exclusive
lease queue: when the worker's connection ends, the broker removes both, and hints flow again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

QueueType = Literal["quorum", "classic"]
Lane = Literal["jobs", "batch"]

JOBS = "qworker.jobs"
BATCH = "qworker.batch"
RESULTS = "qworker.results"
DEAD = "qworker.dead"
PRESENCE = "qworker.presence"
COLD = "qworker.cold"
ACTIVATION = "qworker.activation"
UNROUTABLE = "qworker.unroutable"
SWEEPER = "qworker.sweeper"
EVENTS = "qworker.events"
"""What workers tell each other, by topic: see ``claimed``."""

DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"

PUBLISHED_HEADER = "x-published"
"""Unix milliseconds at which a job was published (AMQP's own timestamp has whole seconds only)."""
DEADLINE_HEADER = "x-deadline"
"""Unix milliseconds after which a job must not run any more."""

REASON_HEADER = "x-qworker-reason"
"""On a hint: why it was published. Absent on a copy of a job."""
BACKLOG = "backlog"
"""The reason that asks for one more replica."""

DELIVERY_LIMIT = 20
"""Deliveries without a settle after which a quorum queue dead-letters by itself: the last resort, far
above the worker's own ``max_attempts``."""

HINT_TTL_MS = 300_000
HINTS_MAX = 1_000
HINTS_MAX_BYTES = 64 << 20
DEAD_TTL_MS = 14 * 86_400_000


@dataclass(frozen=True, slots=True)
class Exchange:
    name: str
    type: Literal["topic", "fanout", "direct"]
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Queue:
    name: str
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Binding:
    """Messages of ``source`` with ``routing_key`` also go to ``destination``."""

    source: str
    destination: str
    routing_key: str
    to_exchange: bool = False


Entity = Exchange | Queue | Binding


def lane_queue(lane: Lane, model: str) -> str:
    """The durable queue of a model's jobs in one lane."""
    return f"qworker.{lane}.{model}"


def lease_queue(model: str, slot: int) -> str:
    """The exclusive queue whose holder serves ``model`` in replica slot ``slot``."""
    return f"qworker.lease.{model}.{slot}"


def hot_exchange(model: str, slot: int) -> str:
    """The exchange that swallows the hints of ``model`` while its lease stands."""
    return f"qworker.hot.{model}.{slot}"


def static_topology(queue_type: QueueType) -> tuple[Entity, ...]:
    """What exists once per virtual host, in the order to declare it."""
    return (
        Exchange(UNROUTABLE, "fanout", internal=True),
        Queue(UNROUTABLE, arguments={"x-queue-type": queue_type}),
        Binding(UNROUTABLE, UNROUTABLE, ""),
        Exchange(JOBS, "topic", arguments={"alternate-exchange": UNROUTABLE}),
        Exchange(BATCH, "topic", arguments={"alternate-exchange": UNROUTABLE}),
        Exchange(RESULTS, "topic"),
        Exchange(DEAD, "topic"),
        Queue(DEAD, arguments={"x-queue-type": queue_type, "x-message-ttl": DEAD_TTL_MS}),
        Binding(DEAD, DEAD, "#"),
        Exchange(EVENTS, "topic"),
        Exchange(COLD, "fanout"),
        Exchange(PRESENCE, "topic", internal=True, arguments={"alternate-exchange": COLD}),
        Queue(
            ACTIVATION,
            arguments={
                "x-queue-type": "classic",  # quorum queues keep bodies in memory and need no loss here
                "x-max-length": HINTS_MAX,
                "x-max-length-bytes": HINTS_MAX_BYTES,
                "x-overflow": "drop-head",
                "x-message-ttl": HINT_TTL_MS,
            },
        ),
        Binding(COLD, ACTIVATION, ""),
    )


def lane_topology(lane: Lane, model: str, queue_type: QueueType) -> tuple[Entity, ...]:
    """One model's queue in one lane, always bound: the durable copy of a job never moves."""
    exchange = JOBS if lane == "jobs" else BATCH
    arguments: dict[str, Any] = {"x-queue-type": queue_type, "x-dead-letter-exchange": DEAD}
    if queue_type == "quorum":
        arguments["x-delivery-limit"] = DELIVERY_LIMIT
    else:
        arguments["x-max-priority"] = 9
    queue = lane_queue(lane, model)
    return (
        Queue(queue, arguments=arguments),
        Binding(exchange, queue, model),
        Binding(exchange, PRESENCE, model, to_exchange=True),
    )


def claimed(model: str) -> str:
    """The routing key, in ``EVENTS``, of the news that a worker has claimed ``model``; ``#`` stands for all."""
    return f"claimed.{model}"


BATCH_NEWS = b"batch"
"""The body of that news when the model has a batch queue; else it is empty."""


def announcement(model: str, slot: int) -> tuple[Entity, ...]:
    """What a lease holder declares to say "hot here": hints for ``model`` stop while it stands.

    The lease queue anchors the exchange by a key that never matches. Binding the lease queue itself as
    the sink would save two operations, but on RabbitMQ 4.3 a kill of the holder then nacks publishes in
    flight.
    """
    exchange = hot_exchange(model, slot)
    return (
        Exchange(exchange, "direct", durable=False, auto_delete=True, internal=True),
        Binding(exchange, lease_queue(model, slot), "-"),
        Binding(PRESENCE, exchange, model, to_exchange=True),
    )
