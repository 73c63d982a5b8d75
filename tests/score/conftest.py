"""A store of registered models, and workers that serve it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.models import copy_store
from tests.score.scoring import Scoring, registered_store


@pytest.fixture(scope="session")
def score_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of ``registered_store``. Tests copy it."""
    return registered_store(tmp_path_factory.mktemp("scored"))


@pytest.fixture
def fleet(amqp_url: str, score_store: Path, tmp_path: Path) -> Iterator[Fleet]:
    """No workers yet."""
    fleet = Fleet(amqp_url, copy_store(score_store, tmp_path / "store"), tmp_path / "workers")
    yield fleet
    fleet.stop()


@pytest.fixture
def scoring(fleet: Fleet, tmp_path: Path) -> Iterator[Scoring]:
    """``qworker score`` as a child process, on the fleet's broker and store."""
    scoring = Scoring(fleet.url, fleet.store, tmp_path)
    yield scoring
    scoring.stop()
