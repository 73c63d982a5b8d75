"""When a session ends and why, in one place; and the tasks that it owns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from qworker.broker.reference.errors import ended, is_phantom
from qworker.errors import BrokerUnavailable, QworkerError

T = TypeVar("T")

_TASKS_TIMEOUT = 5.0


class Life:
    """Whoever sees the first trouble calls ``end``; everybody else sees it by ``is_open`` and ``wait``.

    Owned here: the end and its reason, written once by ``end``, and the tasks of ``run``.
    """

    def __init__(self) -> None:
        self._end: asyncio.Future[BrokerUnavailable | None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._crash: BaseException | None = None

    @property
    def is_open(self) -> bool:
        return not self._end.done()

    @property
    def reason(self) -> BrokerUnavailable | None:
        """Why it ended; None while open and when we closed it."""
        return self._end.result() if self._end.done() else None

    def end(self, reason: BrokerUnavailable | None) -> None:
        """End, for this reason (None: closed by us). The first reason stays."""
        if not self._end.done():
            self._end.set_result(reason)

    def crash(self, error: BaseException) -> None:
        """End because of a bug: ``error`` is raised when the session is closed."""
        self._crash = self._crash or error
        self.end(BrokerUnavailable(f"a callback of the session raised {type(error).__name__}: {error}"))

    async def wait(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - returns, does not raise
        """Wait for the end; False when ``timeout`` seconds pass first."""
        await asyncio.wait([self._end], timeout=timeout)
        return self._end.done()

    def raise_if_ended(self) -> None:
        if self._end.done():
            raise ended(self.reason)

    async def ended_soon(self) -> BrokerUnavailable:
        """The error to raise for a lost connection; its reason arrives a few steps after its effects."""
        await self.wait(1.0)
        return ended(self.reason)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end, even when the caller is cancelled: to cut an RPC short costs its channel."""
        if self._end.done():
            work.close()
            raise ended(self.reason)
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as cancelled:
            if task.cancelled() and is_phantom(cancelled):
                raise await self.ended_soon() from None
            task.add_done_callback(self._look_at_abandoned)
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that this session owns: it is over before the session is."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """After the end: wait for the tasks, and cancel those that do not end by themselves."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=_TASKS_TIMEOUT)
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)

    def raise_crash(self) -> None:
        crash, self._crash = self._crash, None
        if crash is not None:
            raise crash

    def _look_at_abandoned(self, task: asyncio.Task[Any]) -> None:
        """What the caller did not wait for may fail as a broker does, but not in another way."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, QworkerError):
            self.crash(error)
