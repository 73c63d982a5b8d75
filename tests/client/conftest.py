"""Fixtures of the client's tests: a worker that is none of ours, on plain pika."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.responder import Responder


@pytest.fixture
def responder(amqp_url: str) -> Iterator[Responder]:
    """Answers the jobs of the model ``echo`` in this test's virtual host."""
    with Responder(amqp_url) as running:
        yield running
