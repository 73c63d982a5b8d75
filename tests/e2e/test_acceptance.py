"""An operator who has the README and the runbook: finds what thrashes, pins it, drains a worker, asks why it is cold.

The page is read in a real browser, the commands are typed as they stand in those two texts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from qworker.broker.child import stop_child
from qworker.cli.main import app
from tests.e2e.caller import Caller
from tests.e2e.fleet import ROOT, Fleet
from tests.e2e.models import TABLE_BYTES, put, table
from tests.e2e.test_dashboard import Dashboard, needs_browser
from tests.support.browser import Tab, browser
from tests.support.waiting import wait_until

RIVALS = ("table-a", "table-b", "table-c")
"""A worker of this fleet holds one of them."""
PATIENCE = 120.0
KNOWN = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "ops/runbook.md"))
IDS = {"ids": np.array([1, 2, 3], np.int64)}


class Traffic:
    """Calls each rival over and over, from a thread each. Owned by those: ``codes`` and ``errors``."""

    def __init__(self, url: str) -> None:
        self.codes: list[str] = []
        self.errors: list[Exception] = []
        self._url = url
        self._stopping, self._given_up = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(model,)) for model in RIVALS]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._given_up.set()
        self.stop()

    def stop(self) -> None:
        """Once each call that is under way has its answer; without them at the end of a test that has failed."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _call(self, model: str) -> None:
        try:
            with Caller(self._url) as caller:
                while not self._stopping.wait(0.05):
                    job = caller.job(model, IDS)
                    while job not in caller.replies.by_id and not self._given_up.is_set():
                        caller.listen(0.01)
                    self.codes.append(caller.replies.by_id[job][0].code)
        except Exception as error:  # noqa: BLE001 - told by the test, in its own thread
            self.errors.append(error)


@pytest.fixture
def page(fleet: Fleet, tmp_path: Path) -> Iterator[Dashboard]:
    """Read-only, as it is without a token."""
    page = Dashboard(fleet, tmp_path)
    yield page
    stop_child(page.process, 10.0)


async def typed(fleet: Fleet, line: str) -> str:
    """What a command says, with the broker in the environment, as the demo tells to set it.

    In this process: the start of one takes longer than what it does.
    """
    words = line.split()
    known = [f"qworker {' '.join(words[:n])}" for n in (1, 2)]
    assert any(each in KNOWN for each in known), f"nobody who has read the README and the runbook knows {known}"
    done = await asyncio.to_thread(CliRunner().invoke, app, words, env={"QWORKER_BROKER": fleet.url})
    assert done.exit_code == 0, f"{line} ended with {done.exit_code}: {done.output}\n{done.exception}"
    return done.stdout


def cell(table_id: str, first: str, column: int) -> str:
    """A script for the text in the row that begins with ``first``; null without one."""
    rows = f"[...document.querySelectorAll('#{table_id} tbody tr')]"
    return f"({rows}.find(row => row.cells[0].textContent === '{first}')?.cells[{column}].textContent ?? null)"


def publish(caller: Caller, rounds: int) -> list[str]:
    return [caller.job(model, IDS) for _ in range(rounds) for model in RIVALS]


def answered_once(caller: Caller, jobs: list[str]) -> None:
    assert {reply.code for reply in caller.wait(jobs, PATIENCE).values()} == {"ok"}
    assert caller.replies.doubles() == 0


@needs_browser
@pytest.mark.timeout(600)
def test_an_operator_finds_what_thrashes_and_mends_it(fleet: Fleet, page: Dashboard, tmp_path: Path) -> None:
    """With two workers, three models that push each other out, and calls that go on all the while: none is lost."""
    put(fleet.store, "table-c", table("table-c"), resident_bytes=TABLE_BYTES)
    fleet.start(2, memory="60MiB")
    with Traffic(fleet.url) as traffic:
        asyncio.run(_at_work(fleet, page, traffic, tmp_path))
        traffic.stop()
    assert not traffic.errors
    assert set(traffic.codes) == {"ok"}
    fleet.finish()


async def _at_work(fleet: Fleet, page: Dashboard, traffic: Traffic, tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as tab:
        await tab.go(page.url)
        # Which model thrashes? The page names it, with how often it was loaded and what displaced it.
        # One of the three may have settled on a worker of its own, while the others take turns.
        often = "[...document.querySelectorAll('#reloaded tbody tr')].filter(r => Number(r.cells[1].textContent) >= 2)"
        await tab.wait(f"{often}.length >= 2", PATIENCE)
        assert "makes room for table-" in await tab.run(f"{often}[0].cells[4].textContent")
        worst = await tab.run("document.querySelector('#reloaded tbody tr').cells[0].textContent")
        others = [model for model in RIVALS if model != worst]
        holder = await _pinned_down(fleet, tab, worst)
        # Drain the other worker, where two models still take turns, with jobs in hand and more in the queues.
        drained = next(worker.name for worker in fleet.workers if worker.name != holder)
        with Caller(fleet.url) as caller:
            jobs = publish(caller, 10)
            await _drained(fleet, tab, drained, others[0], traffic)
            # And back: nothing was lost meanwhile.
            assert f"{drained} takes jobs again" in await typed(fleet, f"workers resume {drained}")
            assert "unpin" in await typed(fleet, f"models unpin {worst}")
            await asyncio.to_thread(answered_once, caller, jobs)
        assert tab.complaints == []


async def _drained(fleet: Fleet, tab: Tab, worker: str, cold: str, traffic: Traffic) -> None:
    """Drain ``worker``, and be told why ``cold``, which it had, is cold now."""
    assert f"{worker} is drained" in await typed(fleet, f"workers drain {worker}")
    await tab.wait(f"({cell('workers', worker, 1)} ?? '').includes('drained')", PATIENCE)
    assert "drained" in await typed(fleet, "workers ls")
    # The page and the command say it in the same words.
    await tab.wait(f"({cell('cold', cold, 5)} ?? '').includes('pinned models keep')", PATIENCE)

    async def why() -> bool:
        return "pinned models keep 48.0 MiB of 60.0 MiB" in await typed(fleet, f"why {cold}")

    await wait_until(why, PATIENCE, what="why says what keeps the model cold", every=0.5)
    answered = len(traffic.codes)
    await wait_until(lambda: len(traffic.codes) > answered, PATIENCE, what="the pinned model is served all the while")


async def _pinned_down(fleet: Fleet, tab: Tab, model: str) -> str:
    """Pin ``model`` and see on the page that its worker comes to rest; that worker."""
    pinned = await typed(fleet, f"models pin {model}")
    assert all(f"{worker.name}: pin {model}" in pinned for worker in fleet.workers), pinned
    await tab.wait(f"({cell('models', model, 2)} ?? '') === 'hot, pinned'", PATIENCE)
    holder = await tab.run(cell("models", model, 1))
    before = float(await tab.run(cell("workers", holder, 8)))
    assert before > 0
    await tab.wait(f"Number({cell('workers', holder, 8)}) <= {0.7 * before}", PATIENCE)
    assert await tab.run(cell("models", model, 1)) == holder
    assert "pinned" in await typed(fleet, "top --once")
    return holder
