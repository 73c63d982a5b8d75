"""The worker's pages, by a plain HTTP client."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import aiohttp
import pytest

from qworker.engine.canary import OnnxCanary
from qworker.engine.onnx import OnnxBackend
from qworker.telemetry import http
from qworker.telemetry.http import Canary, HealthServer
from qworker.telemetry.measures import Histogram
from qworker.telemetry.watchdog import Watchdog
from tests.support.waiting import wait_until
from tests.worker.doubles import BackendDouble


async def get(server: HealthServer, path: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{server.port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.json()


def serving(**more: Any) -> HealthServer:
    return HealthServer("127.0.0.1", 0, more.pop("readiness", lambda: None), dict, **more)


async def test_ready_is_who_passes_the_canary() -> None:
    """With the real one, on the real engine."""
    async with serving(canary=Canary(OnnxCanary(OnnxBackend()).run)) as server:
        assert await get(server, "/readyz") == (200, {"ready": True, "reason": None})


async def test_a_canary_that_fails_or_lies_says_why() -> None:
    """An engine that answers with its inputs is as bad as one that does not load."""
    liar = OnnxCanary(BackendDouble())
    assert "gave [1.0, 2.0, 3.0]" in (liar.run() or "")
    async with serving(canary=Canary(liar.run)) as server:
        status, answer = await get(server, "/readyz")
    assert (status, answer["ready"]) == (503, False)
    assert "squares" in answer["reason"]


async def test_a_canary_that_hangs_makes_unready_and_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that come meanwhile wait for the same run; when it comes back, the worker is ready again."""
    monkeypatch.setattr(http, "CANARY_PATIENCE", 0.05)
    free, runs = threading.Event(), list[float]()

    def hang() -> None:
        runs.append(time.monotonic())
        assert free.wait(20)

    async with serving(canary=Canary(hang)) as server:
        answers = [await get(server, "/readyz"), *await asyncio.gather(*(get(server, "/readyz") for _ in range(3)))]
        assert [status for status, _ in answers] == [503] * 4
        assert "has been running for" in answers[0][1]["reason"]
        free.set()
        await wait_until(lambda: True, what="the loop turns")
        assert (await get(server, "/readyz"))[0] in (200, 503)
        statuses: list[int] = []
        while 200 not in statuses:
            statuses.append((await get(server, "/readyz"))[0])
        assert len(runs) == 1, "its word holds for a while"


async def test_no_canary_is_asked_while_there_is_another_reason() -> None:
    """A worker that drains says that it drains."""

    def never() -> str:
        raise AssertionError("asked")

    async with serving(readiness=lambda: "draining", canary=Canary(never)) as server:
        assert await get(server, "/readyz") == (503, {"ready": False, "reason": "draining"})


async def test_a_blocked_loop_is_measured_and_told() -> None:
    """Whoever blocks the event loop shows in the histogram of its lag, and on the health page."""
    lags = Histogram()
    watchdog = Watchdog(0, beat=0.02, lags=lags)
    pages = HealthServer("127.0.0.1", 0, lambda: None, lambda: {"loop": watchdog.state()})
    async with watchdog, pages as server:
        await wait_until(lambda: lags.count > 0, what="a first turn")
        before = lags.sum
        time.sleep(0.3)  # noqa: ASYNC251 - that is the fault
        await wait_until(lambda: lags.sum >= before + 0.2, what="the lag was measured")
        status, answer = await get(server, "/healthz")
    assert (status, answer["alive"]) == (200, True)
    assert answer["worst_lag"] >= 0.2


async def test_metrics_are_served_as_they_are_made() -> None:
    """The Accept header goes in; body and content type come out."""

    async def page(accept: str) -> tuple[bytes, str]:
        return accept.encode(), "text/plain; version=0.0.4; charset=utf-8"

    async with serving(metrics=page) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.port}/metrics"
        async with session.get(url, headers={"Accept": "text/plain"}) as answer:
            assert await answer.text() == "text/plain"
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
