"""Child processes that cannot outlive us."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import IO

_PR_SET_PDEATHSIG = 1
_ENDED_BEFORE_ARMED = 127

_libc: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


def spawn(
    command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``command`` so that the kernel kills it when this process ends, even by SIGKILL.

    It has a session of its own: an interrupt typed at the terminal reaches us and not it, so that we can
    stop it in order.
    """
    parent = os.getpid()
    return _spawner.run(
        lambda: subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Two system calls and no lock of ours: safe between fork and exec, with threads too.
            preexec_fn=lambda: _die_with(parent),  # noqa: PLW1509
        )
    )


def stop_child(child: subprocess.Popen[bytes], timeout: float) -> None:
    """SIGTERM and wait ``timeout`` seconds (0: not at all), then SIGKILL; reaped when this returns."""
    if child.poll() is not None:
        return
    if timeout > 0:
        child.terminate()
        try:
            child.wait(timeout)
            return
        except subprocess.TimeoutExpired:
            pass
    child.kill()
    child.wait()


def _die_with(parent: int) -> None:
    if _libc is not None:  # pyright: ignore[reportUnnecessaryComparison]  # not on this platform, elsewhere
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a mask of ours would be inherited: SIGTERM must reach it
    if os.getppid() != parent:  # it ended before the signal was armed
        os._exit(_ENDED_BEFORE_ARMED)


class _Spawner:
    """One thread that starts all children and lives as long as the process.

    The death signal is sent when the *thread* that started the child ends: a child that was started from
    a thread of a pool would be killed when the pool shrinks or its event loop closes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]]
        self._work = queue.SimpleQueue()
        self._thread_pid: int | None = None  # the process that has the thread; a fork has none

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._thread_pid != os.getpid():
                threading.Thread(target=self._serve, name="qworker-spawner", daemon=True).start()
                self._thread_pid = os.getpid()
        outcome: Future[subprocess.Popen[bytes]] = Future()
        self._work.put((start, outcome))
        return outcome.result()

    def _serve(self) -> None:
        while True:
            start, outcome = self._work.get()
            try:
                outcome.set_result(start())
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                outcome.set_exception(error)


_spawner = _Spawner()
