"""Threads and event loops that hang: the process ends all the same, and its jobs are done by others."""

from __future__ import annotations

import time
from pathlib import Path

from qworker.telemetry.watchdog import LOOP_STANDS
from tests.e2e.caller import Caller
from tests.e2e.fleet import Fleet
from tests.e2e.models import answer_of, inputs_of
from tests.support import stuck
from tests.support.waiting import wait_until_sync


def test_a_load_that_hangs_does_not_hold_the_exit(fleet: Fleet, caller: Caller, tmp_path: Path) -> None:
    """Told to stop, the worker ends once its grace is over, with its thread; the job is another's."""
    switch = tmp_path / "switch"
    fleet.environment = stuck.environment(switch)
    fleet.start(1, grace=1)
    (worker,) = fleet.workers
    switch.touch()
    job_id = caller.job("echo", inputs_of("echo", 1))
    wait_until_sync((tmp_path / "switch-hangs").exists, 20)
    worker.terminate()
    assert worker.wait_exit(20) == 0
    assert worker.events("process.ends_with_stuck_threads")
    fleet.environment = {}
    fleet.start(1)
    reply = caller.wait([job_id], 30)[job_id]
    assert (reply.y == answer_of("echo", inputs_of("echo", 1))).all()
    fleet.finish()


def test_an_event_loop_that_stands_ends_the_process(fleet: Fleet, caller: Caller, tmp_path: Path) -> None:
    """The watchdog says where it stands and ends the worker; the job in its hands is another's."""
    switch = tmp_path / "switch"
    fleet.environment = stuck.environment(switch, "loop")
    fleet.start(1, watchdog=3)
    (worker,) = fleet.workers
    switch.touch()
    job_id = caller.job("echo", inputs_of("echo", 1))
    assert worker.wait_exit(30) == LOOP_STANDS
    (said,) = worker.events("loop.stands")
    assert "hanging_loop" in said["where"][-1]
    fleet.environment = {}
    fleet.start(1)
    reply = caller.wait([job_id], 30)[job_id]
    assert (reply.y == answer_of("echo", inputs_of("echo", 1))).all()
    fleet.finish(errors_allowed=("loop.given_up",))


def test_a_stopped_process_is_not_a_standing_loop(fleet: Fleet, caller: Caller) -> None:
    """SIGSTOP for longer than the watchdog waits: after SIGCONT the worker goes on."""
    fleet.start(1, watchdog=1)
    (worker,) = fleet.workers
    worker.pause()
    time.sleep(2.5)
    worker.resume()
    assert caller.call("echo", inputs_of("echo", 2)).code == "ok"
    assert worker.state()["loop"]["stalls"] == 0
    fleet.finish()
