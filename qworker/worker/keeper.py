"""What a worker learns while it runs, and what it does with it: history, journal, a warm start, planned preloads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import structlog

from qworker.config import Settings
from qworker.errors import BrokerUnavailable
from qworker.telemetry.counters import Counters
from qworker.worker.brake import Brake
from qworker.worker.fleet_history import FleetHistory
from qworker.worker.history_file import HistoryFile
from qworker.worker.hot_zone import HotZone
from qworker.worker.minutes import Minutes
from qworker.worker.preload import Claim, Planned, SpareLoads
from qworker.worker.registry import Registry
from qworker.worker.sessions import Sessions
from qworker.worker.warm_start import WarmStart

log = structlog.get_logger(__name__)

LOOK_SECONDS = 5.0
SAVE_SECONDS = 60.0


class Keeper:
    """Within ``async with``, it takes over the history, looks, and writes. Owned here: the tasks that do so."""

    def __init__(
        self,
        settings: Settings,
        zone: HotZone,
        counters: Counters,
        sessions: Sessions,
        registry: Registry,
        brake: Brake,
        claim: Claim,
        is_loading: Callable[[str], bool | None],
    ) -> None:
        """``claim`` and ``is_loading``: see ``SpareLoads``."""
        self._settings = settings
        self._sessions = sessions
        self._spare = SpareLoads(zone, counters, claim, is_loading)
        self._warm_start = WarmStart(zone, registry, counters, self._spare, share=settings.warm_start)
        self._planned: Planned | None = None
        file = settings.history_file
        if settings.preload == "auto" and file is not None:
            self._planned = Planned(file, zone, registry, brake, self._spare)
        self._brake = brake
        self._file = HistoryFile(file, zone)
        self._minutes = Minutes(counters)
        self._fleet = FleetHistory(zone)
        self._zone = zone
        self._tasks = asyncio.TaskGroup()
        self._chores: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Keeper:
        self._zone.on_loaded, self._zone.on_evicted = self._loaded, self._evicted
        await self._file.restore()
        await self._tasks.__aenter__()
        self._chores = [
            self._tasks.create_task(self._keep(), name="history"),
            self._tasks.create_task(self._preload(), name="preloads"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for chore in self._chores:
            chore.cancel()
        await self._tasks.__aexit__(kind, error, trace)
        self._minutes.look()
        await self._file.save(self._minutes.take(all_of_it=True))

    def _loaded(self, model: str, load_seconds: float, nbytes: int) -> None:
        self._minutes.loaded(model, load_seconds, nbytes)
        self._brake.loaded(model, load_seconds, nbytes)

    def _evicted(self, model: str) -> None:
        self._brake.evicted(model)
        self._spare.evicted(model)

    def preloads(self) -> dict[str, Any]:
        """For ``/state``: the plan in force, and what was loaded before anybody has asked for it."""
        plan = None if self._planned is None else self._planned.state()
        return {"plan": plan, "waiting": self._spare.waiting()}

    async def _keep(self) -> None:
        while True:
            for _ in range(round(SAVE_SECONDS / LOOK_SECONDS)):
                await asyncio.sleep(LOOK_SECONDS)
                self._brake.tick(self._minutes.look())
                self._spare.look()
            rows = self._minutes.take()
            await self._file.save(rows)
            await self._fleet.publish(self._sessions.open, rows)

    async def _preload(self) -> None:
        if self._settings.fleet_history:
            await self._replay()
        if self._settings.warm_start and await self._sessions.current() is not None:
            await self._warm_start.run()
        if self._planned is not None and await self._sessions.current() is not None:
            await self._planned.run()

    async def _replay(self) -> None:
        """Hear what the fleet knows, once: on the next session, when one ends meanwhile."""
        while (session := await self._sessions.current()) is not None:
            try:
                await self._fleet.replay(session)
            except BrokerUnavailable as error:
                log.debug("chore.ended", reason=str(error))
                await session.wait_closed()
            else:
                return
