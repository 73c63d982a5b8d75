"""Notices an event loop that stands still: says where, and ends the process when it does so for too long.

A worker whose loop stands still answers no heartbeat and no probe, and holds its jobs until the broker gives it up;
ended, it is started again by whoever supervises it, and the broker has its jobs back at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import structlog

from qworker.telemetry.measures import Histogram

log = structlog.get_logger(__name__)

LOOP_STANDS: Final = 75
"""Exit code: the event loop stood still, and a new process will do better (EX_TEMPFAIL)."""
BEAT: Final = 0.25
SAY_AFTER: Final = 2.0
_FRAMES_SHOWN: Final = 6


class Watchdog:
    """Watches the event loop that enters it, from a thread. ``limit`` seconds of standstill call ``end``; 0: never.

    The thread counts its own wake-ups and not the clock: while the whole process was stopped, or one thread held the
    interpreter, it could not look either, and the loop has done nothing wrong.
    """

    def __init__(
        self,
        limit: float,
        end: Callable[[], None] | None = None,
        *,
        beat: float = BEAT,
        lags: Histogram | None = None,
    ) -> None:
        """Each turn's lag goes into ``lags``."""
        self._limit = limit
        self._end = end or _end_process
        self._beat = beat
        self._lags = lags or Histogram()
        self._say_after = max(1, round(SAY_AFTER / beat))
        self._turns = 0  # written by the loop alone
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watched = 0
        self.last_lag = 0.0
        """Seconds by which the loop was late the last time. Owner: the loop."""
        self.worst_lag = 0.0
        self.stalls = 0
        """Standstills of more than ``SAY_AFTER`` seconds. Owner: the thread."""

    async def __aenter__(self) -> Watchdog:
        self._watched = threading.get_ident()
        self._next_turn(asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._done.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join()  # it wakes at once

    def state(self) -> dict[str, Any]:
        """For ``/state``."""
        return {"lag": round(self.last_lag, 6), "worst_lag": round(self.worst_lag, 6), "stalls": self.stalls}

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._beat

        def turn() -> None:
            self._turns += 1
            self.last_lag = max(0.0, loop.time() - due)
            self.worst_lag = max(self.worst_lag, self.last_lag)
            self._lags.observe(self.last_lag)
            self._next_turn(loop)

        self._timer = loop.call_at(due, turn)

    # --- in the thread ---------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, still = -1, 0
        while not self._done.wait(self._beat):
            if self._turns != seen:
                if still > self._say_after:
                    log.warning("loop.moves", seconds=round(still * self._beat, 1))
                seen, still = self._turns, 0
                continue
            still += 1
            if still == self._say_after:
                self.stalls += 1
                log.warning("loop.stands", seconds=round(still * self._beat, 1), where=self._where())
            if self._limit and still * self._beat >= self._limit:
                log.critical("loop.given_up", seconds=round(still * self._beat, 1), where=self._where())
                self._end()
                return

    def _where(self) -> list[str]:
        """What the loop's thread does: files, lines and functions, and no values."""
        frames: dict[int, FrameType] = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # documented
        frame = frames.get(self._watched)
        if frame is None:
            return []
        stack = traceback.extract_stack(frame)[-_FRAMES_SHOWN:]
        return [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in stack]


def _end_process() -> None:
    """The loop cannot be asked to stop, so nothing is closed: the broker takes back what we had."""
    sys.stderr.flush()
    os._exit(LOOP_STANDS)
