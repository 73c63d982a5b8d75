"""Hints go to the worker that is readiest for them, by consumer priority at a real broker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qworker import Client, ModelUnavailable
from qworker.broker.base import Properties
from qworker.broker.reference.session import AioPikaConnector
from qworker.errors import LoadFailed
from qworker.policy.placement import FULL, MOST_ROOMS, NOT_READY
from qworker.wire.topology import BACKLOG, COLD, REASON_HEADER, lane_queue
from tests.support.waiting import wait_until
from tests.worker.conftest import SIZE
from tests.worker.doubles import MIB, BackendDouble, Running, is_hot

X = np.ones((2, 3), np.float32)


async def test_a_cold_model_goes_where_there_is_room(
    running: Running, amqp_url: str, client: Client, identities: Path
) -> None:
    """One worker is full, the other one empty: all that is called then is loaded by that one, and nobody leaves."""
    async with running(amqp_url, identities, memory=SIZE + MIB) as full:
        await client.call("a", {"x": X})
        await wait_until(lambda: full._intake.place == FULL)
        async with running(amqp_url, identities, memory=4 * SIZE) as roomy:
            await wait_until(lambda: roomy._intake.place == FULL + MOST_ROOMS)
            for model in ("b", "c", "d"):
                await client.call(model, {"x": X})
            assert (full.counters.loads, full.counters.evictions, roomy.counters.loads) == (1, 0, 3)
            await wait_until(lambda: roomy._intake.place == FULL + 1, what="it has room for one more, and says so")


async def test_a_full_worker_still_takes_what_nobody_else_does(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """The readier one has no slot free: the hint goes to the other one at once."""
    backend.loading.shut()
    async with running(amqp_url, identities, memory=SIZE + MIB) as full:
        await client.call("a", {"x": X})
        await wait_until(lambda: full._intake.place == FULL)
        async with running(amqp_url, identities, backend, memory=4 * SIZE, max_concurrent_loads=1) as roomy:
            await wait_until(lambda: roomy._intake.place > FULL)
            await client.publish("b", {"x": X})
            await wait_until(lambda: backend.loading.passing)
            await client.call("c", {"x": X})
            assert (full.counters.loads, full.counters.evictions) == (2, 1)
            backend.loading.open()
            await wait_until(lambda: is_hot(roomy, "b"))


async def test_changing_its_place_loses_no_hint(
    running: Running, amqp_url: str, client: Client, identities: Path
) -> None:
    """Each load moves it; what is called meanwhile is served by its hints alone: no sweep is there to help."""
    async with running(amqp_url, identities, memory=4 * SIZE, sweep_interval=3600) as worker:
        for model in ("a", "b", "c", "d"):
            await client.call(model, {"x": X}, timeout=20)
            await wait_until(lambda: worker._intake.place == worker._readiness())
        assert worker.counters.loads == 4
        assert worker._intake.place == FULL
        worker._tenants["a"].leave()
        await wait_until(lambda: worker._intake.place > FULL)
        await client.call("a", {"x": X}, timeout=20)
        assert worker.counters.loads == 5


async def test_a_worker_whose_loads_fail_draws_no_hints(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """It has more room than any, since nothing stays: the others come before it."""
    backend.load_error = LoadFailed("no driver, say")
    async with running(amqp_url, identities, backend, memory=4 * SIZE) as broken:
        with pytest.raises(ModelUnavailable):
            await client.call("a", {"x": X})
        await wait_until(lambda: broken._intake.place == NOT_READY)
        async with running(amqp_url, identities, memory=SIZE + MIB) as sound:
            await wait_until(lambda: sound._intake.place > NOT_READY)
            for model in ("b", "c"):
                await client.call(model, {"x": X})
            assert sound.counters.loads == 2


async def test_placement_can_be_left_to_chance(
    running: Running, amqp_url: str, client: Client, identities: Path
) -> None:
    """All have the same place then."""
    async with running(amqp_url, identities, placement="random") as worker:
        await client.call("a", {"x": X})
        assert worker._intake.place == 0


async def test_a_wish_for_a_replica_reaches_the_less_ready(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """The readiest worker serves the model already and sends the wish on: it must not come back to it for ever."""
    options: dict[str, Any] = {"max_replicas": 2, "prefetch": 1, "replica_backlog": 3600, "sweep_interval": 3600}
    async with (
        running(amqp_url, identities, backend, memory=8 * SIZE, **options) as roomy,
        await AioPikaConnector(amqp_url).connect() as session,
    ):
        await client.call("a", {"x": X})
        other = BackendDouble()
        async with running(amqp_url, identities, other, memory=2 * SIZE + MIB, **options) as small:
            await wait_until(lambda: small._intake.place > roomy._intake.place == roomy._readiness())
            await client.call("b", {"x": X})
            await wait_until(lambda: FULL < small._intake.place < roomy._intake.place)
            backend.running.shut()
            other.running.shut()
            async with asyncio.TaskGroup() as calls:
                for _ in range(60):
                    calls.create_task(client.call("a", {"x": X}, timeout=60))

                async def some_wait() -> bool:
                    depth = await session.depth(lane_queue("jobs", "a"))
                    return depth is not None and depth.ready >= 3

                await wait_until(some_wait)
                await session.publish(COLD, "a", b"", Properties(headers={REASON_HEADER: BACKLOG}))
                await wait_until(lambda: is_hot(small, "a"), 20)
                backend.open_all()
                other.open_all()
