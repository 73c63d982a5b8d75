"""The status page: one static page, and what it shows as server-sent events. Read-only without a token."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

from qworker.errors import QworkerError
from qworker.watch.orders import Answers

EVERY: Final = 1.0
ABOUT_MODELS: Final = frozenset({"pin", "unpin", "evict", "preload"})
ABOUT_WORKERS: Final = frozenset({"drain", "resume"})
SHORTEST_TOKEN: Final = 16

Look = Callable[[], dict[str, Any]]
"""The view of the fleet, and ``trouble``: why it is none, or None."""
Give = Callable[[str, str | None, str | None], Awaitable[Answers]]


class StatusPage:
    """Serves the page while entered. ``port`` is the bound one (0 asks for a free one)."""

    def __init__(self, host: str, port: int, look: Look, give: Give, *, token: str | None = None) -> None:
        """``token``: whoever knows it may give orders."""
        self._host = host
        self._wanted_port = port
        self._look = look
        self._give = give
        self._token = token
        self._runner: web.AppRunner | None = None
        self._closing = asyncio.Event()
        self.port = port

    async def __aenter__(self) -> StatusPage:
        html = await asyncio.to_thread(files("qworker.watch").joinpath("page.html").read_text, "utf-8")
        self._page, self._policy = html, _policy(html)
        app = web.Application()
        app.router.add_get("/", self._show)
        app.router.add_get("/view", self._view)
        app.router.add_get("/events", self._events)
        app.router.add_post("/orders", self._order)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._wanted_port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closing.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _show(self, _: web.Request) -> web.Response:
        headers = {
            "Content-Security-Policy": self._policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _view(self, _: web.Request) -> web.Response:
        return web.json_response(self._told())

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """All there is, then each second what is new: notes and points of the past are sent once."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        sent, event = _Sent(), "all"
        while not self._closing.is_set():
            body = json.dumps(sent.rest(self._told()), separators=(",", ":"))
            try:
                await response.write(f"event: {event}\ndata: {body}\n\n".encode())
            except ConnectionResetError:
                break  # the page was closed
            event = "view"
            try:
                async with asyncio.timeout(EVERY):
                    await self._closing.wait()
            except TimeoutError:
                continue
        return response

    async def _order(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._token is None or not hmac.compare_digest(given.encode(), self._token.encode()):
            told = "this page gives no orders: start it with a token, and open it with #token=..."
            return web.json_response({"error": told}, status=403)
        try:
            asked = await request.json()
            verb, model, worker = (asked.get(name) for name in ("verb", "model", "worker"))
        except (ValueError, AttributeError):
            return web.json_response({"error": "expected JSON with verb, model and worker"}, status=400)
        texts = all(each is None or isinstance(each, str) for each in (model, worker))
        about_model, about_worker = verb in ABOUT_MODELS and bool(model), verb in ABOUT_WORKERS and bool(worker)
        if not texts or not (about_model or about_worker):
            known = ", ".join(sorted(ABOUT_MODELS | ABOUT_WORKERS))
            told = f"expected one of {known}, with the model or the worker that it is about"
            return web.json_response({"error": told}, status=400)
        try:
            answers = await self._give(verb, model if about_model else None, worker)
        except QworkerError as error:
            return web.json_response({"error": str(error)}, status=502)
        return web.json_response({**answers.as_dict(), "complaints": answers.complaints()})

    def _told(self) -> dict[str, Any]:
        return {**self._look(), "steerable": self._token is not None}


class _Sent:
    """What one page has got already."""

    def __init__(self) -> None:
        self._notes: set[tuple[str, float, int]] = set()
        self._points: dict[str, float] = {}

    def rest(self, view: dict[str, Any]) -> dict[str, Any]:
        named = {(note["worker"], note["at"], note["number"]): note for note in view["timeline"]}
        fresh = [note for name, note in named.items() if name not in self._notes]
        self._notes = set(named)
        memory = {
            worker: [point for point in points if point[0] > self._points.get(worker, 0.0)]
            for worker, points in view["memory"].items()
        }
        self._points = {worker: points[-1][0] for worker, points in view["memory"].items() if points}
        return {**view, "timeline": fresh, "memory": memory}


def _policy(html: str) -> str:
    """Nothing from elsewhere, and no script but the page's own."""
    [script] = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
