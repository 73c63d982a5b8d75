"""Watches the workers and the broker while the demo runs, from outside.

The claim under test: a model that is not hot has no consumer. The broker tells the consumers of each
queue, the workers tell what is hot on them; a consumer counts against us only when no worker held the model
both before and after the broker was asked, so that a load or an eviction in between is not taken for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import aiormq
import psutil
from aiormq.abc import AbstractChannel

from ops.demo_app.platform import WorkerProcess
from qworker.wire.topology import lane_queue

INTERVAL = 0.25


@dataclass(slots=True)
class Seen:
    """What was seen so far. Owner: ``Watch``."""

    samples: int = 0
    max_consumers_of_cold_models: int = 0
    consumers_of_cold_models: dict[str, int] = field(default_factory=dict[str, int])
    peak_rss: int = 0
    peak_ledger: int = 0
    budget: int = 0
    loads: int = 0
    evictions: int = 0


class Watch:
    """Samples every quarter of a second while entered; ``last_look`` takes the final figures."""

    def __init__(self, broker_url: str, workers: Sequence[WorkerProcess], models: Sequence[str]) -> None:
        self._broker_url = broker_url
        self._workers = workers
        self._models = models
        self.seen = Seen()

    async def run(self) -> None:
        """Sample until cancelled."""
        connection = await aiormq.connect(self._broker_url)
        try:
            channel = await connection.channel()
            async with aiohttp.ClientSession() as http:
                while True:
                    await self._sample(http, channel)
                    await asyncio.sleep(INTERVAL)
        finally:
            await connection.close()

    async def held(self) -> set[str]:
        """The models that are on some worker now, in whatever state."""
        async with aiohttp.ClientSession() as http:
            return _held(await self._states(http))

    async def last_look(self) -> Seen:
        async with aiohttp.ClientSession() as http:
            self._note(await self._states(http))
        return self.seen

    async def _sample(self, http: aiohttp.ClientSession, channel: AbstractChannel) -> None:
        before = await self._states(http)
        consumers: dict[str, int] = {}
        for model in self._models:
            ok = await channel.queue_declare(lane_queue("jobs", model), passive=True)
            consumers[model] = ok.consumer_count or 0
        after = await self._states(http)
        self._note(after)
        held = _held(before) | _held(after)
        cold = {model: count for model, count in consumers.items() if count and model not in held}
        self.seen.samples += 1
        for model, count in cold.items():
            self.seen.consumers_of_cold_models[model] = count
        self.seen.max_consumers_of_cold_models = max(self.seen.max_consumers_of_cold_models, *cold.values(), 0)

    async def _states(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = []
        for worker in self._workers:
            worker.check()
            async with http.get(worker.state_url) as response:
                states.append(await response.json())
        return states

    def _note(self, states: Sequence[dict[str, Any]]) -> None:
        seen = self.seen
        for worker, state in zip(self._workers, states, strict=True):
            seen.peak_rss = max(seen.peak_rss, psutil.Process(worker.process.pid).memory_info().rss)
            seen.peak_ledger = max(seen.peak_ledger, state["ledger"]["peak"])
            seen.budget = max(seen.budget, state["ledger"]["budget"])
        seen.loads = sum(state["counters"]["loads"] for state in states)
        seen.evictions = sum(state["counters"]["evictions"] for state in states)


def _held(states: Sequence[dict[str, Any]]) -> set[str]:
    """The models that a worker has, or whose jobs it answers with failures as they cannot be loaded."""
    rows = {entry["model"] for state in states for entry in state["models"] if entry["state"] != "cold"}
    return rows.union(*(state.get("refusing", ()) for state in states))
