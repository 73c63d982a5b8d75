"""A store of made-up models, and fleets of real workers on virtual hosts of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.caller import Caller
from tests.e2e.fleet import Fleet
from tests.e2e.models import copy_store, fill


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is ``e2e``."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def made_up_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of ``models.fill``. Tests copy it."""
    root = tmp_path_factory.mktemp("made-up") / "store"
    fill(root)
    return root


@pytest.fixture
def fleet(amqp_url: str, made_up_store: Path, tmp_path: Path) -> Iterator[Fleet]:
    """No workers yet: the test starts them, and says ``finish``."""
    fleet = Fleet(amqp_url, copy_store(made_up_store, tmp_path / "store"), tmp_path / "workers")
    yield fleet
    fleet.stop()


@pytest.fixture
def caller(amqp_url: str) -> Iterator[Caller]:
    """A plain AMQP client on the fleet's virtual host."""
    with Caller(amqp_url) as caller:
        yield caller
