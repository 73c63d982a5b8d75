"""The watchdog of the event loop."""

from __future__ import annotations

import threading
import time

import structlog

from qworker.telemetry.watchdog import Watchdog
from tests.support.waiting import wait_until

BEAT = 0.02


async def test_a_loop_that_stands_is_told_of_and_ended() -> None:
    """It says once where the loop stands, and ends the process after its limit."""
    ended = threading.Event()
    with structlog.testing.capture_logs() as logs:
        async with Watchdog(3.0, ended.set, beat=BEAT) as dog:
            await wait_until(lambda: dog.last_lag >= 0 and dog._turns > 2)
            deadline = time.monotonic() + 30
            while not ended.is_set() and time.monotonic() < deadline:
                time.sleep(0.01)  # noqa: ASYNC251  # this is the fault
    assert ended.is_set()
    assert dog.stalls == 1
    (stands,) = [line for line in logs if line["event"] == "loop.stands"]
    assert any("test_a_loop_that_stands" in frame for frame in stands["where"])


async def test_a_loop_that_moves_is_left_alone() -> None:
    """Work in many short steps, longer in all than the limit, is no standstill; nor is a short one."""
    ended = threading.Event()
    async with Watchdog(5 * BEAT, ended.set, beat=BEAT) as dog:
        started = time.monotonic()
        await wait_until(lambda: time.monotonic() - started > 20 * BEAT, every=0)
        assert dog._turns > 2
    assert not ended.is_set()


async def test_no_limit_ends_nothing() -> None:
    """Switched off, it only measures."""
    ended = threading.Event()
    async with Watchdog(0, ended.set, beat=BEAT) as dog:
        await wait_until(lambda: dog._turns > 0)
        time.sleep(10 * BEAT)  # noqa: ASYNC251  # this is the fault
        await wait_until(lambda: dog.worst_lag >= 5 * BEAT)
    assert not ended.is_set()
