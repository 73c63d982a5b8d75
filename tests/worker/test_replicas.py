"""Replicas: a wish for one reaches somebody who can fulfil it, and takes nobody's bytes who is called."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import numpy as np

from qworker import Client
from qworker.broker.base import Properties, Session
from qworker.broker.reference.session import AioPikaConnector
from qworker.policy.eviction import Gdsf
from qworker.policy.residency import Residency
from qworker.telemetry.counters import Counters
from qworker.wire.topology import BACKLOG, COLD, REASON_HEADER, lane_queue
from qworker.worker.hot_zone import REPLICA, HotZone
from tests.support.waiting import wait_until
from tests.worker.doubles import BackendDouble, Running, is_hot

X = np.ones((2, 3), np.float32)


class Tenant:
    """Goes when it is told to."""

    def __init__(self, zone: HotZone, model: str) -> None:
        self._zone, self._model = zone, model

    def evicted(self, *, forced: bool, reason: str) -> None:
        asyncio.get_running_loop().call_soon(self._zone.gone, self._model)


async def test_a_replica_takes_no_bytes_of_who_is_called() -> None:
    """Free bytes, or those of a model that nobody has called for long; else it is refused at once."""
    now = [100.0]
    zone = HotZone(Residency(10, Gdsf(), min_residency=0, max_cold_wait=30), lambda: now[0], Counters())
    for model in ("called", "forgotten"):
        zone.enter(model, Tenant(zone, model))
        assert await zone.room(model, 5, within=1)
        zone.loaded(model, 0.1)
        zone.used(model)
    assert not await asyncio.wait_for(zone.room("a", 5, within=3_600, urgency=REPLICA), 5)
    assert zone.held == 10
    now[0] += 60
    zone.used("called")
    assert await asyncio.wait_for(zone.room("a", 5, within=3_600, urgency=REPLICA), 5)
    assert {row.model for row in zone.rows()} == {"called", "a"}


async def test_one_wish_is_enough(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """Whoever serves the model sends it on, so that it does not matter to whom the broker gives it first."""
    other = BackendDouble()
    async with (
        running(amqp_url, identities, backend, max_replicas=2, prefetch=1, replica_backlog=3600) as one,
        running(amqp_url, identities, other, max_replicas=2, prefetch=1, replica_backlog=3600) as two,
        await AioPikaConnector(amqp_url).connect() as session,
    ):
        await client.call("a", {"x": X}, timeout=20)
        backend.running.shut()
        other.running.shut()
        async with asyncio.TaskGroup() as calls:
            for _ in range(60):
                calls.create_task(client.call("a", {"x": X}, timeout=60))
            await wait_until(partial(_has_ready, session, 3), what="some jobs wait")
            await session.publish(COLD, "a", b"", Properties(headers={REASON_HEADER: BACKLOG}))
            await wait_until(lambda: is_hot(one, "a") and is_hot(two, "a"), 20)
            backend.open_all()
            other.open_all()


async def _has_ready(session: Session, count: int) -> bool:
    depth = await session.depth(lane_queue("jobs", "a"))
    return depth is not None and depth.ready >= count


async def test_a_wish_that_nobody_can_fulfil_ends(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """One worker alone does not send it to itself for ever."""
    async with (
        running(amqp_url, identities, backend, max_replicas=2) as worker,
        await AioPikaConnector(amqp_url).connect() as session,
    ):
        await client.call("a", {"x": X}, timeout=20)
        before = worker.counters.hints
        await session.publish(COLD, "a", b"", Properties(headers={REASON_HEADER: BACKLOG}))
        await wait_until(lambda: worker.counters.hints == before + 9, 20)
        await client.call("a", {"x": X}, timeout=20)
        assert worker.counters.hints == before + 9
