"""Settling: the one place where a delivery ends.

The order is the promise: the reply (or the dead letter) is confirmed by the broker *before* the delivery
is acked. A crash between the two doubles a reply, which its correlation id gives away; it never loses one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog

from qworker.broker.base import Body, Delivery, Properties, Session
from qworker.errors import (
    BrokerError,
    BrokerUnavailable,
    InvalidInput,
    JobError,
    PublishFailed,
    QworkerError,
    ResultTooLarge,
    Unroutable,
)
from qworker.policy.outcome import Budgets, Outcome, ReplyTo, Send, Settle, To, decide, deliveries, of_result
from qworker.telemetry.counters import Counters
from qworker.telemetry.log import trace_of
from qworker.wire.codec import encode_failure, reply_kind, result_body
from qworker.wire.messages import JSON, Failure, Result
from qworker.wire.topology import CAUSE_HEADER, DEAD, RESULTS, takes_replies
from qworker.worker.answered import Answered
from qworker.worker.apart import Apart
from qworker.worker.firewall import Firewall
from qworker.worker.progress import Teller
from qworker.worker.reply_check import ReplyQueues

log = structlog.get_logger(__name__)

BIG_JSON_RESULT = 64 << 10
_RESULT_OUTCOMES = {reply: of_result(reply) for reply in ReplyTo}


class Settler:
    """Settles the deliveries of one worker. Holds no state but its counters."""

    def __init__(
        self, worker: str, max_attempts: int, max_body: int, counters: Counters, budgets: Budgets | None = None
    ) -> None:
        self.replies = ReplyQueues(time.monotonic, counters)
        self.firewall = Firewall(worker, budgets or Budgets(unsent=max_attempts), counters)
        self.answered = Answered(time.monotonic)
        self.progress = Teller(worker, counters)
        self.apart: Apart | None = None
        """For tensors that travel beside their messages, where there is a store for them."""
        self._worker = worker
        self._max_attempts = max_attempts
        self._max_body = max_body
        self._counters = counters

    def count_repeated(self, model: str, asked: Properties) -> None:
        """A job came again that is answered already."""
        self._counters.jobs_repeated += 1
        log.info("job.repeated", model=model, job_id=asked.message_id)

    async def settle(
        self, session: Session, delivery: Delivery, model: str, job_id: str, verdict: Result | QworkerError
    ) -> None:
        """Answer and settle, once. When the session ends first, the broker has the job back: no harm done."""
        try:
            error = await self._try(session, delivery, model, job_id, verdict)
            if error is not None:
                # The answer did not leave. What to do about that is a decision of its own.
                error = await self._try(session, delivery, model, job_id, error)
            if error is not None:
                self.firewall.unsent(delivery)
                await delivery.reject(requeue=True)
        except BrokerUnavailable as lost:
            self._lost(model, delivery, lost)

    def settle_soon(
        self,
        session: Session,
        delivery: Delivery,
        model: str,
        verdict: Result | JobError,
        ended: Callable[[bool], None],
    ) -> bool:
        """``settle`` of a result without waiting, in the same order. False when it is none, or has to wait.

        Later ``ended`` is told whether it is settled; it was not where the answer did not leave: ``settle`` it.
        """
        asked = delivery.properties
        if not isinstance(verdict, Result):
            return False
        reply_to = ReplyTo.of(asked.reply_to)
        outcome = _RESULT_OUTCOMES[reply_to]
        content_type = reply_kind(asked.content_type, delivery.body)
        if outcome.mandatory or content_type == JSON:
            return False  # a return takes its time, and so does text

        measures = self._counters.measures
        sent, answered = time.perf_counter(), self.answered.add

        def told(error: BrokerError | None) -> None:
            measures.unconfirmed -= 1
            if error is None:
                measures.publish.observe(time.perf_counter() - sent)
                answered(model, asked)
                ended(delivery.ack_soon())
            elif isinstance(error, BrokerUnavailable):
                self._lost(model, delivery, error)
                ended(True)
            else:
                self._counters.jobs_answered -= 1
                ended(False)

        try:
            body = self._fitting(result_body(verdict, content_type))
        except (ResultTooLarge, InvalidInput):
            return False
        exchange, key = (RESULTS, model) if outcome.to is To.RESULTS else ("", asked.reply_to or "")
        envelope = _envelope(verdict.id, asked, content_type, reply_to)
        if not session.send(exchange, key, body, envelope, told):
            return False
        measures.unconfirmed += 1
        self._counters.jobs_answered += 1
        return True

    async def _try(
        self, session: Session, delivery: Delivery, model: str, job_id: str, verdict: Result | QworkerError
    ) -> QworkerError | None:
        """Carry out what the policy decides; the error when a publish of it was not taken."""
        outcome = self._decide(delivery, verdict)
        try:
            await self._send(session, delivery, model, job_id, verdict, outcome)
            if outcome.dead_letter is not None:
                await self._dead_letter(session, delivery, model, verdict, outcome.dead_letter)
        except (ResultTooLarge, InvalidInput) as error:
            return error
        except PublishFailed as error:
            asked = delivery.properties
            log.warning(
                "reply.failed", model=model, job_id=asked.message_id, reason=str(error), **trace_of(asked.headers)
            )
            return error
        if outcome.settle is Settle.ACK:
            self.answered.add(model, delivery.properties)
            await delivery.ack()
        else:
            self._counters.jobs_given_back += 1
            self.firewall.unsent(delivery)
            await delivery.reject(requeue=True)
        return None

    def _decide(self, delivery: Delivery, verdict: Result | QworkerError) -> Outcome:
        properties = delivery.properties
        return decide(
            None if isinstance(verdict, Result) else verdict,
            attempts=self._attempts(delivery),
            max_attempts=self._max_attempts,
            reply=ReplyTo.of(properties.reply_to),
        )

    def _attempts(self, delivery: Delivery) -> int:
        """How often the job has run, this time included, as far as anybody knows."""
        tried = self.firewall.attempts(delivery)
        return deliveries(delivery.properties.headers, delivery.redelivered) if tried is None else tried

    async def _send(
        self,
        session: Session,
        delivery: Delivery,
        model: str,
        job_id: str,
        verdict: Result | QworkerError,
        outcome: Outcome,
    ) -> None:
        if outcome.send is Send.NOTHING:
            return
        asked = delivery.properties
        content_type = reply_kind(asked.content_type, delivery.body)
        if isinstance(verdict, Result):
            body: Body = await self._encode(verdict, content_type)
            self._counters.jobs_answered += 1
        else:
            body = encode_failure(Failure.of(job_id, model, verdict), content_type)
            self._counters.jobs_failed += 1
            self._counters.measures.failures[verdict.code] += 1
            why, trace = str(verdict), trace_of(asked.headers)
            log.info("job.failed", model=model, job_id=job_id, code=verdict.code, reason=why, **trace)
        exchange, key = (RESULTS, model) if outcome.to is To.RESULTS else ("", asked.reply_to or "")
        if not takes_replies(key):
            raise Unroutable("the job names one of the platform's own queues for its answer: name a reply queue")
        reply = _envelope(job_id, asked, content_type, ReplyTo.of(asked.reply_to))
        sent = time.perf_counter()
        await session.publish(exchange, key, body, reply, mandatory=outcome.mandatory)
        self._counters.measures.publish.observe(time.perf_counter() - sent)

    async def _encode(self, result: Result, content_type: str) -> Body:
        """Raises ResultTooLarge, and InvalidInput for a result that JSON cannot carry."""
        if content_type == JSON and sum(t.array.nbytes for t in result.outputs) > BIG_JSON_RESULT:
            return self._fitting(await asyncio.to_thread(result_body, result, content_type))
        return self._fitting(result_body(result, content_type))

    def _fitting(self, body: Body) -> Body:
        """``body`` itself when it may be sent. Raises ResultTooLarge."""
        size = len(body) if isinstance(body, bytes) else sum(map(len, body))
        if size > self._max_body:
            raise ResultTooLarge(
                f"the result has {size} bytes and a message may have {self._max_body}: "
                "ask for fewer outputs, send less in one job, or raise max_body here and at the broker"
            )
        return body

    def _lost(self, model: str, delivery: Delivery, reason: BrokerUnavailable) -> None:
        """The session ended first: the broker has the job back."""
        self._counters.jobs_given_back += 1
        self.firewall.survived(model, delivery.properties.message_id)
        asked = delivery.properties
        log.info("job.returned", model=model, job_id=asked.message_id, reason=str(reason), **trace_of(asked.headers))

    async def _dead_letter(
        self, session: Session, delivery: Delivery, model: str, verdict: Result | QworkerError, cause: str
    ) -> None:
        """Publish the job as it came to the dead-letter exchange, with why, where, when and how often."""
        self._counters.jobs_dead_lettered += 1
        self._counters.measures.dead_letters[cause] += 1
        asked = delivery.properties
        why = "the reply queue is gone" if isinstance(verdict, Result) else str(verdict)
        trace = trace_of(asked.headers)
        log.warning("job.dead_lettered", model=model, job_id=asked.message_id, cause=cause, reason=why, **trace)
        headers: dict[str, Any] = {
            **asked.headers,
            CAUSE_HEADER: cause,
            "x-qworker-reason": why[:1024],
            "x-qworker-worker": self._worker,
            "x-qworker-model": model,
            "x-qworker-exchange": delivery.exchange,
            "x-qworker-at": int(time.time() * 1000),
            "x-qworker-attempts": self._attempts(delivery),
            "x-qworker-deliveries": deliveries(asked.headers, delivery.redelivered),
            **({"x-qworker-fingerprint": mark} if (mark := self.firewall.mark(delivery)) is not None else {}),
        }
        letter = Properties(
            message_id=asked.message_id,
            correlation_id=asked.correlation_id,
            reply_to=asked.reply_to,
            content_type=asked.content_type,
            timestamp_ms=asked.timestamp_ms,
            priority=asked.priority,
            persistent=True,
            headers=headers,
        )
        await session.publish(DEAD, model, delivery.body, letter)


def _envelope(job_id: str, asked: Properties, content_type: str, reply_to: ReplyTo) -> Properties:
    """The answer's, to a job with the envelope ``asked``."""
    return Properties(
        message_id=job_id or None,
        correlation_id=asked.correlation_id or job_id or None,
        content_type=content_type,
        timestamp_ms=int(time.time() * 1000),
        persistent=reply_to is not ReplyTo.DIRECT,
    )
