"""Hears what all workers tell to those who watch, and keeps telling them that somebody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from qworker.broker.base import Delivery, Session
from qworker.errors import InvalidInput
from qworker.watch.fleet import Fleet
from qworker.watch.orders import Answers, Desk, NoWorker
from qworker.wire.control import decode_snapshot
from qworker.wire.topology import EVENTS, Binding, Exchange, snapshot_of, watch_queue

CALL = 4.0
"""Seconds between two roll calls."""
PATIENCE = 2.0
WATCHED = 3 * CALL
"""For so long each call asks for snapshots: one that is lost leaves no gap."""
PREFETCH = 200


class Feed:
    """Fills ``fleet`` while ``run`` runs. Owned here: ``heard``, the snapshots by worker so far."""

    def __init__(self, session: Session, desk: Desk) -> None:
        self.fleet = Fleet()
        self.heard: dict[str, int] = {}
        self._session = session
        self._desk = desk

    async def run(self) -> None:
        """Until cancelled. Raises BrokerUnavailable when the session ends."""
        queue = watch_queue(uuid4().hex)
        await self._session.lease(queue)
        # The exchange, too: whoever watches may be there before the first worker.
        await self._session.declare(Exchange(EVENTS, "topic"), Binding(EVENTS, queue, snapshot_of("#")))
        async with asyncio.TaskGroup() as tasks:

            def take(delivery: Delivery) -> None:
                self._take(delivery)
                if not delivery.ack_soon():
                    tasks.create_task(delivery.ack())

            consumer = await self._session.consume(queue, take, prefetch=PREFETCH)
            calls = tasks.create_task(self._call())
            try:
                lost = await self._session.wait_closed()
            finally:
                calls.cancel()
                await consumer.close()
            if lost is not None:
                raise lost

    def view(self) -> dict[str, Any]:
        return {"at": time.time(), **self.fleet.view(time.monotonic())}

    async def order(self, verb: str, model: str | None, worker: str | None) -> Answers:
        """Give one order, about a model or a worker, and hear the answers."""
        return await self._desk.give(verb, {} if model is None else {"model": model}, worker=worker)

    async def _call(self) -> None:
        while True:
            try:
                answers = await self._desk.give("watch", {"seconds": WATCHED}, patience=PATIENCE)
            except NoWorker:
                self.fleet.called((), {})
            else:
                results = answers.results()
                for result in results.values():
                    self._tell(result["snapshot"])
                self.fleet.called(results, answers.silent)
            await asyncio.sleep(CALL)

    def _take(self, delivery: Delivery) -> None:
        try:
            snapshot = decode_snapshot(delivery.body)
        except InvalidInput:
            return  # of another version than ours, perhaps: its worker's answers to the calls are refused as well
        self._tell(snapshot)

    def _tell(self, snapshot: Mapping[str, Any]) -> None:
        worker = str(snapshot["worker"])
        self.heard[worker] = self.heard.get(worker, 0) + 1
        self.fleet.take(snapshot, time.monotonic())
