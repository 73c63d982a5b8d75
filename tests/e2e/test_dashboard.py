"""The status page in a real browser, over real workers: an operator finds what thrashes, and mends it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qworker.broker.child import stop_child
from tests.e2e.caller import Caller
from tests.e2e.fleet import COMMAND, ROOT, Fleet
from tests.e2e.models import inputs_of
from tests.e2e.test_operator import asked
from tests.support.browser import browser, chromium
from tests.support.waiting import wait_until_sync

TOKEN = "a-token-of-some-length"
needs_browser = pytest.mark.skipif(chromium() is None, reason="there is no Chromium on the PATH")


class Dashboard:
    """A ``qworker dashboard`` process."""

    def __init__(self, fleet: Fleet, folder: Path, *flags: str) -> None:
        log = folder / "dashboard.log"
        line = [*COMMAND, "dashboard", "--port", "0", "--broker", fleet.url, *flags]
        environment = {name: text for name, text in os.environ.items() if not name.startswith("QWORKER_")}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                line, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment | {"PYTHONUNBUFFERED": "1"}
            )
        self.url = wait_until_sync(lambda: self._told(log), 60, what="the page's address")

    def _told(self, log: Path) -> str | None:
        assert self.process.poll() is None, log.read_text()
        text = log.read_text()
        return text.split("#")[0].split(" ")[0].strip() if "\n" in text else None

    def view(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}view", timeout=10) as answer:
            return json.load(answer)

    def order(self, token: str, **asked: Any) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}orders", json.dumps(asked).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@pytest.fixture
def dashboard(fleet: Fleet, tmp_path: Path) -> Iterator[Dashboard]:
    """With a token, before there are workers."""
    page = Dashboard(fleet, tmp_path, "--token", TOKEN)
    yield page
    stop_child(page.process, 10.0)


def test_who_has_no_token_only_looks(fleet: Fleet, dashboard: Dashboard, tmp_path: Path) -> None:
    """With another token, with none, and at a page that was started without; what is no order is refused."""
    assert dashboard.order("another-token-of-length", verb="pin", model="echo")[0] == 403
    assert dashboard.order("", verb="pin", model="echo")[0] == 403
    assert dashboard.order(TOKEN, verb="cancel", model="echo")[0] == 400
    assert dashboard.order(TOKEN, verb="drain")[0] == 400
    assert dashboard.order(TOKEN, verb="pin", model=7)[0] == 400
    assert dashboard.order(TOKEN, verb="pin", model="echo")[0] == 502, "there is no worker"
    plain = Dashboard(fleet, tmp_path)
    try:
        assert plain.order("", verb="pin", model="echo")[0] == 403
        assert plain.view()["steerable"] is False
    finally:
        stop_child(plain.process, 10.0)


def switch(caller: Caller, rounds: int) -> None:
    """Two models that do not fit beside each other, in turn."""
    for k in range(rounds):
        for model in ("table-a", "table-b"):
            assert caller.call(model, inputs_of(model, k), timeout=60).code == "ok"


@needs_browser
def test_an_operator_at_work(fleet: Fleet, caller: Caller, dashboard: Dashboard, tmp_path: Path) -> None:
    """Finds on the page which models thrash, pins one by the page, sees the loads of the other one refused room;
    drains a worker by it without losing a job, and reads why a model is cold."""
    fleet.start(1, memory="60MiB", min_residency=0, claim_timeout=60)
    asyncio.run(_at_work(fleet, caller, dashboard, tmp_path))
    fleet.finish()


async def _at_work(fleet: Fleet, caller: Caller, dashboard: Dashboard, tmp_path: Path) -> None:
    [first] = fleet.workers
    async with browser(tmp_path / "profile") as tab:
        await tab.go(f"{dashboard.url}#token={TOKEN}")
        await tab.wait("document.querySelector('#workers tbody tr')?.cells[1].textContent == 'ready'")
        await asyncio.to_thread(switch, caller, 3)
        # What thrashes is there to be read: how often models are switched, and who displaced whom.
        await tab.wait("Number(document.querySelector('#workers tbody tr').cells[8].textContent) >= 6")
        for part in ("makes room for table-a", "makes room for table-b"):
            await tab.wait(f"document.getElementById('evictions').innerText.includes('{part}')")
        await tab.wait("document.querySelectorAll('#timeline rect').length >= 6")
        await tab.wait("document.querySelectorAll('#waterfall rect').length >= 10")
        # The page's figures are the worker's, once nothing moves any more.
        state = first.state()
        held, budget = state["ledger"]["held"], state["ledger"]["budget"]
        await tab.wait(f"view.workers[0].bytes === {held} && view.workers[0].budget === {budget}")
        hot = json.dumps(sorted(row["model"] for row in state["models"]))
        rows = "[...document.querySelectorAll('#models tbody tr')].map(row => row.cells[0].textContent).sort()"
        await tab.wait(f"JSON.stringify({rows}) === JSON.stringify({hot})")
        # By the keyboard alone: filter, go to the button, press it.
        await tab.press("/", "/", 191)
        assert await tab.run("document.activeElement.id") == "filter"
        for letter in "echo":
            await tab.press(letter, letter)
        assert await tab.run("document.querySelectorAll('#models tbody tr').length") == 0
        await tab.press("Escape", code=27)
        await tab.wait("document.querySelectorAll('#models tbody tr').length == 1")
        await tab.run("document.querySelector('#models button[aria-label^=\"pin table-\"]').focus()")
        await tab.press("Enter", "\r", 13)
        said = await tab.wait(
            "/^pin table-.: ./.test(document.getElementById('said').textContent) && "
            "document.getElementById('said').textContent"
        )
        assert "done" in said, said
        pinned = next(row["model"] for row in first.state()["models"] if row["pinned"])
        other = {"table-a": "table-b", "table-b": "table-a"}[pinned]
        # The other one waits now, and the page says for what; nothing is switched any more.
        loads = first.state()["counters"]["loads"]
        waiting = caller.job(other, inputs_of(other, 9))
        await tab.wait("document.getElementById('cold').innerText.includes('pinned models keep')")
        assert caller.call(pinned, inputs_of(pinned, 9), timeout=60).code == "ok"
        assert first.state()["counters"]["loads"] == loads
        why = await asyncio.to_thread(asked, fleet, "why", other)  # the command has a loop of its own
        assert "pinned models keep" in why["verdict"]
        # Light and dark are two pages to look at.
        await tab.dark(on=False)
        light = await tab.run("getComputedStyle(document.body).backgroundColor")
        await tab.dark(on=True)
        assert await tab.run("getComputedStyle(document.body).backgroundColor") != light
        if pictures := os.environ.get("QWORKER_PICTURES"):
            await tab.picture(Path(pictures) / "dashboard-dark.png")
            await tab.dark(on=False)
            await tab.picture(Path(pictures) / "dashboard-light.png")
        # A drained worker loses no job.
        jobs = [caller.job(pinned, inputs_of(pinned, k)) for k in range(20)]
        await tab.run("document.querySelector('#workers button[aria-label=\"drain worker-0\"]').click()")
        await tab.wait("document.querySelector('#workers tbody tr').innerText.includes('drained')")
        await tab.run("document.querySelector('#workers button[aria-label=\"resume worker-0\"]').click()")
        asked_off = await asyncio.to_thread(asked, fleet, "models", "unpin", pinned)
        assert asked_off["answers"][0]["pinned"] is False
        replies = await asyncio.to_thread(caller.wait, [*jobs, waiting], 60)
        assert {reply.code for reply in replies.values()} == {"ok"}
        assert tab.complaints == []


@needs_browser
def test_three_hundred_models(tmp_path: Path) -> None:
    """A new view is drawn in much less than the second after which the next one comes, and focus stays."""
    asyncio.run(_many(tmp_path))


async def _many(tmp_path: Path) -> None:
    from qworker.telemetry.measures import Measures
    from qworker.watch.fleet import Fleet as Seen
    from qworker.watch.orders import Answers
    from qworker.watch.page import StatusPage
    from tests.watch.snapshots import row, told

    seen, measures, at = Seen(), Measures(), 1000.0

    def look() -> dict[str, Any]:
        nonlocal at
        at += 1
        for n in range(300):
            for _ in range(n % 7):
                measures.of(f"model-{n:03}").job(0.001, 0.0, 0.002, cold=False)
        measures.chronicle.note("evicted", "model-1", "makes room")
        seen.take(told("w", at, measures, *(row(f"model-{n:03}", key=n / 7) for n in range(300))), at)
        return {"at": at, **seen.view(at), "trouble": None}

    async def give(verb: str, model: str | None, worker: str | None) -> Answers:
        raise AssertionError

    async with StatusPage("127.0.0.1", 0, look, give) as page, browser(tmp_path / "profile") as tab:
        await tab.go(f"http://127.0.0.1:{page.port}/")
        await tab.wait("document.querySelectorAll('#models tbody tr').length == 300")
        assert not await tab.run("!!document.querySelector('#models td button')"), "read only: no buttons for orders"
        await tab.run("document.querySelector('#models th button').focus()")
        drawn = await tab.run("document.body.dataset.drawn")
        await tab.wait(f"document.body.dataset.drawn !== '{drawn}'")
        assert await tab.run("document.activeElement.textContent") == "model"
        await tab.press("Enter", "\r", 13)
        assert await tab.run("document.querySelector('#models tbody tr').cells[0].textContent") == "model-000"
        took = await tab.run(
            "(() => { const from = performance.now(); for (let n = 0; n < 5; n++) draw(); "
            "return (performance.now() - from) / 5; })()"
        )
        assert took < 500, f"a view takes {took:.0f} ms to draw"
        assert tab.complaints == []
