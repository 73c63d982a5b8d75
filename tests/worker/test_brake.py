"""The brake in a worker: models that push each other out are named and held, and jobs come in runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import structlog

from qworker import Client
from qworker.policy.eviction import Gdsf
from qworker.policy.residency import Residency
from qworker.telemetry.counters import Counters
from qworker.worker.brake import Brake
from qworker.worker.hot_zone import HotZone
from tests.support.waiting import wait_until
from tests.worker.conftest import SIZE
from tests.worker.doubles import BackendDouble, Running, is_hot, step

X = np.ones((2, 3), np.float32)


async def test_models_that_push_each_other_out_are_named_and_held() -> None:
    """Reloads that fill the slots trip it; the event names the models and the budget that would end it."""
    now = [0.0]
    zone = HotZone(Residency(10, Gdsf()), lambda: now[0], Counters())
    counters = Counters()
    brake = Brake(zone, counters, lambda: now[0], slots=1, group_window=0.0, max_hold=30.0)
    assert brake.window == 0.0
    with structlog.testing.capture_logs() as logs:
        for turn in range(40):
            model, other = ("a", "b") if turn % 2 else ("b", "a")
            brake.evicted(other)
            now[0] += 5.0
            brake.tick([model])
            brake.loaded(model, 5.0, 8)
    (told,) = [line for line in logs if line["event"] == "zone.thrashing"]
    assert told["models"] == ["a", "b"]
    assert told["working_set"] == 16
    assert brake.window > 0.0
    assert brake.state()["models"] == ["a", "b"]
    assert counters.brakes == 1
    with structlog.testing.capture_logs() as logs:
        for _ in range(200):
            now[0] += 5.0
            brake.tick([])
    assert [line["event"] for line in logs] == ["zone.calm"]
    assert brake.window == 0.0
    assert brake.state()["models"] == []


async def test_jobs_come_in_runs(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """With a window, the jobs of a cold model that needs another's bytes wait for each other, and load once."""
    settings = {"memory": SIZE, "group_window": 1.5, "max_concurrent_loads": 1}
    async with running(amqp_url, identities, backend, **settings) as worker:
        await client.call("a", {"x": X}, timeout=20)
        assert worker.counters.claims_held == 0  # there was room
        async with asyncio.TaskGroup() as calls:
            first = calls.create_task(client.call("b", {"x": X}, timeout=20))
            await wait_until(lambda: worker.counters.claims_held == 1)
            assert step(worker, "b") == "load"
            for _ in range(5):
                await client.call("a", {"x": X}, timeout=20)
                assert not first.done()
                calls.create_task(client.call("b", {"x": X}, timeout=20))
        assert worker.counters.loads == 2
        assert is_hot(worker, "b")


async def test_a_held_claim_goes_on_when_bytes_come_free(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """Nobody is held for the sake of being held: room is room."""
    async with running(amqp_url, identities, backend, memory=SIZE, group_window=600) as worker:
        await client.call("a", {"x": X}, timeout=20)
        async with asyncio.TaskGroup() as calls:
            waiting = calls.create_task(client.call("b", {"x": X}, timeout=30))
            await wait_until(lambda: worker.counters.claims_held == 1)
            worker._tenants["a"]._go(forced=True)
            await waiting
        assert worker.counters.loads == 2


async def test_a_held_claim_ends_with_its_worker(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """A stop does not wait for the window; the job is there for the next worker."""
    async with running(amqp_url, identities, backend, memory=SIZE, group_window=600) as worker:
        await client.call("a", {"x": X}, timeout=20)
        async with asyncio.TaskGroup() as calls:
            waiting = calls.create_task(client.call("b", {"x": X}, timeout=60))
            await wait_until(lambda: worker.counters.claims_held == 1)
            worker.stop()
            await wait_until(lambda: not worker.state()["claims"], 20)
            async with running(amqp_url, identities, backend):
                await waiting
