"""The broker contract: all that the rest of the package knows of AMQP.

A :class:`Session` is the unit that lives and dies together: its leases, consumers and publishes. When
any connection beneath it fails, the whole session ends (``wait_closed`` returns), the broker takes back
what was unsettled, and the owner opens a new one and re-syncs from its own table. Nothing is restored
behind the owner's back.

Every implementation passes ``tests/contract/test_broker.py`` against a real RabbitMQ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from qworker.errors import BrokerError, BrokerUnavailable, PublishFailed
from qworker.wire.topology import Binding, Exchange, Queue


class MessageTooLarge(PublishFailed):
    """The message is larger than the broker, or our own limit, lets through. The same one never will."""

    code = "message_too_large"
    retryable = False


class ConsumerLost(BrokerError):
    """The broker ended one subscription and left the session alone: its queue was deleted, or a delivery was held
    for longer than the broker's ``consumer_timeout``. What was delivered to it is in the queue again."""

    code = "consumer_lost"
    retryable = True

    @property
    def ack_timeout(self) -> float | None:
        """Seconds that the broker lets a delivery be held, where it says that this was the reason."""
        told = _ACK_TIMEOUT.search(str(self))
        return int(told[1]) / 1000 if told else None


_ACK_TIMEOUT: Final = re.compile(r"delivery acknowledgement .*?timed out.*?(\d+) ms")


class Properties(msgspec.Struct, frozen=True):  # two of them a job: a frozen dataclass takes five times as long
    """The AMQP properties that form a message's envelope. Times are unix milliseconds."""

    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    content_type: str | None = None
    expiration_ms: int | None = None
    timestamp_ms: int | None = None
    priority: int | None = None
    persistent: bool = False
    headers: Mapping[str, Any] = {}


Body = bytes | Sequence[bytes | memoryview]
"""A message's body, or the parts that make it up: large tensors leave from where they lie. Nobody may write to
parts until the publish is over."""

Told = Callable[[BrokerError | None], None]
"""Called on the event loop, once, with what became of a publish: None when it is confirmed. Must not raise."""


class Delivery(Protocol):
    """A message in our hands, to be settled exactly once (``worker/settle.py``).

    Settling on a session that has ended, on a closed consumer, or a second time is harmless and does
    nothing: the broker has the message back, or has its answer.
    """

    @property
    def body(self) -> bytes: ...
    @property
    def properties(self) -> Properties: ...
    @property
    def exchange(self) -> str: ...
    @property
    def routing_key(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def redelivered(self) -> bool: ...

    async def ack(self) -> None:
        """Tell the broker that the message is done."""
        ...

    def ack_soon(self) -> bool:
        """``ack`` without waiting, where the implementation can; False: nothing was done, ``ack`` it."""
        ...

    async def reject(self, *, requeue: bool) -> None:
        """Give the message back (basic.reject: it counts as an attempt), or dead-letter it."""
        ...

    async def give_back(self) -> None:
        """Give back what was never tried (basic.nack): from RabbitMQ 4.3 on it does not count as an attempt."""
        ...


OnDelivery = Callable[[Delivery], None]
"""Called on the event loop for each delivery; must not block and must not raise."""

OnLost = Callable[[ConsumerLost], None]
"""Called on the event loop, once, when the broker ends a subscription; must not block and must not raise."""


class Consumer(Protocol):
    """A running subscription to one queue, on a channel of its own."""

    @property
    def queue(self) -> str: ...

    async def cancel(self) -> None:
        """Stop deliveries; when this returns, none comes any more. What was delivered can still be
        settled. Cancelling twice, or after the session ended, does nothing."""
        ...

    async def close(self) -> None:
        """Close the channel. Whatever was delivered and not settled goes back to the queue."""
        ...


OnReply = Callable[[bytes, Properties], None]
"""Called on the event loop with the body and envelope of each direct reply; must not block or raise."""


class RpcChannel(Protocol):
    """A channel that publishes requests and receives their direct replies.

    The broker accepts ``reply_to=amq.rabbitmq.reply-to`` only on the channel that consumes that name,
    hence one object for both. Direct replies are at most once: those on their way are lost with the
    channel, and RabbitMQ 4.0.5 loses the first one after it boots.
    """

    def send(self, exchange: str, routing_key: str, body: Body, properties: Properties, told: Told) -> bool:
        """``publish`` without waiting; see ``Session.send``."""
        ...

    async def publish(self, exchange: str, routing_key: str, body: Body, properties: Properties) -> None:
        """Publish with ``reply_to`` set to direct reply-to, and wait for the broker's confirm.

        Safe to cancel. Raises like ``Session.publish``; too large a message ends this channel and with
        it the session.
        """
        ...

    async def close(self) -> None:
        """Close the channel. Idempotent; replies that come later are dropped by the broker."""
        ...


@dataclass(frozen=True, slots=True)
class Depth:
    """What a passive declare tells of a queue: ready messages (not the unacked ones) and consumers."""

    ready: int
    consumers: int


@dataclass(frozen=True, slots=True)
class Outbox:
    """Publishes that are not confirmed: on their way, or waiting until the broker takes them."""

    messages: int = 0
    nbytes: int = 0


class Session(Protocol):
    """One life of a connection to the broker."""

    # --- life ---
    async def __aenter__(self) -> Session: ...
    async def __aexit__(self, *exc: object) -> None: ...

    async def wait_closed(self) -> BrokerUnavailable | None:
        """Wait until the session ends; None when it was closed by us, else why."""
        ...

    @property
    def is_open(self) -> bool: ...

    @property
    def blocked(self) -> bool:
        """True while the broker refuses publishes (memory or disk alarm).

        The broker tells a connection only once it publishes: of an alarm that came since, an idle one knows nothing.
        """
        ...

    def outbox(self) -> Outbox:
        """What was published and is not confirmed, now. For people: it counts them one by one."""
        ...

    # --- control: RPCs on a control channel, safe to cancel, safe to run at once ---
    async def declare(self, *entities: Exchange | Queue | Binding) -> None:
        """Declare in the given order; idempotent.

        Raises TopologyMismatch naming both sets of arguments when an entity exists with others.
        """
        ...

    async def depth(self, queue: str) -> Depth | None:
        """Ready and consumer counts right now, None when there is no such queue. Never cached.

        On an exclusive queue of another connection: Depth(0, 0).
        """
        ...

    async def depths(self, queues: Sequence[str]) -> list[Depth | None]:
        """``depth`` of many, pipelined over a few channels of their own (for sweeps)."""
        ...

    async def lease(self, queue: str) -> bool:
        """Take the exclusive queue ``queue``, held until ``release`` or the end of the session.

        False when another connection holds it. True when it is ours (also when it was already).
        """
        ...

    async def release(self, queue: str) -> None:
        """Delete a leased queue; what is bound to it alone goes too. Absent is fine."""
        ...

    async def delete_queue(self, queue: str) -> None:
        """Delete a queue with all that is in it. Absent is fine."""
        ...

    # --- data ---
    async def consume(
        self,
        queue: str,
        on_delivery: OnDelivery,
        *,
        prefetch: int,
        priority: int = 0,
        on_lost: OnLost | None = None,
        stream_from: str | None = None,
    ) -> Consumer:
        """Subscribe on a channel of its own with its own prefetch.

        When the broker ends the subscription (queue deleted, consumer timeout), its channel is closed and
        ``on_lost`` is told; without one the session ends, and the owner re-syncs.
        ``stream_from``: where to begin in a stream, which keeps what was acked: ``first``, ``last`` or ``next``.
        Raises BrokerError(queue missing) when there is no such queue.
        """
        ...

    async def publish(
        self,
        exchange: str,
        routing_key: str,
        body: Body,
        properties: Properties,
        *,
        mandatory: bool = False,
    ) -> None:
        """Publish and wait for the broker's confirm.

        While the broker is blocked this waits (back-pressure); otherwise a confirm that does not come
        within the session's ``confirm_timeout`` ends the session. Raises Unroutable when ``mandatory``
        and nothing is bound, MessageTooLarge, PublishFailed when nacked or when there is no such exchange,
        BrokerUnavailable when the session ends first.

        At least once: when another publish breaks the channel beneath, or the caller is cancelled, the
        message may have arrived. A direct reply is never mandatory: old brokers deliver *and* return it.
        """
        ...

    def send(self, exchange: str, routing_key: str, body: Body, properties: Properties, told: Told) -> bool:
        """``publish`` of what is not mandatory, without a coroutine: ``told`` hears what becomes of it.

        False when it cannot leave at once, or is not well-formed, or the implementation has no such way:
        nothing was done, ``publish`` it. After an error other than BrokerUnavailable it may be published again.
        """
        ...

    async def open_rpc(self, on_reply: OnReply) -> RpcChannel:
        """Open a channel for requests with direct replies. When it breaks, the session ends."""
        ...


class Connector(Protocol):
    """Opens sessions. Holds the address and credentials, and nothing else."""

    async def connect(self) -> Session:
        """Open a session (its ``__aenter__`` has run).

        Raises BrokerUnavailable when trying again may help, BrokerRefused when it will not.
        """
        ...
