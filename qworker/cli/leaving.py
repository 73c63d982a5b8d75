"""Ends the process although a thread of it cannot be ended: a load that hangs in a driver or on a dead file system.

Python waits for each thread of a pool before it exits, and nothing can stop a thread from outside. By then the worker
has done all that it had to: its jobs are answered or given back, its connections are closed, and what the thread holds
goes back to the system with the process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, cast

import structlog

from qworker.errors import QworkerError

log = structlog.get_logger(__name__)

POOLS: Final = ("engine", "load", "canary")
"""First words of the names of threads that run what is not ours."""
PATIENCE: Final = 1.0


@contextmanager
def without_stuck_threads() -> Generator[None]:
    """End the process at the end of this block if threads of the pools are stuck; else just go on."""
    try:
        yield
    finally:
        stuck = stuck_threads()
        if stuck:
            log.warning("process.ends_with_stuck_threads", threads=stuck)
            error = sys.exception()
            for each in _leaves(error):
                _tell(each)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if error is None else 1)


def stuck_threads(patience: float = PATIENCE) -> list[str]:
    """Names of pool threads that have not ended ``patience`` seconds after their pool was shut down."""
    deadline = time.monotonic() + patience
    while True:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith(POOLS)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.01)


def _leaves(error: BaseException | None) -> list[BaseException]:
    if error is None:
        return []
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for each in group.exceptions for leaf in _leaves(each)]


def _tell(error: BaseException) -> None:
    """As the command would have: one line for what is expected, a traceback for what is not."""
    if isinstance(error, QworkerError):
        sys.stderr.write(f"qworker worker: {error}\n")
    else:
        traceback.print_exception(error)
