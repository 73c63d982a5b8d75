"""A job that the broker has taken out of its queue, as it was there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from msgspec.structs import replace

from qworker.broker.base import Delivery, Properties


class Expired:
    """A delivery from the queue of expired jobs that says where it was before; settling it settles the job."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self.body = delivery.body
        self.routing_key = delivery.routing_key
        self.redelivered = delivery.redelivered
        headers = dict(delivery.properties.headers)
        deaths: object = headers.pop("x-death", None)
        last: object = cast("list[object]", deaths)[0] if isinstance(deaths, list) and deaths else None
        told: Mapping[str, object] = cast("Mapping[str, object]", last) if isinstance(last, dict) else {}
        self.exchange = str(told.get("exchange", delivery.exchange))
        self.queue = str(told.get("queue", delivery.queue))
        self.properties = _without_deaths(delivery.properties, headers)

    async def ack(self) -> None:
        await self._delivery.ack()

    def ack_soon(self) -> bool:
        return self._delivery.ack_soon()

    async def reject(self, *, requeue: bool) -> None:
        await self._delivery.reject(requeue=requeue)

    async def give_back(self) -> None:
        await self._delivery.give_back()


def _without_deaths(asked: Properties, headers: Mapping[str, Any]) -> Properties:
    """The envelope as the publisher made it: a dead letter of the job may be published again, and then counts anew."""
    kept = {name: value for name, value in headers.items() if not name.startswith(("x-first-death-", "x-last-death-"))}
    return replace(asked, expiration_ms=None, headers=kept)
