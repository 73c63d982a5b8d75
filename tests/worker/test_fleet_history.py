"""The fleet's history on a real stream: what workers tell, and what one that is new makes of it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import structlog

from qworker import Client
from qworker.broker.base import Properties, Session
from qworker.broker.fast.session import FastConnector
from qworker.broker.reference.session import AioPikaConnector
from qworker.policy.eviction import Gdsf
from qworker.policy.history import MINUTE, Minute
from qworker.policy.residency import Residency
from qworker.telemetry.counters import Counters
from qworker.wire.topology import EVENTS, HISTORY, HISTORY_NEWS, static_topology
from qworker.worker import keeper
from qworker.worker.fleet_history import FleetHistory
from qworker.worker.hot_zone import HotZone
from tests.support.broker import Inbox, classic
from tests.support.waiting import wait_until
from tests.worker.conftest import SIZE
from tests.worker.doubles import BackendDouble, Running, is_hot

X = np.ones((2, 3), np.float32)


def zone() -> HotZone:
    return HotZone(Residency(100, Gdsf()), time.monotonic, Counters())


def rows(*requests: tuple[str, int]) -> list[Minute]:
    last = int(time.time() // MINUTE) - 1
    return [Minute(last, model, count, 1, 0.5, 0.0, SIZE) for model, count in requests]


async def opened(session: Session) -> FleetHistory:
    """On a virtual host with the topology, and the stream declared."""
    await session.declare(*static_topology("quorum"))
    history = FleetHistory(zone())
    await history.replay(session)
    return history


async def test_a_new_worker_loads_what_the_fleet_is_asked_for(
    running: Running, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """A machine without a history of its own starts with the models that the others are called for most."""
    async with await AioPikaConnector(amqp_url).connect() as session:
        history = await opened(session)
        await history.publish(session, rows(("a", 1), ("b", 40), ("c", 30), ("not-here", 99)))
        await session.publish(EVENTS, HISTORY_NEWS, b"\xff of another kind", Properties())
        await history.publish(session, rows(("c", 30)))
    settings = {"fleet_history": True, "warm_start": 0.7, "memory": 3 * SIZE + SIZE // 2}
    async with running(amqp_url, identities, backend, **settings) as worker:
        await wait_until(lambda: is_hot(worker, "b") and is_hot(worker, "c"), 20)
        assert worker.zone.held == 2 * SIZE
        found = worker.zone.history()
        assert found["c"].count == pytest.approx(60, rel=0.01)
        assert found["b"].nbytes == SIZE


async def test_a_worker_tells_the_fleet(
    running: Running,
    amqp_url: str,
    client: Client,
    identities: Path,
    backend: BackendDouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was asked for in a minute is on the stream when it is over, for whoever reads it then."""
    monkeypatch.setattr(keeper, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(keeper, "SAVE_SECONDS", 0.1)
    take = keeper.Minutes.take

    def take_all(self: keeper.Minutes, *, all_of_it: bool = True) -> list[Minute]:
        return take(self, all_of_it=all_of_it)  # no minute is waited for

    monkeypatch.setattr(keeper.Minutes, "take", take_all)
    async with (
        running(amqp_url, identities, backend, fleet_history=True) as worker,
        await AioPikaConnector(amqp_url).connect() as session,
    ):
        for model in ("a", "b", "a"):
            await client.call(model, {"x": X}, timeout=20)

        async def is_told() -> bool:
            fresh = zone()
            await FleetHistory(fresh).replay(session)
            return {model: round(usage.count) for model, usage in fresh.history().items()} == {"a": 2, "b": 1}

        await wait_until(is_told, 20)
        assert worker.counters.loads == 2


async def test_without_streams_a_worker_works_all_the_same(
    running: Running, amqp_url: str, client: Client, identities: Path, backend: BackendDouble
) -> None:
    """The broker refuses the stream (here, a queue of another kind has its name): that is told once, as information."""
    async with await AioPikaConnector(amqp_url).connect() as session:
        await session.declare(classic(HISTORY))
    with structlog.testing.capture_logs() as logs:
        async with running(amqp_url, identities, backend, fleet_history=True) as worker:
            await wait_until(lambda: any(line["event"] == "history.no_stream" for line in logs), 20)
            await client.call("a", {"x": X}, timeout=20)
            assert worker.counters.reconnects == 0
    assert not [line for line in logs if line["log_level"] in ("warning", "error")]


async def test_marks_and_others_words_are_no_history(amqp_url: str) -> None:
    """Each start leaves a mark in the stream, and whoever may write there can write anything: nobody is harmed."""
    async with await AioPikaConnector(amqp_url).connect() as session:
        await opened(session)
        for word in (b"", b"minute,model", b"\x00" * 100, b'{"minute": 1}'):
            await session.publish(EVENTS, HISTORY_NEWS, word, Properties())
        fresh = zone()
        assert await FleetHistory(fresh).replay(session) == 0
        assert fresh.history() == {}
        inbox = Inbox()
        await session.consume(HISTORY, inbox.take, prefetch=100, stream_from="first")
        await wait_until(lambda: len(inbox) == 6)


async def test_a_stream_that_cannot_be_read_ends_no_worker(amqp_url: str) -> None:
    """A broker that is still starting declares it and refuses to send it: what was learnt here has to do."""

    class Gone(FleetHistory):
        async def _declare(self, session: Session) -> bool:
            found = await super()._declare(session)
            await session.delete_queue(HISTORY)
            return found

    async with await FastConnector(amqp_url).connect() as session:
        await session.declare(*static_topology("quorum"))
        with structlog.testing.capture_logs() as logs:
            assert await Gone(zone()).replay(session) == 0
        assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["history.replay_cut_short"]
        assert session.is_open
