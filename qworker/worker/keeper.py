"""What a worker learns while it runs, and what it does with it: history, journal, and a warm start."""

from __future__ import annotations

import asyncio
from types import TracebackType

import structlog

from qworker.config import Settings
from qworker.errors import BrokerUnavailable
from qworker.telemetry.counters import Counters
from qworker.worker.brake import Brake
from qworker.worker.fleet_history import FleetHistory
from qworker.worker.history_file import HistoryFile
from qworker.worker.hot_zone import HotZone
from qworker.worker.minutes import Minutes
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
        warm_start: WarmStart,
        brake: Brake,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._warm_start = warm_start
        self._brake = brake
        self._file = HistoryFile(settings.history_file, zone)
        self._minutes = Minutes(counters)
        self._fleet = FleetHistory(zone)
        self._zone = zone
        self._tasks = asyncio.TaskGroup()
        self._chores: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Keeper:
        self._zone.on_loaded, self._zone.on_evicted = self._loaded, self._brake.evicted
        await self._file.restore()
        await self._tasks.__aenter__()
        self._chores = [
            self._tasks.create_task(self._keep(), name="history"),
            self._tasks.create_task(self._start_warm(), name="warm start"),
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

    async def _keep(self) -> None:
        while True:
            for _ in range(round(SAVE_SECONDS / LOOK_SECONDS)):
                await asyncio.sleep(LOOK_SECONDS)
                self._brake.tick(self._minutes.look())
            rows = self._minutes.take()
            await self._file.save(rows)
            await self._fleet.publish(self._sessions.open, rows)

    async def _start_warm(self) -> None:
        if self._settings.fleet_history:
            await self._replay()
        if self._settings.warm_start and await self._sessions.current() is not None:
            await self._warm_start.run()

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
