"""Orders: what this worker is told over the control exchange, and what it hears from the others.

One exclusive queue a session, bound to the orders for all workers, the orders for this one, and the news. A verb is
a coroutine that takes the arguments and returns the reply's result; an error of ours that it raises is the reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import structlog

from qworker.broker.base import Delivery, Properties, Session
from qworker.errors import InvalidInput, PublishFailed, QworkerError
from qworker.wire.codec import reply_kind
from qworker.wire.control import decode_order, encode_order_reply
from qworker.wire.names import shown
from qworker.wire.topology import (
    ANSWERED,
    CONTROL,
    EVENTS,
    Binding,
    alive,
    batch_opened,
    control_queue,
    order_key,
    takes_replies,
)
from qworker.worker.peers import is_pulse

log = structlog.get_logger(__name__)

PREFETCH = 100

Verb = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Carries out one order. Raises InvalidInput for arguments that it does not take, and other QworkerErrors."""


class Control:
    """Carries out orders. ``verbs``: what this worker can be told, by name."""

    def __init__(
        self,
        worker: str,
        verbs: Mapping[str, Verb],
        heard: Callable[[bytes], None],
        met: Callable[[str], None],
        opened: Callable[[str], None],
    ) -> None:
        """``heard`` gets the news of jobs that another worker has answered, ``met`` the keys of others' pulses,
        ``opened`` the models that have a batch queue now."""
        self._worker = worker
        self._verbs = verbs
        self._heard = heard
        self._met = met
        self._opened = opened

    async def run(self, session: Session) -> None:
        """Obey until the session ends (BrokerUnavailable) or it is cancelled."""
        queue = control_queue(uuid4().hex)  # two workers may have been given one name
        await session.lease(queue)
        await session.declare(
            Binding(CONTROL, queue, order_key("*")),
            Binding(CONTROL, queue, order_key("*", self._worker)),
            Binding(EVENTS, queue, ANSWERED),
            Binding(EVENTS, queue, alive("#")),
            Binding(EVENTS, queue, batch_opened("#")),
        )
        async with asyncio.TaskGroup() as tasks:

            def take(delivery: Delivery) -> None:
                tasks.create_task(self._take(session, delivery))

            consumer = await session.consume(queue, take, prefetch=PREFETCH)
            try:
                await session.wait_closed()
            finally:
                await consumer.close()

    async def _take(self, session: Session, delivery: Delivery) -> None:
        if is_pulse(delivery.routing_key):
            self._met(delivery.routing_key)
        elif delivery.exchange == EVENTS and delivery.routing_key == ANSWERED:
            self._heard(delivery.body)
        elif delivery.exchange == EVENTS:
            self._opened(delivery.routing_key.removeprefix(batch_opened("")))
        else:
            await self._obey(session, delivery)
        await delivery.ack()

    async def _obey(self, session: Session, delivery: Delivery) -> None:
        verb, asked = delivery.routing_key.partition(".")[0], delivery.properties
        outcome: Mapping[str, Any] | QworkerError
        try:
            outcome = await self._carry_out(verb, delivery)
        except QworkerError as error:
            log.warning("order.refused", verb=shown(verb), code=error.code, reason=str(error))
            outcome = error
        if not asked.reply_to or not takes_replies(asked.reply_to):
            return
        kind = reply_kind(asked.content_type, delivery.body)
        body = encode_order_reply(self._worker, verb, outcome, kind)
        try:
            await session.publish(
                "", asked.reply_to, body, Properties(asked.message_id, asked.correlation_id, None, kind)
            )
        except PublishFailed as error:
            log.warning("order.unanswered", verb=shown(verb), reason=str(error))

    async def _carry_out(self, verb: str, delivery: Delivery) -> Mapping[str, Any]:
        order = decode_order(delivery.body, delivery.properties.content_type)
        if order.verb != verb:
            # The broker's permissions are given by routing key: they must hold for what is done.
            raise InvalidInput(
                f"the routing key says {shown(verb)}, the order says {shown(order.verb)}: make them equal"
            )
        carry_out = self._verbs.get(verb)
        if carry_out is None:
            raise InvalidInput(f"no verb {shown(verb)}: known are {', '.join(sorted(self._verbs))}")
        return await carry_out(order.arguments)
