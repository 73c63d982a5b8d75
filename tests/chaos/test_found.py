"""What chaos runs have found, each told again in short."""

from __future__ import annotations

from pathlib import Path

from qworker.store.local import LocalStore
from qworker.telemetry.counters import Counters
from qworker.wire.topology import lane_queue, lane_topology, static_topology
from qworker.worker.registry import Registry
from qworker.worker.subscriptions import AckTimeout, Subscriptions
from tests.support.broker import CONNECTORS, Inbox, fill
from tests.support.waiting import wait_until


class _Server:
    """As much of a server as its consumers need."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.in_hand = 0
        self.window = 0

    def taker(self, _: object) -> object:
        return self.inbox.take

    def prefetch(self, least: int) -> int:
        return least


async def test_a_model_that_is_refused_answers_a_batch_lane_that_became_known(amqp_url: str, tmp_path: Path) -> None:
    """The batch lane was found while its model refused jobs: nobody consumed it, and the claim never ended."""
    registry, server = Registry(LocalStore(tmp_path), lambda: 0.0), _Server()
    consumers = Subscriptions(
        "echo",
        server,  # pyright: ignore[reportArgumentType]
        registry,
        Counters(),
        AckTimeout(1800),
        lambda: None,
        prefetch=8,
        lanes=1,
    )
    async with await CONNECTORS["fast"](amqp_url).connect() as session:
        await session.declare(*static_topology("quorum"), *lane_topology("jobs", "echo", "quorum"))
        await consumers.start(session, None)
        await session.declare(*lane_topology("batch", "echo", "quorum"))
        await fill(session, lane_queue("batch", "echo"), b"patient")
        registry.has_batch_lane("echo")
        await consumers.mend(session, None, look=False)
        await wait_until(lambda: server.inbox.bodies == [b"patient"], what="the job of the batch lane came")
        await server.inbox.deliveries[0].ack()
