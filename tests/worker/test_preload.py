"""Preloads by the plan of the day: who acts, into which bytes, why, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from qworker import Client
from qworker.policy.eviction import Usage
from qworker.policy.forecast import HOUR, Plan, Preload, dump_plan, parse_plan
from qworker.policy.history import JOURNAL_HEADER, Minute, dump_history, journal_line
from qworker.worker.history_file import journal_of, plan_of
from tests.simulate.workloads import bursty
from tests.support.broker import CONNECTORS
from tests.support.waiting import wait_until
from tests.worker.conftest import MODELS, SIZE
from tests.worker.doubles import BackendDouble, Running, is_hot, run_worker

X = np.ones((2, 3), np.float32)
DAY = 86_400.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other sooner."""
    monkeypatch.setattr("qworker.worker.preload.PLAN_LOOK_SECONDS", 0.1)
    monkeypatch.setattr("qworker.worker.keeper.LOOK_SECONDS", 0.1)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A history that knows what each model takes."""
    path = tmp_path / "w.json"
    path.write_text(dump_history({model: Usage(2.0, 60.0, 0.5, float(SIZE)) for model in MODELS}, time.time()))
    return path


def plan(history: Path, *models: str, act: bool = True) -> None:
    """The plan of this day: ``models`` in this hour, and in the next, should it begin meanwhile."""
    now = time.time()
    hour = now // HOUR * HOUR
    preloads = tuple(Preload(at, model, 0.9, "each day") for at in (hour, hour + HOUR) for model in models)
    aside = history.with_suffix(".new")
    aside.write_text(dump_plan(Plan(now, act, "free", "it would have paid", preloads)))
    aside.replace(plan_of(history))


async def test_what_is_planned_is_ready_with_its_reason_and_is_used(
    running: Running, amqp_url: str, client: Client, identities: Path, history: Path, backend: BackendDouble
) -> None:
    """The reason is in the state and in the model's story; the first job counts it as used."""
    plan(history, "b")
    kept = {"history": str(history), "warm_start": 0, "preload": "auto"}
    async with running(amqp_url, identities, backend, **kept) as worker:
        await wait_until(lambda: worker.counters.preloads == 1, 30)
        await wait_until(lambda: is_hot(worker, "b"), 30)
        told = worker.state()["preloads"]
        assert told["plan"]["act"] is True
        assert "each day (90% likely)" in told["waiting"]["b"]
        story = worker.counters.measures.chronicle.of("b", 9)
        assert [note["kind"] for note in story].count("preloaded") == 1
        assert "planned for" in story[-1]["reason"]
        await client.call("b", {"x": X}, timeout=20)
        await wait_until(lambda: worker.counters.preloads_used == 1, 30)
        assert worker.counters.loads == 1
        assert worker.state()["preloads"]["waiting"] == {}


async def test_a_preload_makes_way_for_any_job_and_counts_as_unused(
    running: Running, amqp_url: str, client: Client, identities: Path, history: Path, backend: BackendDouble
) -> None:
    """No minimum residency for it; and it does not come back in its hour."""
    plan(history, "b")
    kept = {"history": str(history), "warm_start": 0, "preload": "auto", "memory": SIZE, "min_residency": 600}
    async with running(amqp_url, identities, backend, **kept, max_cold_wait=600) as worker:
        await wait_until(lambda: worker.counters.preloads == 1, 30)
        await client.call("d", {"x": X}, timeout=20)
        assert (worker.counters.preloads_unused, worker.counters.preloads_used) == (1, 0)
        assert worker.counters.preloads == 1


async def test_a_preload_takes_free_bytes_only(
    running: Running, amqp_url: str, client: Client, identities: Path, history: Path, backend: BackendDouble
) -> None:
    """With a full memory nothing is preloaded and nobody leaves; when bytes come free, within the hour, it is."""
    kept = {"history": str(history), "warm_start": 0, "preload": "auto", "memory": 2 * SIZE}
    async with running(amqp_url, identities, backend, **kept) as worker:
        for model in "cd":
            await client.call(model, {"x": X}, timeout=20)
        plan(history, "b")
        await wait_until(lambda: (worker.state()["preloads"]["plan"] or {}).get("act") is True, 30)
        worker._tenants["c"].leave()  # as by an operator's order
        await wait_until(lambda: worker.counters.preloads == 1, 30)
        assert is_hot(worker, "d")
        assert worker.counters.evictions == 0


async def test_a_plan_can_be_refused_and_edited_while_it_is_in_force(
    running: Running, amqp_url: str, identities: Path, history: Path, backend: BackendDouble
) -> None:
    """What a refused plan lists is not loaded; nor what a person has put into it wrongly; an edit counts at once."""
    plan(history, "a", act=False)
    kept = {"history": str(history), "warm_start": 0, "preload": "auto"}
    async with running(amqp_url, identities, backend, **kept) as worker:
        await wait_until(lambda: (worker.state()["preloads"]["plan"] or {}).get("act") is False, 30)
        plan_of(history).write_text("act = perhaps")
        await wait_until(lambda: "cannot be read" in worker.state()["preloads"]["plan"]["verdict"], 30)
        plan(history, "nobody", "c")
        await wait_until(lambda: worker.counters.preloads == 1, 30)
        await wait_until(lambda: is_hot(worker, "c"), 30)
        assert worker.counters.loads == 1


def write_journal(history: Path, rows: Sequence[tuple[float, str]], nbytes: dict[str, int]) -> None:
    lines = (journal_line(Minute(int(at // 60), model, 1, 1, 10.0, 10.0, nbytes[model])) for at, model in rows)
    journal_of(history).write_text("\n".join([JOURNAL_HEADER, *lines]) + "\n")


@pytest.mark.parametrize("pays", [True, False])
async def test_a_worker_makes_its_plan_and_stays_off_where_it_does_not_pay(
    amqp_url: str, identities: Path, history: Path, backend: BackendDouble, pays: bool
) -> None:
    """Each day with habits that leave gaps: the plan acts. Sessions without habits: it does not, and says why."""
    first = (time.time() // DAY - 8) * DAY
    if pays:
        rows = [(first + day * DAY + 3 * HOUR, "d") for day in range(8)]
        rows += [(first + day * DAY + 8 * HOUR + 120.0 * i, m) for day in range(8) for i, m in enumerate("abc")]
        write_journal(history, rows, {"a": SIZE, "b": SIZE, "c": SIZE, "d": 3 * SIZE})
    else:
        rows = [(first + at, model) for at, model in bursty(3, sessions=400)]
        write_journal(history, rows, {model: SIZE for _, model in rows})
    kept = {"history": str(history), "warm_start": 0, "preload": "auto", "memory": 3 * SIZE}
    async with run_worker(CONNECTORS["fast"], amqp_url, identities, backend, **kept) as worker:
        await wait_until(lambda: worker.state()["preloads"]["plan"] is not None, 60)
        made = parse_plan(plan_of(history).read_text())
        assert (made.act, made.tier) == ((True, "free") if pays else (False, "off"))
        assert ("it would have paid" if pays else "no preload would have paid") in made.verdict
        assert {preload.model for preload in made.preloads} == (set("abcd") if pays else set())
        assert worker.state()["preloads"]["plan"]["verdict"] == made.verdict
        if not pays:
            assert worker.counters.preloads == 0
