"""What becomes of a delivery, once it is known how the job went.

Every delivery ends in exactly one of three ways: answered and acked, dead-lettered with a cause, or
given back. ``worker/settle.py`` carries an :class:`Outcome` out in the order of its fields: send and
wait for the confirm, dead-letter and wait for the confirm, settle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from qworker.errors import BrokerError, PoisonJob, QworkerError, UnknownModel, Unroutable

REPLY_GONE = "reply_gone"
"""Dead-letter cause: the job named a reply queue that does not exist any more."""


class ReplyTo(StrEnum):
    """Where the requester wants the answer."""

    NONE = "none"
    DIRECT = "direct"
    """The requester's own channel. At most once, and a requester that left cannot be noticed."""
    QUEUE = "queue"

    @classmethod
    def of(cls, reply_to: str | None) -> ReplyTo:
        """The kind of a ``reply_to`` property."""
        if not reply_to:
            return cls.NONE
        return cls.DIRECT if reply_to.startswith("amq.rabbitmq.reply-to") else cls.QUEUE


class Send(StrEnum):
    NOTHING = "nothing"
    RESULT = "result"
    FAILURE = "failure"


class To(StrEnum):
    NOBODY = "nobody"
    REPLY = "reply"
    """To the job's ``reply_to``, by the default exchange."""
    RESULTS = "results"
    """To the results exchange, by model id, for whoever binds a queue."""


class Settle(StrEnum):
    ACK = "ack"
    GIVE_BACK = "give_back"
    """basic.reject with requeue: it counts as an attempt on every RabbitMQ version."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to do with one delivery, in this order."""

    send: Send = Send.NOTHING
    to: To = To.NOBODY
    mandatory: bool = False
    """Ask the broker to say when nobody gets it. Never for direct replies: old brokers then deliver the
    reply and return it as well."""
    dead_letter: str | None = None
    """The cause (a wire code) to dead-letter the job with, by publishing it; the job is acked after."""
    settle: Settle = Settle.ACK


def decide(
    error: QworkerError | type[QworkerError] | None,
    *,
    attempts: int,
    max_attempts: int,
    reply: ReplyTo,
) -> Outcome:
    """The outcome of a job that ended with ``error``, or with a result when that is None.

    ``attempts`` counts this delivery as well (see :func:`attempts`). Call it again with the BrokerError
    when sending the answer failed.
    """
    if error is None:
        return of_result(reply)
    kind = error if isinstance(error, type) else type(error)
    if issubclass(kind, BrokerError):
        return of_unsent(kind, attempts=attempts, max_attempts=max_attempts)
    return of_failure(error, reply)


def of_result(reply: ReplyTo) -> Outcome:
    """A result goes to who asked, else to the results exchange."""
    to = To.RESULTS if reply is ReplyTo.NONE else To.REPLY
    return Outcome(Send.RESULT, to, mandatory=reply is ReplyTo.QUEUE)


def of_failure(error: QworkerError | type[QworkerError], reply: ReplyTo) -> Outcome:
    """A failure goes to who asked, else it is the cause of a dead letter."""
    code = error.code  # of the instance where there is one: JobFailed carries its own
    if reply is ReplyTo.NONE:
        return Outcome(dead_letter=code)
    kind = error if isinstance(error, type) else type(error)
    # A person must see these even where the requester was told: a model that nobody registered, and
    # a job that seems to end workers.
    also = code if issubclass(kind, UnknownModel | PoisonJob) else None
    return Outcome(Send.FAILURE, To.REPLY, mandatory=reply is ReplyTo.QUEUE, dead_letter=also)


def of_unsent(error: BrokerError | type[BrokerError], *, attempts: int, max_attempts: int) -> Outcome:
    """The answer did not leave. Nobody there to take it: dead-letter. Else run the job again, but not
    for ever."""
    kind = error if isinstance(error, type) else type(error)
    if issubclass(kind, Unroutable):
        return Outcome(dead_letter=REPLY_GONE)
    if attempts >= max_attempts:
        return Outcome(dead_letter=kind.code)
    return Outcome(settle=Settle.GIVE_BACK)


def on_arrival(*, attempts: int, max_attempts: int) -> type[PoisonJob] | None:
    """PoisonJob when a delivery has been tried too often already and must not run again, else None."""
    return PoisonJob if attempts > max_attempts else None


def attempts(headers: Mapping[str, object], redelivered: bool) -> int:
    """How often this job has been delivered, this delivery included; at least 1.

    ``x-delivery-count`` is what quorum queues count: deliveries that ended in a crash or a reject.
    ``x-acquired-count`` also counts jobs that were given back in good order, so it is second choice.
    Classic queues only flag a redelivery, so more than 2 is never seen there.

    A first delivery counts as one whatever its headers say: the broker leaves a publisher's headers alone
    until it has a count of its own, and a dead letter that is published again still bears its old ones.
    """
    if not redelivered:
        return 1
    for name in ("x-delivery-count", "x-acquired-count"):
        earlier = headers.get(name)
        if isinstance(earlier, int) and not isinstance(earlier, bool):
            return 1 + max(0, earlier)
    return 2 if redelivered else 1
