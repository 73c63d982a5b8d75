"""Dead letters: what is in ``qworker.dead`` and why, put back into its lane, or dropped.

Looking takes nothing out: letters are held unsettled while one looks, and go back when the look is over. Whoever
puts some back or drops them settles exactly those, each after what answers it is confirmed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec.structs import replace

from qworker.broker.base import Delivery, Properties, Session
from qworker.errors import BrokerError
from qworker.wire.topology import CAUSE_HEADER, DEAD, DEADLINE_HEADER, JOBS, strike_queue

SILENCE_SECONDS = 3.0
"""After which no more letters are expected: some were taken by somebody else meanwhile."""
RETURN_SECONDS = 3.0
RETURN_LOOK = 0.02
PREFETCH = 10_000

_OURS = "x-qworker-"
REQUEUED = "x-qworker-requeued"
_OF_THE_LETTER = frozenset(
    {
        CAUSE_HEADER,
        *(_OURS + name for name in ("reason", "worker", "model", "exchange", "at", "attempts", "deliveries")),
        "x-qworker-fingerprint",
        "x-death",
        "x-delivery-count",
        "x-acquired-count",
    }
)


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter. ``at`` is unix seconds, None where the broker, not a worker, set it aside."""

    job_id: str
    model: str
    cause: str
    reason: str
    worker: str
    at: float | None
    attempts: int
    deliveries: int
    requeued: int
    exchange: str
    reply_to: str
    content_type: str
    nbytes: int
    fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which letters; what is not given is not asked for. Times are unix seconds."""

    causes: frozenset[str] = field(default_factory=frozenset[str])
    models: frozenset[str] = field(default_factory=frozenset[str])
    jobs: frozenset[str] = field(default_factory=frozenset[str])
    before: float | None = None
    after: float | None = None

    @property
    def everything(self) -> bool:
        return not (self.causes or self.models or self.jobs or self.before is not None or self.after is not None)

    def takes(self, letter: Letter) -> bool:
        """Whether ``letter`` is one of them. One without a time is older than any."""
        at = letter.at or 0.0
        return (
            (not self.causes or letter.cause in self.causes)
            and (not self.models or letter.model in self.models)
            and (not self.jobs or letter.job_id in self.jobs)
            and (self.before is None or at < self.before)
            and (self.after is None or at >= self.after)
        )


class DeadLetters:
    """The dead letters behind ``session``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def look(self, wanted: Wanted, *, limit: int | None = None) -> list[Letter]:
        """The letters, oldest first; at most ``limit``."""

        async def leave(_: Delivery, __: Letter) -> None: ...

        return await self._each(wanted, leave, limit, takes=False)

    async def body(self, job_id: str) -> tuple[Letter, bytes] | None:
        """The first letter of that job, and the job as it came; None where there is none."""
        found: list[tuple[Letter, bytes]] = []

        async def keep(delivery: Delivery, letter: Letter) -> None:
            found.append((letter, delivery.body))

        await self._each(Wanted(jobs=frozenset({job_id})), keep, 1, takes=False)
        return found[0] if found else None

    async def requeue(self, wanted: Wanted, *, limit: int | None = None) -> list[Letter]:
        """Publish the jobs again into their lanes, as first deliveries; those that came back.

        What is on record against their payloads is forgotten. A deadline that has passed is taken off.
        """

        async def put_back(delivery: Delivery, letter: Letter) -> None:
            if letter.fingerprint:
                await self._session.delete_queue(strike_queue(letter.fingerprint).name)
            again = _fresh(delivery.properties, letter)
            await self._session.publish(letter.exchange, letter.model, delivery.body, again, mandatory=True)
            await delivery.ack()

        return await self._each(wanted, put_back, limit, takes=True)

    async def drop(self, wanted: Wanted, *, limit: int | None = None) -> list[Letter]:
        """Take them out for good; those that were."""

        async def forget(delivery: Delivery, _: Letter) -> None:
            await delivery.ack()

        return await self._each(wanted, forget, limit, takes=True)

    async def _each(
        self, wanted: Wanted, do: Callable[[Delivery, Letter], Awaitable[None]], limit: int | None, *, takes: bool
    ) -> list[Letter]:
        """``do`` takes the letter out, or leaves it."""
        depth = await self._session.depth(DEAD)
        if depth is None:
            raise BrokerError(f"there is no queue {DEAD} on this broker: start a worker there, or register a model")
        done: list[Letter] = []
        came: asyncio.Queue[Delivery] = asyncio.Queue()
        began = time.time()
        consumer = await self._session.consume(DEAD, came.put_nowait, prefetch=PREFETCH)
        try:
            for _ in range(depth.ready):
                if limit is not None and len(done) >= limit:
                    break
                try:
                    delivery = await asyncio.wait_for(came.get(), SILENCE_SECONDS)
                except TimeoutError:
                    break
                letter = letter_of(delivery)
                if wanted.takes(letter) and (letter.at is None or letter.at <= began):  # not one that came back dead
                    await do(delivery, letter)
                    done.append(letter)
        finally:
            await consumer.close()  # the others go back
        await self._until_back(depth.ready - (len(done) if takes else 0))
        return sorted(done, key=lambda letter: letter.at or 0.0)

    async def _until_back(self, count: int) -> None:
        """The broker takes letters back after it has confirmed the close: who looks next is to find all of them."""
        until = time.monotonic() + RETURN_SECONDS  # somebody else may have taken some
        while (depth := await self._session.depth(DEAD)) is not None and depth.ready < count:
            if time.monotonic() > until:
                return
            await asyncio.sleep(RETURN_LOOK)


def letter_of(delivery: Delivery) -> Letter:
    """What a dead letter says of itself. Headers may be anybody's: what makes no sense is left out."""
    asked = delivery.properties
    headers, death = asked.headers, _death(asked.headers)
    at = headers.get("x-qworker-at")
    return Letter(
        job_id=asked.message_id or "",
        model=_text(headers, "x-qworker-model") or delivery.routing_key,
        cause=_text(headers, CAUSE_HEADER) or str(death.get("reason", "unknown")),
        reason=_text(headers, "x-qworker-reason") or _by_the_broker(death),
        worker=_text(headers, "x-qworker-worker"),
        at=at / 1000 if type(at) is int else None,
        attempts=_count(headers, "x-qworker-attempts"),
        deliveries=_count(headers, "x-qworker-deliveries"),
        requeued=_count(headers, REQUEUED),
        exchange=_text(headers, "x-qworker-exchange") or str(death.get("exchange") or JOBS),
        reply_to=asked.reply_to or "",
        content_type=asked.content_type or "",
        nbytes=len(delivery.body),
        fingerprint=_text(headers, "x-qworker-fingerprint"),
    )


def _fresh(asked: Properties, letter: Letter) -> Properties:
    """The envelope with which the job was first published, but for a count of how often it came back."""
    headers = {
        name: value
        for name, value in asked.headers.items()
        if name not in _OF_THE_LETTER and not name.startswith(("x-first-death-", "x-last-death-"))
    }
    deadline = headers.get(DEADLINE_HEADER)
    if type(deadline) is int and deadline < time.time() * 1000:
        del headers[DEADLINE_HEADER]
    return replace(asked, expiration_ms=None, persistent=True, headers={**headers, REQUEUED: letter.requeued + 1})


def _death(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The broker's own note, where it set the message aside."""
    deaths = headers.get("x-death")
    if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict):
        return deaths[0]  # pyright: ignore[reportUnknownVariableType]  # AMQP's own table
    return {}


def _by_the_broker(death: Mapping[str, Any]) -> str:
    if not death:
        return ""
    return f"set aside by the broker from {death.get('queue', 'a queue')} ({death.get('reason', 'no reason given')})"


def _text(headers: Mapping[str, Any], name: str) -> str:
    found = headers.get(name)
    return found if isinstance(found, str) else ""


def _count(headers: Mapping[str, Any], name: str) -> int:
    found = headers.get(name)
    return found if type(found) is int else 0
