"""Jobs for which there is no memory: a smaller batch, then alone, then an answer that says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from qworker.errors import OutOfMemory
from qworker.wire.messages import Tensor
from tests.support.waiting import wait_until
from tests.worker.answers import requester
from tests.worker.doubles import BackendDouble, EngineDouble, Running


class Crowded(BackendDouble):
    """A device on which a run finds no memory while another one is under way; ``full``: never."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.refused = 0
        self._lock = threading.Lock()
        self._runs = 0

    def enter(self) -> None:
        with self._lock:
            self._runs += 1
            crowded = self.full or self._runs > 1
            self.refused += crowded
        if crowded:
            self.leave()
            raise OutOfMemory("no memory for it")

    def leave(self) -> None:
        with self._lock:
            self._runs -= 1

    def load(self, source: object) -> EngineDouble:
        engine = super().load(source)  # type: ignore[arg-type]
        run = engine.run

        def guarded(inputs: Sequence[Tensor], outputs: Sequence[str] = ()) -> list[Tensor]:
            self.enter()
            try:
                return run(inputs, outputs)
            finally:
                self.leave()

        engine.run = guarded  # type: ignore[method-assign]
        return engine


async def test_a_job_without_memory_runs_alone_and_passes(running: Running, amqp_url: str, identities: Path) -> None:
    """Beside another run it finds none; when that one is settled it does, and its requester never hears of it."""
    backend = Crowded()
    async with running(amqp_url, identities, backend, threads=2) as worker, requester(amqp_url) as asks:
        backend.running.shut()
        await asks.publish("a", "first")
        await wait_until(lambda: backend.running.passing, 20)
        await asks.publish("a", "second")
        await wait_until(lambda: backend.refused == 1, 20)
        await asks.publish("a", "third")
        backend.running.open()
        await wait_until(lambda: len(asks.told) == 3, 20)
        assert set(map(tuple, asks.told.values())) == {("result",)}
        assert worker.counters.jobs_tried_alone == 0, "that it found no memory is no suspicion"


async def test_a_job_that_never_finds_memory_is_told_so(running: Running, amqp_url: str, identities: Path) -> None:
    """After one run alone, as a failure that may be tried again; the next job is served."""
    backend = Crowded()
    backend.full = True
    async with running(amqp_url, identities, backend), requester(amqp_url) as asks:
        await asks.publish("a", "large")
        await wait_until(lambda: asks.told.get("large"), 20)
        assert asks.told["large"] == ["out_of_memory"]
        assert backend.refused == 2
        backend.full = False
        await asks.publish("a", "small")
        await wait_until(lambda: asks.told.get("small") == ["result"], 20)
