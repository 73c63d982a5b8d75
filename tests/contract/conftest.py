"""Fixtures of the broker contract: the same tests for every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from qworker.broker.base import Connector, Session
from tests.support import leaks
from tests.support.broker import CONNECTORS, Connect


@pytest.fixture(params=list(CONNECTORS))
def make_connector(request: pytest.FixtureRequest) -> Callable[..., Connector]:
    """The implementation under test: takes a URL and settings, gives a connector."""
    return CONNECTORS[request.param]


@pytest.fixture
async def connect(make_connector: Callable[..., Connector], request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Opens sessions (on the test's own virtual host unless a URL is given) and closes them at the end."""
    sessions: list[Session] = []

    async def open_session(url: str | None = None, **settings: Any) -> Session:
        where = url or request.getfixturevalue("amqp_url")
        session = leaks.register_session(await make_connector(where, **settings).connect())
        sessions.append(session)
        return session

    yield open_session
    for session in sessions:
        await session.__aexit__(None, None, None)


@pytest.fixture
async def session(amqp_url: str, connect: Connect) -> Session:
    """An open session on an empty virtual host."""
    return await connect(amqp_url)
