"""What must not be left when a test ends: tasks, open sessions, held bytes.

Tests register what they want watched; the autouse fixture of ``tests/conftest.py`` looks at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar


class _Opened(Protocol):
    @property
    def is_open(self) -> bool: ...


_Session = TypeVar("_Session", bound=_Opened)

_sessions: list[_Opened] = []
_ledgers: list[tuple[str, Callable[[], int]]] = []


def register_session(session: _Session) -> _Session:
    """Watch a broker session: it must be closed when the test ends. Returns the session."""
    _sessions.append(session)
    return session


def register_ledger(held_bytes: Callable[[], int], name: str = "ledger") -> None:
    """Watch a byte ledger: ``held_bytes()`` must be 0 when the test ends."""
    _ledgers.append((name, held_bytes))


def forget_all() -> None:
    _sessions.clear()
    _ledgers.clear()


def open_sessions() -> list[_Opened]:
    return [session for session in _sessions if session.is_open]


def held_ledgers() -> list[str]:
    return [f"{name} holds {held()} bytes" for name, held in _ledgers if held() != 0]


async def unfinished_tasks(before: set[asyncio.Task[object]], grace: float = 2.0) -> list[asyncio.Task[object]]:
    """Tasks that are neither in ``before`` nor the current one, and do not end within ``grace`` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace
    while True:
        left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
        if not left or loop.time() > deadline:
            return left
        await asyncio.sleep(0.01)
