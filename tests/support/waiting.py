"""Waiting by condition, never by sleep."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def wait_until(
    predicate: Callable[[], Any | Awaitable[Any]],
    timeout: float = 10.0,  # noqa: ASYNC109 - fails with what was waited for
    *,
    what: str | None = None,
    every: float = 0.01,
) -> Any:
    """Return the first true value of ``predicate`` (sync or async); fail the test after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {timeout:g} s: {what or inspect.getsource(predicate).strip()}")
        await asyncio.sleep(every)


def wait_until_sync(predicate: Callable[[], Any], timeout: float = 10.0, *, what: str | None = None) -> Any:
    """``wait_until`` for tests without an event loop."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {timeout:g} s: {what or inspect.getsource(predicate).strip()}")
        time.sleep(0.01)
    return value
