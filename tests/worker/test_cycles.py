"""Models that go hot and cold again and again while their jobs wait: it costs the jobs nothing but time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qworker.wire.topology import BATCH
from qworker.worker.worker import Worker
from tests.support.waiting import wait_until
from tests.worker.answers import Requester, requester
from tests.worker.conftest import SIZE
from tests.worker.doubles import MIB, BackendDouble, Running, step

CYCLES = 25
LARGE = np.ones((40_000, 3), np.float32)
"""So large that only a few offline jobs are begun, and the others in hand lie as they came."""


async def test_cycles_burn_no_attempt(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """In each of 25 cycles jobs are in hand, in the queue, and on their way while the model leaves."""
    room = {"memory": SIZE + MIB, "max_cold_wait": 0.05, "max_crashes": 2, "max_attempts": 1}
    async with running(amqp_url, identities, backend, **room) as worker, requester(amqp_url) as asks:
        for cycle in range(CYCLES):
            await evict_under_load(worker, asks, backend, cycle)
        counters = worker.counters
        assert all(told == ["result"] for told in asks.told.values()), asks.told
        assert counters.loads >= 2 * CYCLES
        assert counters.evictions >= CYCLES
        assert (counters.redeliveries, counters.jobs_given_back, counters.jobs_tried_alone) == (0, 0, 0)
        assert counters.jobs_dead_lettered == 0


async def test_offline_jobs_that_are_let_go_are_no_suspects(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """They are given back for an online model, come again to a worker that never began them, and run among others."""
    room = {"memory": SIZE + MIB, "max_cold_wait": 0.5}
    async with running(amqp_url, identities, backend, **room) as worker, requester(amqp_url) as asks:
        backend.running.shut()
        jobs = [f"a-{number}" for number in range(16)]
        for job_id in jobs:
            await asks.publish("a", job_id, exchange=BATCH, x=LARGE)
        await wait_until(lambda: backend.running.passing and worker._tenants["a"]._offline._held, 20)
        await asks.publish("b", "b")
        await wait_until(lambda: step(worker, "a") == "cancel", 20)
        backend.running.open()
        await wait_until(lambda: all(job_id in asks.told for job_id in [*jobs, "b"]), 30)
        assert all(told == ["result"] for told in asks.told.values()), asks.told
        assert worker.counters.redeliveries > 0, "nothing was given back"
        assert worker.counters.jobs_tried_alone == 0


async def evict_under_load(worker: Worker, asks: Requester, backend: BackendDouble, cycle: int) -> None:
    backend.running.shut()
    jobs = [f"a-{cycle}-{number}" for number in range(12)]
    for job_id in jobs[:8]:
        await asks.publish("a", job_id)
    await wait_until(lambda: step(worker, "a") == "serve" and backend.running.passing, 20)
    await asks.publish("b", f"b-{cycle}")
    await wait_until(lambda: step(worker, "a") == "cancel", 20)
    for job_id in jobs[8:]:
        await asks.publish("a", job_id)
    backend.running.open()
    await wait_until(lambda: all(job_id in asks.told for job_id in [*jobs, f"b-{cycle}"]), 20, what=f"cycle {cycle}")
