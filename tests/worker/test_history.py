"""What a worker keeps over restarts: its history file and journal, and the warm start that comes of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import structlog

from qworker import Client
from qworker.config import load_settings
from qworker.policy.choice import make_eviction
from qworker.policy.eviction import Usage
from qworker.policy.history import Minute, dump_history, parse_history, parse_journal
from qworker.policy.residency import Residency
from qworker.telemetry.counters import Counters
from qworker.worker.history_file import HistoryFile, journal_of
from qworker.worker.hot_zone import HotZone
from tests.support.waiting import wait_until
from tests.worker.conftest import SIZE
from tests.worker.doubles import MIB, BackendDouble, Running, is_hot

X = np.ones((2, 3), np.float32)
WALL = 1_700_000_000.0


class Clocks:
    """A monotonic clock and the wall's, in step until one of them is set."""

    def __init__(self) -> None:
        self.now, self.wall = 100.0, WALL


def zone_at(clocks: Clocks, *tables: str) -> HotZone:
    made = {name: Residency(64 * MIB, make_eviction("gdsf")) for name in tables or ("",)}
    return HotZone(made, lambda: clocks.now, Counters())


async def test_a_history_outlives_its_worker(tmp_path: Path) -> None:
    """Counts and costs come back, and are older by the time that passed, on another monotonic clock."""
    before, path = Clocks(), tmp_path / "state" / "w.json"
    zone = zone_at(before)
    zone.remember({"a": Usage(3.0, 10.0, 0.5, 1000.0)})
    await HistoryFile(path, zone, lambda: before.wall).save()
    after = Clocks()
    after.now, after.wall = 5.0, WALL + 60
    fresh = zone_at(after)
    assert await HistoryFile(path, fresh, lambda: after.wall).restore() == 1
    assert fresh.history() == {"a": Usage(3.0, 70.0, 0.5, 1000.0)}


@pytest.mark.parametrize("content", [b"", b"{", b'{"format":"qworker-history","version":9}', b"\xff\xfe\x00"])
async def test_a_damaged_history_is_a_fresh_start(tmp_path: Path, content: bytes) -> None:
    """It is told of, and the next save puts a whole one in its place."""
    path, clocks = tmp_path / "w.json", Clocks()
    path.write_bytes(content)
    zone = zone_at(clocks)
    kept = HistoryFile(path, zone, lambda: clocks.wall)
    with structlog.testing.capture_logs() as logs:
        assert await kept.restore() == 0
    assert [line["event"] for line in logs] == ["history.corrupt"]
    zone.remember({"a": Usage(1.0, 0.0, 0.5, 1000.0)})
    await kept.save()
    assert set(parse_history(path.read_text()).usages) == {"a"}
    assert [each.name for each in tmp_path.iterdir()] == ["w.json"]  # noqa: ASYNC240


async def test_a_history_that_cannot_be_written_is_told_of_once(tmp_path: Path) -> None:
    """A read-only folder costs the history, not the worker."""
    (tmp_path / "file").write_text("no folder")
    kept = HistoryFile(tmp_path / "file" / "w.json", zone_at(Clocks()))
    with structlog.testing.capture_logs() as logs:
        await kept.save()
        await kept.save()
    assert [line["event"] for line in logs] == ["history.unwritable"]


async def test_the_journal_begins_anew_at_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never grows beyond twice its size, and both files can be read."""
    monkeypatch.setattr("qworker.worker.history_file.JOURNAL_BYTES", 300)
    path = tmp_path / "w.json"
    kept = HistoryFile(path, zone_at(Clocks()))
    rows = [Minute(28_000_000 + i, "a", 2, 1, 0.5, 0.25, 1000) for i in range(30)]
    for row in rows:
        await kept.save([row])
    journal = journal_of(path)
    parts = [parse_journal(part.read_text().splitlines()) for part in (journal.with_suffix(".csv.1"), journal)]
    assert all(part.skipped == 0 for part in parts)
    kept_rows = [row for part in parts for row in part.rows]
    assert kept_rows == rows[-len(kept_rows) :]
    assert len(kept_rows) < len(rows)


def test_each_table_knows_what_was_kept() -> None:
    """Which memory a model takes is known once its card comes; a use in either counts."""
    clocks = Clocks()
    zone = zone_at(clocks, "onnx", "tensorrt")
    zone.remember({"a": Usage(3.0, 10.0, 0.5, 1000.0), "b": Usage(1.0, 5.0, 0.5, 1000.0)})
    zone.used("a")
    assert zone.history()["a"].count == pytest.approx(4.0, abs=1e-3)
    assert [model for model, _ in zone.dearest()] == ["a", "b"]


def test_where_a_history_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the service's state folder or the user's, apart by name, store and broker, and not by process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    unnamed = load_settings().history_file
    assert unnamed is not None
    assert unnamed.parent == tmp_path / "qworker"
    assert str(os.getpid()) not in unnamed.name
    assert load_settings({"store": "other"}).history_file != unnamed
    assert load_settings({"broker": "amqp://h/other"}).history_file != unnamed
    assert load_settings({"name": "w1"}).history_file != unnamed
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/qworker:/var/lib/more")
    assert str(load_settings({"name": "a/../b"}).history_file).startswith("/var/lib/qworker/a_.._b-")
    assert load_settings({"history": "off"}).history_file is None
    assert load_settings({"history": "/x/h.json"}).history_file == Path("/x/h.json")


# --- a worker ----------------------------------------------------------------------------------------


async def use(client: Client, model: str, times: int) -> None:
    for _ in range(times):
        await client.call(model, {"x": X}, timeout=20)


async def test_a_restart_is_warm(
    running: Running, amqp_url: str, client: Client, identities: Path, tmp_path: Path, backend: BackendDouble
) -> None:
    """What was used most is loaded again before anybody asks, into the share of the budget that it may have."""
    kept = {"history": str(tmp_path / "w.json"), "memory": 64 * MIB, "warm_start": 0.7}
    backend.load_seconds = 0.2
    async with running(amqp_url, identities, backend, **kept):
        await use(client, "a", 1)
        await use(client, "b", 5)
        await use(client, "c", 3)
    journal = parse_journal(journal_of(tmp_path / "w.json").read_text().splitlines())
    assert sum(row.requests for row in journal.rows) == 9
    assert sum(row.loads for row in journal.rows) == 3
    async with running(amqp_url, identities, backend, **kept) as worker:
        await wait_until(lambda: is_hot(worker, "b") and is_hot(worker, "c"), 20)
        assert worker.zone.held == 2 * SIZE
        await wait_until(lambda: worker.counters.preloads == 2)  # counted a moment after the model is hot
        await use(client, "b", 1)
        assert worker.counters.loads == 2


async def test_jobs_come_before_a_warm_start(
    running: Running, amqp_url: str, client: Client, identities: Path, tmp_path: Path, backend: BackendDouble
) -> None:
    """A preloaded model has no claim to stay: a job that needs its bytes gets them, minimum residency or not."""
    path = tmp_path / "w.json"
    usages = {model: Usage(9.0, 60.0, 0.5, float(SIZE)) for model in ("a", "b", "c")}
    path.write_text(dump_history(usages, WALL * 2))
    kept = {"history": str(path), "memory": 3 * SIZE, "warm_start": 1.0, "min_residency": 600, "max_cold_wait": 600}
    async with running(amqp_url, identities, backend, **kept) as worker:
        await wait_until(lambda: all(is_hot(worker, model) for model in "abc"), 20)
        await use(client, "d", 1)
        assert is_hot(worker, "d")


async def test_a_job_for_a_model_that_is_preloaded_is_served_by_that_load(
    running: Running, amqp_url: str, client: Client, identities: Path, tmp_path: Path, backend: BackendDouble
) -> None:
    """One load, and the job is answered when it ends."""
    path = tmp_path / "w.json"
    path.write_text(dump_history({"a": Usage(9.0, 60.0, 0.5, float(SIZE))}, WALL * 2))
    backend.loading.shut()
    async with running(amqp_url, identities, backend, history=str(path)) as worker:
        await wait_until(lambda: backend.loading.passing == 1, 20)
        job = client.call("a", {"x": X}, timeout=20)
        backend.loading.open()
        await job
        assert worker.counters.loads == 1
