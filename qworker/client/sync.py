"""The client for code that does not run on asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypedDict, TypeVar, Unpack

from qworker.client.client import Client
from qworker.client.waiting import OnProgress
from qworker.errors import BrokerUnavailable, QworkerError
from qworker.wire.messages import Result

_T = TypeVar("_T")


class JobOptions(TypedDict, total=False):
    """What ``Client.call`` and ``Client.publish`` both take; their docstrings say what it means."""

    timeout: float | None
    version: str | None
    outputs: Sequence[str]
    parameters: Mapping[str, Any] | None
    priority: int | None
    deadline: float | None
    content_type: str


class CallOptions(JobOptions, total=False):
    """Keyword arguments of ``Client.call``."""

    retry: bool
    progress: OnProgress | bool


class PublishOptions(JobOptions, total=False):
    """Keyword arguments of ``Client.publish``."""

    reply_to: str | None
    correlation_id: str | None
    progress: bool


class SyncClient:
    """A ``Client`` on a thread and an event loop of its own; several threads may call at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        # Added to and removed from by the waiting threads; each operation is one step of the interpreter.
        self._waiting: set[Future[Any]] = set()

    def __enter__(self) -> SyncClient:
        opened: Future[None] = Future()
        self._closing.clear()
        # A daemon, so that a program that forgets to close the client can still end.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(opened)), name="qworker-client", daemon=True
        )
        self._thread.start()
        try:
            opened.result()
        except CancelledError:
            self.__exit__()
            raise BrokerUnavailable("the client's thread ended while it was opening; its traceback says why") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        # First of all: an interrupt may bring us here before the thread has a loop to be told on.
        self._closing.set()
        loop, stop, thread = self._loop, self._stop, self._thread
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        if thread is not None:
            thread.join()
        for future in list(self._waiting):
            future.cancel()  # handed over in the loop's last moment, it would wait for ever
        self._loop = self._stop = self._thread = None

    def call(self, model: str, inputs: Mapping[str, Any], **options: Unpack[CallOptions]) -> Result:
        """Like ``Client.call``, blocking. ``progress`` is called on the client's thread."""
        return self._wait(self._client.call(model, inputs, **options))

    def publish(self, model: str, inputs: Mapping[str, Any], **options: Unpack[PublishOptions]) -> str:
        """Like ``Client.publish``, blocking."""
        return self._wait(self._client.publish(model, inputs, **options))

    def cancel(self, job_id: str, *, model: str | None = None) -> None:
        """Like ``Client.cancel``, blocking."""
        self._wait(self._client.cancel(job_id, model=model))

    async def _live(self, opened: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._client:
                opened.set_result(None)
                if not self._closing.is_set():
                    await self._stop.wait()
        except QworkerError as exc:
            if opened.done():
                raise
            opened.set_exception(exc)  # raised to whoever opens the client
        finally:
            opened.cancel()  # no effect once it is done; else the opener would wait for ever

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop is None or self._loop.is_closed():
            work.close()
            raise BrokerUnavailable("the client is closed; use it inside its `with` block")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waiting.add(future)
        try:
            return future.result()
        except CancelledError:
            raise BrokerUnavailable("the client was closed while the call was waiting") from None
        except BaseException:
            future.cancel()  # a KeyboardInterrupt here must not leave the call waiting over there
            raise
        finally:
            self._waiting.discard(future)
