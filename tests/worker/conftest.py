"""A store of identity models, and a client beside the worker under test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from qworker import Client
from tests.e2e.models import put
from tests.support.broker import CONNECTORS
from tests.support.models import identity
from tests.worker.doubles import MIB, BackendDouble, Cable, Running, run_worker

MODELS = ("a", "b", "c", "d")
SIZE = 20 * MIB


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models a to d, each of which takes 20 MiB by its card. Nobody writes into it."""
    root = tmp_path_factory.mktemp("identities") / "store"
    for name in MODELS:
        put(root, name, identity(), resident_bytes=SIZE)
    return root


@pytest.fixture
def backend() -> BackendDouble:
    return BackendDouble()


@pytest.fixture
async def client(amqp_url: str) -> AsyncIterator[Client]:
    """A client with a connection of its own, not through the cable."""
    async with Client(amqp_url) as client:
        yield client


@pytest.fixture
async def cable(amqp_url: str) -> AsyncIterator[Cable]:
    async with Cable(amqp_url) as cable:
        yield cable


@pytest.fixture(params=CONNECTORS)
def running(request: pytest.FixtureRequest) -> Running:
    """Starts a worker, on each implementation of the broker contract."""
    return partial(run_worker, CONNECTORS[request.param])
