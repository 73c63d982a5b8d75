"""The offline lane of a worker: jobs of ``qworker.batch`` run in threads of their own, which yield to online jobs.

``policy.lane`` decides when a run may begin. Online jobs are counted by the zone; offline ones are counted here, so
that they neither make a model dear nor keep it from leaving for an online one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from qworker.broker.base import Delivery, Session
from qworker.policy.lane import Share
from qworker.worker.hot_zone import HotZone
from qworker.worker.serve import Server

NICENESS = 5
"""A third of the CPU time of a thread that serves, where both want it: as loads have."""
PREFETCH = 32
JOBS_A_LANE = 3
"""One that runs, one that waits, and one whose answer is on its way to the broker: else a thread would run dry."""
AHEAD_BYTES = 2 << 20
"""Of job bodies that are decoded and wait for a thread; what else is in hand waits as it came."""


class OfflineThreads(ThreadPoolExecutor):
    """Runs what is submitted when online jobs leave room for it, in order. Submit on the event loop only.

    Owned here, on the event loop: the runs that wait, and the share.
    """

    def __init__(self, threads: int, share: float, zone: HotZone) -> None:
        super().__init__(threads, thread_name_prefix="offline", initializer=_give_way)
        self._zone = zone
        self._share = Share(share, threads)
        self._waiting: deque[Callable[[], Any]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._hurried = 0
        zone.on_quiet = self._look

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Nobody waits for the future: a run reports by itself."""
        self._waiting.append(lambda: fn(*args, **kwargs))
        self._look()
        return Future()

    def hurry(self, on: bool) -> None:
        """While a model leaves, its last jobs are not held back."""
        self._hurried += 1 if on else -1
        self._look()

    def _look(self) -> None:
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        while self._waiting:
            now = loop.time()
            at = self._share.next_at(0 if self._hurried else self._zone.online, now)
            if at is None:
                return
            if at > now:
                if self._timer is None:
                    self._timer = loop.call_at(at, self._wake)
                return
            self._begin(loop, self._waiting.popleft())

    def _wake(self) -> None:
        self._timer = None
        self._look()

    def _begin(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> None:
        self._share.began()

        def run() -> None:
            started = time.perf_counter()
            try:
                work()
            finally:
                seconds = time.perf_counter() - started
                loop.call_soon_threadsafe(self._ended, seconds)

        super().submit(run)

    def _ended(self, seconds: float) -> None:
        self._share.ended(seconds, self._zone.online, asyncio.get_running_loop().time())
        self._look()


class OfflineZone(HotZone):
    """What a server of offline jobs reports to: the count of them, and nothing that online work would feel."""

    def __init__(self, zone: HotZone, settled: Callable[[], None]) -> None:  # not super's: it has no table of its own
        self._zone = zone
        self._settled = settled

    def used(self, model: str) -> None:
        """An offline job makes no model dearer: a file of a million rows is no million wishes."""

    def started(self, model: str) -> None:
        self._zone.offline_started(model)

    def finished(self, model: str) -> None:
        self._zone.offline_finished(model)
        self._settled()


class OfflineLane:
    """One model's offline jobs in hand: a few are decoded and wait for a run, the others lie as they came.

    Owned here, on the event loop: the deliveries that were not begun.
    """

    def __init__(self, make_server: Callable[[HotZone], Server], zone: HotZone, threads: OfflineThreads, lanes: int):
        self.server = make_server(OfflineZone(zone, self._settled))
        self._threads = threads
        self._lanes = lanes
        self._held: deque[tuple[Callable[[Delivery], None], Delivery]] = deque()
        self._sizes: deque[int] = deque()
        self._stopping = False

    @property
    def in_hand(self) -> int:
        """Deliveries that are not settled."""
        return self.server.in_hand + len(self._held)

    def taker(self, session: Session) -> Callable[[Delivery], None]:
        """The callback for a consumer on ``session``."""
        take = self.server.taker(session)
        self._stopping = False

        def hold(delivery: Delivery) -> None:
            self._held.append((take, delivery))
            self._settled()

        return hold

    def _settled(self) -> None:
        """Take up what fits: enough for every thread, and no more than can be let go soon."""
        while self._held and not self._stopping:
            ahead = sum(self._sizes)
            body = len(self._held[0][1].body)
            while len(self._sizes) > self.server.in_hand:
                ahead -= self._sizes.popleft()
            if len(self._sizes) >= JOBS_A_LANE * self._lanes and ahead + body > AHEAD_BYTES:
                return
            take, delivery = self._held.popleft()
            self._sizes.append(body)
            take(delivery)

    async def stop(self) -> None:
        """Finish what has begun, and give the rest back. The consumer is cancelled by then."""
        self._stopping = True
        self.server.window = 0
        for delivery in self._let_go():
            await delivery.give_back()
        self._threads.hurry(True)
        try:
            await self.server.idle()
        finally:
            self._threads.hurry(False)

    def session_lost(self) -> None:
        """The broker has all of it back."""
        self._let_go()
        self.server.session_lost()

    def _let_go(self) -> list[Delivery]:
        """What was not begun. It comes again as a redelivery, perhaps to us, and has ended no worker."""
        held = [delivery for _, delivery in self._held]
        self._held.clear()
        for delivery in held:
            self.server.ward.firewall.survived(self.server.model, delivery.properties.message_id)
        return held


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
