"""What a courier carries: routes, pieces on their way, answers, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qworker.broker.base import Delivery
from qworker.score.mapping import Plan
from qworker.score.parts import Part
from qworker.wire.messages import Failure, Result
from qworker.wire.topology import Queue

REPLY_QUEUE_DAYS = 7
REPLY_PREFETCH = 1000
"""Answers that the broker lets us have before they are acknowledged."""


@dataclass(frozen=True, slots=True)
class Route:
    """One model of a run, and what its jobs say."""

    model: str
    plan: Plan
    version: str | None = None
    """What answers must come from; None: anything."""
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a part's rows, on its way as one job."""

    route: int
    part: Part
    lo: int
    hi: int
    tries: int = 1

    @property
    def key(self) -> str:
        """What its answers are known by, whichever try they are of."""
        return f"{self.route}.{self.part.number}.{self.lo}.{self.hi}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a piece: its result, or why its only row has none."""

    piece: Piece
    result: Result | None
    body: bytes
    failure: Failure | None
    delivery: Delivery | None


@dataclass(slots=True)
class Tally:
    """What one model has cost so far."""

    rows: int = 0
    failed: int = 0
    jobs: int = 0
    retries: int = 0
    run_seconds: float = 0.0
    load_seconds: dict[float, float] = field(default_factory=dict[float, float])
    """By their own value: all jobs that waited for one load tell the same."""


def reply_queue(run: str) -> Queue:
    """The durable queue of a run's answers: it outlives its client, though not for ever."""
    arguments = {"x-queue-type": "quorum", "x-expires": REPLY_QUEUE_DAYS * 86_400_000}
    return Queue(f"qworker.score.{run}", arguments=arguments)


def own_reply_queue(run: str) -> Queue:
    """A queue that goes with its connection, for answers that nobody will resume."""
    return Queue(
        f"qworker.score.{run}", durable=False, exclusive=True, auto_delete=True, arguments={"x-queue-type": "classic"}
    )


def acknowledge(answers: Sequence[Answer]) -> list[Any]:
    """Acknowledge answers that are safe; what could not be done at once is returned to be awaited."""
    return [a.delivery.ack() for a in answers if a.delivery is not None and not a.delivery.ack_soon()]
