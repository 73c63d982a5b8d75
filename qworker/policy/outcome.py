"""What becomes of a delivery, once it is known how the job went.

Every delivery ends in exactly one of three ways: answered and acked, dead-lettered with a cause, or
given back. ``worker/settle.py`` carries an :class:`Outcome` out in the order of its fields: send and
wait for the confirm, dead-letter and wait for the confirm, settle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from qworker.errors import (
    BrokerError,
    PoisonJob,
    QworkerError,
    UnknownModel,
    Unroutable,
)

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

    ``attempts`` counts this run as well. Call it again with the BrokerError
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


# --- how often a job is tried ----------------------------------------------------------------------


class FailureClass(StrEnum):
    """How a run ended that left no outcome; each has a budget of its own.

    All else has an outcome at once: bad input and a time that is over are answered and never tried again, a model
    that does not load is ``policy.backoff``'s, and too little memory leads to a run alone (``worker.detours``).
    """

    CRASH = "crash"
    """The process ended while the job ran alone."""
    DEVICE_FAULT = "device_fault"
    """The device gave up while the job ran alone, and the process had to end."""
    UNSENT = "unsent"
    """It ran, and its answer did not leave."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Attempts of one job, the first one included, by what went wrong with them."""

    crash: int = 3
    device_fault: int = 5
    """More than for a crash: a device fails by itself more often than a process ends by itself."""
    unsent: int = 5

    def of(self, kind: FailureClass) -> int:
        return int(getattr(self, kind.value))


@dataclass(frozen=True, slots=True)
class Strikes:
    """What is on record of a payload: how often it began to run alone, and how those runs ended of which we know.

    A run that ended well takes its strike back. What is left has ended its process without a word.
    """

    begun: int = 0
    device_faults: int = 0
    unsent: int = 0

    @property
    def crashes(self) -> int:
        return max(0, self.begun - self.device_faults - self.unsent)

    @property
    def attempts(self) -> int:
        """Runs so far. The first one, beside others, is not on record."""
        return 1 + self.begun


def used_up(strikes: Strikes, budgets: Budgets) -> FailureClass | None:
    """The class whose budget a redelivered job has used up, so that it must not run again; else None.

    The run that made it a suspect counts as one of each class: nobody knows which of the jobs that were in
    hand then was at fault, so it never convicts by itself.
    """
    for kind, times in (
        (FailureClass.CRASH, strikes.crashes),
        (FailureClass.DEVICE_FAULT, strikes.device_faults),
        (FailureClass.UNSENT, strikes.unsent),
    ):
        if times and times + 1 >= budgets.of(kind):
            return kind
    return None


def deliveries(headers: Mapping[str, object], redelivered: bool) -> int:
    """How often the broker says that it has delivered this job, this delivery included; at least 1. To be shown only.

    It is no count of attempts: a job that is merely in hand when a worker dies is counted too, classic queues
    only flag a redelivery, and what a give-back counts as differs between RabbitMQ's versions.
    ``x-delivery-count`` is what quorum queues count: deliveries that ended in a crash or a reject.
    ``x-acquired-count`` also counts jobs that were given back in good order, so it is second choice.

    A first delivery counts as one whatever its headers say: the broker leaves a publisher's headers alone
    until it has a count of its own, and a dead letter that is published again still bears its old ones.
    """
    if not redelivered:
        return 1
    for name in ("x-delivery-count", "x-acquired-count"):
        earlier = headers.get(name)
        if isinstance(earlier, int) and not isinstance(earlier, bool):
            return 1 + max(0, earlier)
    return 2
