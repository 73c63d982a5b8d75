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
"""What workers tell each other, by topic: see ``claimed`` and ``ANSWERED``. Nobody else may publish here."""
CONTROL = "qworker.control"
"""Orders to workers, by topic: see ``order_key``."""
FALLEN = "qworker.fallen"
"""Where jobs go that the broker itself takes out of a queue: those whose time is over to ``EXPIRED``, the others to
``DEAD``."""
EXPIRED = "qworker.expired"
"""Jobs whose per-message expiration passed while they waited, for a worker to answer."""

HISTORY = "qworker.history"
"""A stream of what each model did, minute by minute, on each worker: see ``HISTORY_NEWS``."""
HISTORY_NEWS = "history"
"""The routing key, in ``EVENTS``, of the minutes that are over on a worker: rows of a journal, as text/csv."""

DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"

_OURS, _FOR_REPLIES = "qworker.", ("qworker.replies.", "qworker.collected.", "qworker.score.")


def takes_replies(queue: str) -> bool:
    """Whether an answer may be sent to ``queue``. Not to those that run the platform: a worker may write to them, and
    whoever publishes a job would write there by its hand."""
    return not queue.startswith(_OURS) or queue.startswith(_FOR_REPLIES)


PUBLISHED_HEADER = "x-published"
"""Unix milliseconds at which a job was published (AMQP's own timestamp has whole seconds only)."""
DEADLINE_HEADER = "x-deadline"
"""Unix milliseconds after which a job must not run any more."""

BLOBS_HEADER = "x-qworker-blobs"
"""On a job: where the requester can read tensors that travel beside their message. Without it, none of its
result does."""

REASON_HEADER = "x-qworker-reason"
"""On a hint: why it was published. Absent on a copy of a job."""
CAUSE_HEADER = "x-qworker-cause"
"""On a dead letter: why, as a code. Beside it: ``-reason`` in words, ``-model``, ``-exchange`` (of the lane),
``-worker``, ``-at`` (unix milliseconds), ``-attempts`` (runs), ``-deliveries`` (as the broker counts them),
``-requeued`` (how often it was published again), and ``-fingerprint`` where the payload is on record."""
BACKLOG = "backlog"
"""The reason that asks for one more replica."""
HOPS_HEADER = "x-qworker-hops"
"""On such a hint: how many workers that serve the model already have sent it on."""

DELIVERY_LIMIT = 100
"""Deliveries without a settle after which a quorum queue dead-letters by itself: the last resort. It counts jobs
that were merely in hand beside one that ended its worker, so it is far above what workers allow such a one."""
PEEK_LIMIT = 1_000_000
"""The same of ``DEAD``: each look at the dead letters delivers all of them, and none may be lost by looking."""

HINT_TTL_MS = 300_000
HINTS_MAX = 1_000
HINTS_MAX_BYTES = 64 << 20
DEAD_TTL_MS = 14 * 86_400_000
STRIKES_MS = 86_400_000
MOST_STRIKES = 64
HISTORY_AGE = "14D"
HISTORY_BYTES = 256 << 20
HISTORY_SEGMENT = 4 << 20


@dataclass(frozen=True, slots=True)
class Exchange:
    name: str
    type: Literal["topic", "fanout", "direct", "headers"]
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
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


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
        # The kind of exchange that tells by what the broker writes into a message why it fell out of its queue.
        Exchange(FALLEN, "headers", internal=True, arguments={"alternate-exchange": DEAD}),
        Queue(EXPIRED, arguments={"x-queue-type": queue_type}),
        Binding(FALLEN, EXPIRED, "", arguments={"x-match": "all-with-x", "x-first-death-reason": "expired"}),
        Exchange(UNROUTABLE, "fanout", internal=True),
        Queue(UNROUTABLE, arguments=_falling(queue_type)),
        Binding(UNROUTABLE, UNROUTABLE, ""),
        Exchange(JOBS, "topic", arguments={"alternate-exchange": UNROUTABLE}),
        Exchange(BATCH, "topic", arguments={"alternate-exchange": UNROUTABLE}),
        Exchange(RESULTS, "topic"),
        Exchange(DEAD, "topic"),
        Queue(DEAD, arguments=_dead_arguments(queue_type)),
        Binding(DEAD, DEAD, "#"),
        Exchange(EVENTS, "topic"),
        Exchange(CONTROL, "topic"),
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


def _dead_arguments(queue_type: QueueType) -> dict[str, Any]:
    limit = {"x-delivery-limit": PEEK_LIMIT} if queue_type == "quorum" else {}
    return {"x-queue-type": queue_type, "x-message-ttl": DEAD_TTL_MS, **limit}


def history_stream() -> tuple[Entity, ...]:
    """The fleet's history. Not every broker has streams: declare it apart from the rest."""
    arguments: dict[str, Any] = {
        "x-queue-type": "stream",
        "x-max-age": HISTORY_AGE,
        "x-max-length-bytes": HISTORY_BYTES,
        "x-stream-max-segment-size-bytes": HISTORY_SEGMENT,  # what is too old goes by whole segments
    }
    return Queue(HISTORY, arguments=arguments), Binding(EVENTS, HISTORY, HISTORY_NEWS)


def strike_queue(mark: str) -> Queue:
    """What is on record of one payload, or one build of a model, that may end workers: a message a strike.

    It is there only while something is on record, and goes when nobody has asked for it for a day.
    """
    return Queue(
        f"qworker.strikes.{mark}",
        arguments={"x-queue-type": "classic", "x-expires": STRIKES_MS, "x-max-length": MOST_STRIKES},
    )


def lane_topology(lane: Lane, model: str, queue_type: QueueType) -> tuple[Entity, ...]:
    """One model's queue in one lane, always bound: the durable copy of a job never moves."""
    exchange = JOBS if lane == "jobs" else BATCH
    arguments = _falling(queue_type)
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


def _falling(queue_type: QueueType) -> dict[str, Any]:
    """Arguments of a queue from which the broker takes what expired or came back too often to ``FALLEN``.

    Unless told otherwise RabbitMQ loses what is on that way when it stops, three of four in a measurement. Only quorum
    queues can be told, and only together with an overflow that rejects.
    """
    arguments: dict[str, Any] = {"x-queue-type": queue_type, "x-dead-letter-exchange": FALLEN}
    if queue_type == "quorum":
        arguments |= {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    return arguments


def claimed(model: str) -> str:
    """The routing key, in ``EVENTS``, of the news that a worker has claimed ``model``; ``#`` stands for all."""
    return f"claimed.{model}"


def batch_opened(model: str) -> str:
    """The routing key, in ``EVENTS``, of the news that ``model`` has a batch queue now; ``#`` stands for all."""
    return f"batch.{model}"


def alive(worker: str) -> str:
    """The routing key, in ``EVENTS``, of the word that a worker says every few seconds."""
    return f"alive.{worker}"


def snapshot_of(worker: str) -> str:
    """The routing key, in ``EVENTS``, of a worker's state, told each second while somebody watches."""
    return f"snapshot.{worker}"


def watch_queue(instance: str) -> str:
    """The exclusive queue of somebody who watches."""
    return f"qworker.watch.{instance}"


SWEEPING = "sweeping"
"""The routing key, in ``EVENTS``, by which a worker asks whether there is a sweeper: then the message has a queue."""

BATCH_NEWS = b"batch"
"""The body of that news when the model has a batch queue; else it is empty."""


ANSWERED = "answered"
"""The routing key, in ``EVENTS``, of the news which jobs a worker had answered when it lost its connection."""

ALL_WORKERS = "all"


def order_key(verb: str, worker: str = ALL_WORKERS) -> str:
    """The routing key, in ``CONTROL``, of an order to one worker or to all; ``*`` stands for every verb.

    The verb is in the key so that the broker's topic permissions can tell who may give which order.
    """
    return f"{verb}.{worker}"


def control_queue(instance: str) -> str:
    """The exclusive queue of one running worker, for orders and for news from other workers."""
    return f"qworker.control.{instance}"


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
