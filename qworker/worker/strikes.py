"""The broker's record of what may end workers: a small queue for each payload, or build of a model, under suspicion.

A strike is written *before* the run (or the load) that may end the process, and taken back after it. So what is
left on record has ended a process, whoever looks, on whichever machine, and however often workers restarted.
Nothing is written for what was never suspected.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import structlog

from qworker.broker.base import Delivery, Properties, Session
from qworker.errors import BrokerError, JobError
from qworker.policy.outcome import Strikes
from qworker.wire.datatypes import BYTES
from qworker.wire.messages import Job, Tensor
from qworker.wire.reference import Referenced
from qworker.wire.topology import MOST_STRIKES, strike_queue

log = structlog.get_logger(__name__)

KIND, WORKER, AT, WHAT = "x-qworker-strike", "x-qworker-worker", "x-qworker-at", "x-qworker-model"
READ_SECONDS = 2.0
"""Somebody else may be reading the same record: then what is counted must do."""


class Strike(StrEnum):
    BEGUN = "begun"
    DEVICE_FAULT = "device_fault"
    UNSENT = "unsent"
    GIVEN_BACK = "given_back"
    """Told to stop before it was done: takes back one that was begun."""


@dataclass(frozen=True, slots=True)
class Record:
    """Strikes, and the last of them: by which worker, at which unix seconds."""

    strikes: Strikes
    worker: str = ""
    at: float = 0.0


CLEAN = Record(Strikes())
_NOBODY: Mapping[str, Any] = {}


class StrikeBook:
    """Reads and writes records as the worker ``name``. Holds nothing but the names of those it has to take back."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._owed: set[str] = set()

    async def read(self, session: Session, mark: str) -> Record:
        """What is on record. One short call where nothing is. Raises BrokerUnavailable."""
        depth = await session.depth(strike_queue(mark).name)
        if depth is None or not depth.ready:
            return CLEAN
        found = await _peek(session, strike_queue(mark).name, depth.ready)
        kinds = [each.get(KIND) for each in found]
        last = max(found, key=lambda each: _number(each.get(AT)), default=_NOBODY)
        notes = sum(kind in (Strike.DEVICE_FAULT, Strike.UNSENT, Strike.GIVEN_BACK) for kind in kinds)
        strikes = Strikes(
            # one that could not be read counts as what nearly all are
            begun=max(depth.ready - notes - kinds.count(Strike.GIVEN_BACK), 0),
            device_faults=kinds.count(Strike.DEVICE_FAULT),
            unsent=kinds.count(Strike.UNSENT),
        )
        return Record(strikes, str(last.get(WORKER, "")), _number(last.get(AT)) / 1000)

    async def begin(self, session: Session, mark: str, model: str) -> None:
        """What may end this process begins, once this returns. Raises BrokerError."""
        await session.declare(strike_queue(mark))
        await session.publish("", strike_queue(mark).name, b"", self._strike(Strike.BEGUN, model), mandatory=True)

    def note(self, session: Session, mark: str, model: str, kind: Strike) -> None:
        """How the run ended that was begun last, where that is known. Not waited for: the process may be ending."""
        session.send("", strike_queue(mark).name, b"", self._strike(kind, model), _noted)

    async def forget(self, session: Session, mark: str) -> None:
        """Take back what is on record. On a session that has ended: on the next one."""
        self._owed.add(mark)
        await self.pay(session)

    async def pay(self, session: Session) -> None:
        """Take back what a lost session kept us from taking back. Never raises for the broker's trouble."""
        for mark in list(self._owed):
            try:
                await session.delete_queue(strike_queue(mark).name)
            except BrokerError as error:
                log.info("strikes.kept", mark=mark, reason=str(error))
                return
            self._owed.discard(mark)

    def _strike(self, kind: Strike, model: str) -> Properties:
        now = int(time.time() * 1000)
        return Properties(persistent=True, headers={KIND: kind.value, WORKER: self._name, AT: now, WHAT: model})


def mark_of_job(model: str, build: str, body: bytes, decode: Callable[[], Job]) -> str:
    """The mark of what ``decode`` makes of ``body``: a job, or only a part of it, or nothing."""
    try:
        return fingerprint(model, build, decode().inputs)
    except Referenced as found:  # some of it lies elsewhere, and is known by its digests
        return fingerprint(model, build, found.tensors)
    except JobError:
        return mark_of(model, build, body)


def fingerprint(model: str, build: str, inputs: Sequence[Tensor]) -> str:
    """The same for the same inputs to the same build of a model, whoever publishes them and under whichever id.

    A tensor that travels beside its message has another one than the same values within it.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((model, build)).encode())
    for each in sorted(inputs, key=lambda one: one.name):
        digest.update(repr((each.name, each.datatype, each.array.shape)).encode())
        if each.ref is not None:
            digest.update(each.ref.sha256.encode())
        elif each.datatype == BYTES:
            for text in each.array.ravel():
                digest.update(len(text).to_bytes(8, "little"))
                digest.update(text)
        else:
            digest.update(each.array.tobytes())
    return digest.hexdigest()


def mark_of(*parts: str | bytes) -> str:
    """The mark of anything else that can be told by these parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


async def _peek(session: Session, queue: str, count: int) -> list[Mapping[str, Any]]:
    """The headers of the first ``count`` messages, which stay where they are."""
    found: list[Mapping[str, Any]] = []
    enough = asyncio.Event()

    def take(delivery: Delivery) -> None:
        found.append(delivery.properties.headers)
        if len(found) >= count:
            enough.set()

    consumer = await session.consume(queue, take, prefetch=MOST_STRIKES)
    try:
        await asyncio.wait_for(enough.wait(), READ_SECONDS)
    except TimeoutError:
        log.info("strikes.not_read", queue=queue, expected=count, found=len(found))
    finally:
        await consumer.close()
    return found


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _noted(error: BrokerError | None) -> None:
    if error is not None:
        log.info("strikes.not_noted", reason=str(error))
