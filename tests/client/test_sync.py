"""The blocking client: threads, errors, and its end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from qworker import SyncClient
from qworker.errors import BrokerUnavailable, CallTimeout, UnknownModel
from tests.client.responder import MODEL, Responder

pytestmark = pytest.mark.broker


def test_several_threads_share_one_client(amqp_url: str, responder: Responder) -> None:
    """Each thread gets the answers of its own calls."""
    with SyncClient(amqp_url) as client, ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda number: client.call(MODEL, {"x": number}, timeout=20), range(40))
        assert [int(result.arrays()["x"]) for result in results] == list(range(40))


def test_errors_arrive_in_the_calling_thread(amqp_url: str, responder: Responder) -> None:
    """With their own class, as on asyncio."""
    with SyncClient(amqp_url) as client:
        with pytest.raises(UnknownModel):
            client.call(MODEL, {"x": 1}, parameters={"act": "fail", "code": "unknown_model"})
        with pytest.raises(CallTimeout):
            client.call(MODEL, {"x": 1}, timeout=0.2, parameters={"act": "hold"})
        assert client.publish(MODEL, {"x": 1})


def test_opening_fails_where_it_is_opened() -> None:
    """The error is raised by `with`, and the thread is gone."""
    with pytest.raises(BrokerUnavailable), SyncClient("amqp://guest:guest@127.0.0.1:1/"):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "qworker-client"]


def test_a_closed_client_says_so(amqp_url: str) -> None:
    """Not a hang."""
    with SyncClient(amqp_url) as client:
        pass
    with pytest.raises(BrokerUnavailable, match="closed"):
        client.call(MODEL, {"x": 1})
    assert not [thread for thread in threading.enumerate() if thread.name == "qworker-client"]


def test_closing_while_a_thread_waits(amqp_url: str, responder: Responder) -> None:
    """The waiting thread is told and goes on."""
    told: list[BaseException] = []

    def wait() -> None:
        try:
            client.call(MODEL, {"x": 1}, parameters={"act": "hold"})
        except BrokerUnavailable as exc:
            told.append(exc)

    with SyncClient(amqp_url) as client:
        thread = threading.Thread(target=wait)
        thread.start()
        responder.seen.get(timeout=10)
    thread.join(10)
    assert len(told) == 1
