"""The worker's HTTP port: ``/healthz`` (alive), ``/readyz`` (takes jobs), ``/state`` (what is hot and why)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

Readiness = Callable[[], str | None]
"""None when ready, else why not."""
State = Callable[[], dict[str, Any]]


class HealthServer:
    """Serves the three pages while entered. ``port`` is the bound one (0 asks for a free one)."""

    def __init__(self, host: str, port: int, readiness: Readiness, state: State) -> None:
        self._host = host
        self._wanted_port = port
        self._readiness = readiness
        self._state = state
        self._runner: web.AppRunner | None = None
        self.port = port

    async def __aenter__(self) -> HealthServer:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/state", self._show_state)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._wanted_port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"alive": True})

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._readiness()
        return web.json_response({"ready": reason is None, "reason": reason}, status=200 if reason is None else 503)

    async def _show_state(self, _: web.Request) -> web.Response:
        return web.json_response(self._state())
