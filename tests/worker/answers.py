"""A requester without our client: publishes jobs with ids of its own, and keeps every reply and dead letter."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from qworker.broker.base import Delivery, Properties, Session
from qworker.broker.reference.session import AioPikaConnector
from qworker.wire.codec import decode_reply, encode_job
from qworker.wire.datatypes import tensor
from qworker.wire.messages import MSGPACK, Failure, Job
from qworker.wire.topology import DEADLINE_HEADER, JOBS, PUBLISHED_HEADER
from tests.support.broker import classic

X = np.ones((2, 3), np.float32)


class Requester:
    """``told``: for each job id, the codes of its answers in the order in which they came; "result" for a result."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.told: dict[str, list[str]] = {}
        self.texts: dict[str, str] = {}
        self.came: dict[str, float] = {}

    async def publish(
        self,
        model: str,
        job_id: str,
        *,
        deadline: float | None = None,
        expiration_ms: int | None = None,
        reply_to: str | None = "answers",
        priority: int | None = None,
        exchange: str = JOBS,
        x: NDArray[np.float32] = X,
    ) -> None:
        """Both of ``deadline`` (unix seconds) and ``expiration_ms``, or one, or none."""
        headers = {PUBLISHED_HEADER: int(time.time() * 1000)}
        if deadline is not None:
            headers[DEADLINE_HEADER] = int(deadline * 1000)
        envelope = Properties(
            message_id=job_id,
            correlation_id=job_id,
            reply_to=reply_to,
            content_type=MSGPACK,
            persistent=True,
            priority=priority,
            expiration_ms=expiration_ms,
            headers=headers,
        )
        body = encode_job(Job(job_id, model, (tensor("x", x),)), MSGPACK)
        await self.session.publish(exchange, model, body, envelope, mandatory=True)

    def take(self, delivery: Delivery) -> None:
        answer = decode_reply(delivery.body, delivery.properties.content_type)
        self.told.setdefault(answer.id, []).append(answer.code if isinstance(answer, Failure) else "result")
        self.texts[answer.id] = answer.message if isinstance(answer, Failure) else ""
        self.came[answer.id] = time.time()


@asynccontextmanager
async def requester(url: str) -> AsyncIterator[Requester]:
    """Beside a worker that has declared the topology; its reply queue is ``answers``."""
    async with await AioPikaConnector(url).connect() as session:
        asks = Requester(session)
        await session.declare(classic("answers"))
        await session.consume("answers", asks.take, prefetch=2000)  # none is acked
        yield asks
