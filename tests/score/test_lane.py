"""Offline jobs on a real worker: they run in the gaps, and let an online model have the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qworker.wire.topology import lane_queue
from tests.e2e.caller import Caller
from tests.e2e.fleet import Fleet, queue_depths
from tests.e2e.models import MIB, inputs_of, put, rolling
from tests.score.scoring import Scoring, check_rows, doubled, read, write_rows
from tests.support.models import identity
from tests.support.waiting import wait_until_sync

pytestmark = pytest.mark.e2e


@pytest.fixture
def caller(amqp_url: str) -> object:
    with Caller(amqp_url) as caller:
        yield caller


def test_offline_jobs_wait_while_online_ones_are_in_hand(
    fleet: Fleet, scoring: Scoring, caller: Caller, tmp_path: Path
) -> None:
    """With no share nothing of a file is scored until the online jobs are done; then all of it is."""
    put(fleet.store, "roll", rolling(), resident_bytes=10 * MIB)
    fleet.start(1, batch_share=0)
    caller.wait([caller.job("roll", inputs_of("roll", 0))])
    online = [caller.job("roll", inputs_of("roll", k, 1.0)) for k in range(6)]
    write_rows(tmp_path / "in.parquet", 100)
    worker = fleet.workers[0]
    wait_until_sync(lambda: (worker.row("roll") or {}).get("in_hand"), what="online jobs are in hand")
    process = scoring.start("-i", "in.parquet", "-o", "out.parquet", "-m", "echo", "--batch-rows", 10)
    wait_until_sync(lambda: worker.is_hot("echo"), 40, what="the file's model is hot")
    caller.wait(online, 60)
    ended = scoring.ended(process)
    assert ended.code == 0, ended
    check_rows(read(tmp_path / "out.parquet"), 100)
    fleet.finish()


def test_an_online_model_gets_the_memory(fleet: Fleet, scoring: Scoring, caller: Caller, tmp_path: Path) -> None:
    """A file's model that fills the worker goes for an online one within moments; the file is finished later."""
    put(fleet.store, "file", doubled(), resident_bytes=20 * MIB)
    put(fleet.store, "called", identity(), resident_bytes=20 * MIB)
    fleet.start(1, memory="30MiB", max_cold_wait=30)
    write_rows(tmp_path / "in.parquet", 2000)
    process = scoring.start("-i", "in.parquet", "-o", "out.parquet", "-m", "file", "--in-flight", 4)
    worker = fleet.workers[0]
    wait_until_sync(lambda: worker.is_hot("file"), 80, what="the file is scored")
    reply = caller.call("called", {"x": np.ones((1, 3), np.float32)}, timeout=25)
    assert (reply.y == 1).all()
    assert queue_depths(fleet.url, [lane_queue("jobs", "called")]) == {lane_queue("jobs", "called"): (0, 1)}
    ended = scoring.ended(process, 90)
    assert ended.code == 0, ended
    check_rows(read(tmp_path / "out.parquet"), 2000, factor=2.0)
    fleet.finish()
