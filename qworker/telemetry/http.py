"""The worker's HTTP port: ``/healthz`` (alive), ``/readyz`` (takes jobs), ``/state`` (what is hot and why) and
``/metrics`` (for Prometheus)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from aiohttp import web

Readiness = Callable[[], str | None]
"""None when ready, else why not."""
State = Callable[[], dict[str, Any]]
Page = Callable[[str], Awaitable[tuple[bytes, str]]]
"""The Accept header → a page and its content type."""

CANARY_FRESH: Final = 5.0
"""Seconds for which the canary's last word holds: probes come often, and from several sides."""
CANARY_PATIENCE: Final = 2.0
"""Seconds that a probe waits for the canary. One that takes longer is a reason not to be ready."""


class Canary:
    """A small inference, run when somebody asks whether the worker is ready; ``run`` blocks and says what is wrong.

    Owned here, on the event loop: the run in progress and the last word.
    """

    def __init__(self, run: Callable[[], str | None]) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="canary")
        self._running: asyncio.Future[str | None] | None = None
        self._begun = 0.0
        self._word: str | None = None
        self._fresh_until = 0.0

    async def look(self) -> str | None:
        """None when an inference has just gone well, else why not."""
        loop = asyncio.get_running_loop()
        if self._running is None:
            if loop.time() < self._fresh_until:
                return self._word
            self._begun = loop.time()
            self._running = loop.run_in_executor(self._threads, self._run)
        running = self._running
        done, _ = await asyncio.wait({running}, timeout=CANARY_PATIENCE)
        if not done:
            return f"the canary inference has been running for {loop.time() - self._begun:.1f} s"
        if self._running is running:  # the first of those who waited
            self._running = None
            self._word, self._fresh_until = running.result(), loop.time() + CANARY_FRESH
        return self._word

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class HealthServer:
    """Serves the pages while entered. ``port`` is the bound one (0 asks for a free one)."""

    def __init__(
        self,
        host: str,
        port: int,
        readiness: Readiness,
        state: State,
        *,
        metrics: Page | None = None,
        canary: Canary | None = None,
    ) -> None:
        self._host = host
        self._wanted_port = port
        self._readiness = readiness
        self._state = state
        self._metrics = metrics
        self._canary = canary
        self._runner: web.AppRunner | None = None
        self.port = port

    async def __aenter__(self) -> HealthServer:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/state", self._show_state)
        if self._metrics is not None:
            app.router.add_get("/metrics", self._show_metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._wanted_port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._canary is not None:
            self._canary.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"alive": True, **self._state().get("loop", {})})

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._readiness()
        if reason is None and self._canary is not None:
            reason = await self._canary.look()
        return web.json_response({"ready": reason is None, "reason": reason}, status=200 if reason is None else 503)

    async def _show_state(self, _: web.Request) -> web.Response:
        return web.json_response(self._state())

    async def _show_metrics(self, request: web.Request) -> web.Response:
        assert self._metrics is not None
        body, content_type = await self._metrics(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})
