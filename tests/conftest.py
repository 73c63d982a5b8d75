"""Fixtures of all suites: a private broker, a virtual host a test, and the leak checks.

A machine without RabbitMQ skips what needs one; where the CI environment variable is set it fails.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from qworker.broker.node import PrivateNode
from tests.support import leaks
from tests.support.rabbitmq import SuiteNode, start_node

_BROKER_FIXTURES = {"suite_node", "own_node", "make_node"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for a broker is marked ``broker``: nobody has to remember it."""
    for item in items:
        if _BROKER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.broker)


if os.environ.get("QWORKER_TEST_LOOP") == "uvloop":  # ``ops/test --rabbitmq 4`` says so; else asyncio's own loop

    def pytest_asyncio_loop_factories(
        config: pytest.Config,
        item: pytest.Item,
    ) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
        """All tests run on uvloop."""
        return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def no_history_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers of tests keep nothing in the home of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def suite_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuiteNode]:
    """The suite's broker with its supply of virtual hosts."""
    suite = SuiteNode(tmp_path_factory.mktemp("rabbitmq"))
    yield suite
    suite.node.stop()


@pytest.fixture
def node(suite_node: SuiteNode) -> PrivateNode:
    """The suite's broker. Never stop, kill or pause it: other tests use it too (see ``own_node``)."""
    return suite_node.node


@pytest.fixture
def amqp_url(suite_node: SuiteNode) -> str:
    """The URL of an empty virtual host of this test's own."""
    return suite_node.fresh_url()


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[PrivateNode]:
    """A broker of this test's own, to stop, kill, pause or alarm. Takes 4 to 8 s to start."""
    node = start_node(tmp_path / "rabbitmq")
    yield node
    node.stop(timeout=10.0)


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., PrivateNode]]:
    """Starts brokers with settings of the test's own (``conf``, ``tls``, ...) and stops them at the end."""
    nodes: list[PrivateNode] = []

    def make(**settings: object) -> PrivateNode:
        nodes.append(start_node(tmp_path / f"rabbitmq{len(nodes)}", **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop(timeout=10.0)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a task running, a broker session open, or bytes in a ledger.

    A closed session leaves nothing unacknowledged: what it had in hand is the broker's again.
    """
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("no_task_leaks")
    yield
    held = leaks.held_ledgers()
    leaks.forget_all()
    assert not held, f"left by the test: {held}"


@pytest.fixture
async def no_task_leaks() -> AsyncIterator[None]:
    """The part of ``no_leaks`` that needs the test's event loop."""
    before = asyncio.all_tasks()
    yield
    opened = leaks.open_sessions()
    left = await leaks.unfinished_tasks(before)
    assert not opened, f"broker sessions left open by the test: {opened}"
    assert not left, f"tasks left running by the test: {left}"
