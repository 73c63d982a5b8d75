"""The worker's life: connect, serve, and stop in two phases.

Everything concurrent hangs in one TaskGroup: an unexpected error anywhere ends the process non-zero, and
the broker gives its jobs to the others.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import structlog

from qworker.broker.base import Connector, Properties, Session
from qworker.config import Settings
from qworker.engine.base import Backend
from qworker.errors import BrokerUnavailable
from qworker.policy.backoff import LoadHistory
from qworker.policy.choice import make_eviction
from qworker.policy.claim import Hint as HintRule
from qworker.policy.claim import Step, on_hint
from qworker.policy.outcome import Budgets
from qworker.policy.placement import NOT_READY
from qworker.policy.residency import Residency
from qworker.store.base import BlobStore, Store
from qworker.telemetry.counters import Counters
from qworker.telemetry.watchdog import Watchdog
from qworker.wire.limits import Limits
from qworker.wire.topology import ANSWERED, EVENTS, lane_queue, lane_topology, static_topology
from qworker.worker.apart import Apart
from qworker.worker.brake import Brake
from qworker.worker.cancelled import Cancelled
from qworker.worker.control import Control
from qworker.worker.duty import Duty
from qworker.worker.headroom import Headroom
from qworker.worker.hot_model import HotModel
from qworker.worker.hot_zone import HotZone
from qworker.worker.intake import Hint, Intake
from qworker.worker.keeper import Keeper
from qworker.worker.load_guard import LoadGuards
from qworker.worker.loader import Loader, Rehearse
from qworker.worker.offline import OfflineThreads
from qworker.worker.orders import Orders
from qworker.worker.parts import Parts
from qworker.worker.peers import Peers
from qworker.worker.pulse import PULSE_SECONDS, Pulse
from qworker.worker.registry import Registry
from qworker.worker.replicas import Backlog
from qworker.worker.sessions import Sessions
from qworker.worker.settle import Settler
from qworker.worker.snapshot import snapshot
from qworker.worker.subscriptions import AckTimeout
from qworker.worker.sweep import Sweeper
from qworker.worker.watched import Watched

log = structlog.get_logger(__name__)

LANES_AT_ONCE = 64
_BEFORE_SERVING = frozenset({Step.LEASE, Step.ANNOUNCE, Step.LOOK, Step.LOAD})
RECLAIM_MARGIN = PULSE_SECONDS + 1.0
HEARTBEATS_TO_DEATH = 3
"""So many are missed before the broker gives up a connection, and frees its leases."""
LOAD_NICENESS = 5
"""A third of the CPU time of a thread that serves, where both want it."""


class Worker:
    """Serves the models of ``store`` to the broker behind ``connector``, within ``settings.memory`` bytes.

    Owned here: ``_tenants``, the models claimed on this worker, each with a task of its own.
    """

    def __init__(
        self,
        settings: Settings,
        connector: Connector,
        store: Store,
        backend: Backend | Mapping[str, Backend],
        budgets: Mapping[str, int] | None = None,
        blobs: BlobStore | None = None,
        rehearse: Rehearse | None = None,
    ) -> None:
        """``budgets``: bytes by backend, where the backends' memories differ; else all share ``settings.memory``.

        ``blobs``: for tensors that travel beside their messages. ``rehearse``: see ``Loader``.
        """
        self._settings = settings
        self.counters = Counters()
        clock = time.monotonic
        self._clock, self._started = clock, time.time()
        tables = {
            kind: _residency(settings, budget) for kind, budget in (budgets or {"": int(settings.memory)}).items()
        }
        self.zone = HotZone(tables, clock, self.counters)
        self._registry = Registry(store, clock)
        self._sessions = Sessions(connector, self.counters)
        self._pulse = Pulse(settings.name, self.counters, clock)
        self._watchdog = Watchdog(settings.watchdog, lags=self.counters.measures.loop_lag)
        self._engine_threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="engine")
        self._offline_threads = OfflineThreads(settings.threads, settings.batch_share, self.zone)
        self._load_threads = ThreadPoolExecutor(
            settings.max_concurrent_loads + 2,
            thread_name_prefix="load",
            # An engine's own threads are made while it loads, and would run at that priority for good.
            initializer=_give_way if settings.intra_op_threads == 1 else None,
        )
        self._tenants: dict[str, HotModel] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = asyncio.Event()
        tries = settings.max_attempts
        allowed = Budgets(crash=settings.max_crashes, device_fault=tries, unsent=tries)
        settler = Settler(settings.name, tries, int(settings.max_body), self.counters, allowed)
        settler.apart = None if blobs is None else Apart(blobs, int(settings.blob_limit))
        self._answered = settler.answered
        self._cancelled = Cancelled(clock)
        self._intake = Intake(
            self.claim,
            self._registry,
            settler,
            self.counters,
            load_slots=settings.max_concurrent_loads,
            queue_type=settings.queue_type,
            readiness=self._readiness if settings.placement == "ready" else None,
        )
        self._sweeper = Sweeper(self._registry, settings.sweep_interval, self.counters, clock)
        self._brake = Brake(
            self.zone,
            self.counters,
            clock,
            slots=settings.max_concurrent_loads,
            group_window=settings.group_window,
            max_hold=settings.max_cold_wait if settings.thrash_brake else 0.0,
        )
        self._keeper = Keeper(
            settings,
            self.zone,
            self.counters,
            self._sessions,
            self._registry,
            self._brake,
            self.claim,
            self._is_loading,
        )
        self._parts = Parts(
            zone=self.zone,
            loader=Loader(
                store,
                backend,
                self.zone,
                asyncio.Semaphore(settings.max_concurrent_loads),
                Headroom(int(settings.load_headroom)),
                self._load_threads,
                self.counters,
                clock,
                claim_timeout=settings.claim_timeout,
                load_timeout=settings.load_timeout,
                rehearse=rehearse,
            ),
            guards=LoadGuards(settler.firewall.book, self.counters, settings.max_load_crashes),
            sessions=self._sessions,
            settler=settler,
            history=LoadHistory(),
            registry=self._registry,
            engine_threads=self._engine_threads,
            offline_threads=self._offline_threads,
            counters=self.counters,
            clock=clock,
            limits=Limits(max_body_bytes=int(settings.max_body), max_blob_bytes=int(settings.blob_memory)),
            cancelled=self._cancelled,
            ack_timeout=AckTimeout(settings.consumer_timeout),
            prefetch=settings.prefetch,
            threads=settings.threads,
            max_queue_delay=settings.max_queue_delay,
            brake=self._brake,
            max_replicas=settings.max_replicas,
            backlog_of=partial(
                Backlog,
                counters=self.counters,
                clock=clock,
                slots=settings.max_replicas,
                target=settings.replica_backlog,
                linger=settings.replica_linger,
            ),
            reclaim_until=self._ghost_is_gone_by,
        )
        self._duty, self._peers = Duty(), Peers(settings.name, clock)
        self._watched = Watched(settings.name, self.snapshot, clock)
        self._orders = Orders(
            self._parts,
            self._tenants,
            self.claim,
            self._duty,
            self._peers,
            self._watched,
            self.snapshot,
            pin_quota=settings.pin_quota,
            pinned=settings.pin,
        )
        verbs = {"cancel": self._cancel, **self._orders.verbs()}
        self._control = Control(settings.name, verbs, self._answered.hear, self._peers.heard, self._batch_opened)

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until :meth:`stop`. Raises BrokerRefused or TopologyMismatch when serving is pointless."""
        try:
            async with self._watchdog, self._keeper, asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                zone = tasks.create_task(self.zone.run(), name="hot zone")
                registry = tasks.create_task(self._registry.run(), name="registry")
                orders = tasks.create_task(self._orders.run(), name="orders")
                sessions = tasks.create_task(self._sessions.run(self._declare, self._attend), name="sessions")
                await self._stopping.wait()
                await self._drain()
                for chore in (sessions, registry, orders, zone):
                    chore.cancel()
        finally:
            self._engine_threads.shutdown(wait=False, cancel_futures=True)
            self._offline_threads.shutdown(wait=False, cancel_futures=True)
            self._load_threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Ask for a stop: no new jobs, finish those in hand within the grace time, give the rest back."""
        self._stopping.set()

    async def _drain(self) -> None:
        log.info("worker.draining", hot=len(self._tenants), grace=self._settings.grace)
        self._sessions.stop()
        for tenant in list(self._tenants.values()):
            tenant.stop()
        leaving = [tenant.task for tenant in self._tenants.values() if tenant.task is not None]
        until = self._clock() + self._settings.grace
        if leaving:
            _, late = await asyncio.wait(leaving, timeout=self._settings.grace)
            for task in late:
                log.warning("model.abandoned", model=task.get_name(), reason="the grace time is over")
                task.cancel()
            if late:
                await asyncio.wait(late)
        try:
            await asyncio.wait_for(self._intake.rest(), max(0.0, until - self._clock()))
        except TimeoutError:  # jobs whose answers were not confirmed are in their queues again: they come twice
            log.warning("intake.abandoned", reason="the grace time is over")
        log.info("worker.drained", held=self.zone.held)

    # --- one session -----------------------------------------------------------------------------

    async def _declare(self, session: Session) -> None:
        """Declare what is there once, and the queues that registration did not."""
        queue_type = self._settings.queue_type
        await session.declare(*static_topology(queue_type))
        answered = self._answered.session_lost()
        if answered:
            await session.publish(EVENTS, ANSWERED, answered, Properties())
        await self._pulse.beat(session)  # an alarm is known before anything is taken in hand
        models = await self._registry.models()
        for at in range(0, len(models), LANES_AT_ONCE):
            some = models[at : at + LANES_AT_ONCE]
            depths = await session.depths([lane_queue("jobs", model) for model in some])
            missing = [model for model, depth in zip(some, depths, strict=True) if depth is None]
            await session.declare(*(each for model in missing for each in lane_topology("jobs", model, queue_type)))

    async def _check_lanes(self, session: Session) -> None:
        """Declare the queues that are there: the broker tells of other arguments. Nobody has to wait for that."""
        models = await self._registry.models()
        for at in range(0, len(models), LANES_AT_ONCE):
            await session.declare(
                *(
                    lane_topology("jobs", model, self._settings.queue_type)[0]
                    for model in models[at : at + LANES_AT_ONCE]
                )
            )

    async def _attend(self, session: Session) -> None:
        """Intake and sweep on ``session`` until it ends or the worker stops."""
        async with asyncio.TaskGroup() as tasks:
            chores = [
                tasks.create_task(self._take_part(session), name="duty"),
                tasks.create_task(_until_lost(self._watched.run(session)), name="watched"),
                tasks.create_task(_until_lost(self._check_lanes(session)), name="lanes"),
                tasks.create_task(_until_lost(self._pulse.run(session)), name="pulse"),
            ]
            tasks.create_task(_until_lost(self._control.run(session)), name="control")  # answers while we leave, too
            lost = tasks.create_task(session.wait_closed(), name="session")
            stopping = tasks.create_task(self._stopping.wait(), name="stopping")
            await asyncio.wait({lost, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for chore in chores:
                chore.cancel()
            stopping.cancel()
            reason = await lost  # while the models leave, the session stays open for them
        for tenant in self._tenants.values():
            tenant.look_again()
        if reason is not None:
            raise reason

    def _batch_opened(self, model: str) -> None:
        """Told by whoever made a batch queue: its jobs leave no hint where the model is hot."""
        self._registry.has_batch_lane(model)
        if (tenant := self._tenants.get(model)) is not None:
            tenant.look_again()

    async def _take_part(self, session: Session) -> None:
        """Intake and sweep, but for the time in which an operator has this worker drained."""
        assert self._tasks is not None, "sessions are opened in run"
        while True:
            await self._duty.until(drained=False)
            async with asyncio.TaskGroup() as tasks:
                chores = [
                    tasks.create_task(_until_lost(self._intake.run(session, self._tasks)), name="intake"),
                    tasks.create_task(_until_lost(self._sweeper.run(session)), name="sweeper"),
                ]
                await self._duty.until(drained=True)
                for chore in chores:
                    chore.cancel()

    def _ghost_is_gone_by(self, session: Session | None) -> float:
        """When the broker has certainly seen the end of ``session``, however silent it was."""
        return self._pulse.alive_at(session) + HEARTBEATS_TO_DEATH * self._settings.heartbeat + RECLAIM_MARGIN

    # --- tenants ---------------------------------------------------------------------------------

    def claim(self, model: str, backlog: bool, hint: Hint) -> bool:
        """Start to claim ``model``, or keep the hint for later; False when the hint is of no use."""
        if self._stopping.is_set() or self._tasks is None or self._duty.drained:
            return False
        tenant = self._tenants.get(model)
        rule = on_hint(tenant.claim if tenant is not None else None)
        if tenant is not None and rule is not HintRule.DROP:
            # One that is done but not yet gone is as good as one on its way out.
            if tenant.next_hint is not None:
                return False
            tenant.next_hint = (backlog, hint)
            return True
        if tenant is not None:
            return False
        self._tenants[model] = tenant = HotModel(model, backlog, hint, self._parts)
        tenant.task = self._tasks.create_task(self._host(tenant), name=model)
        return True

    async def _host(self, tenant: HotModel) -> None:
        try:
            await tenant.run()
        finally:
            del self._tenants[tenant.model]
        if tenant.next_hint is not None:
            backlog, hint = tenant.next_hint
            if not self.claim(tenant.model, backlog, hint):
                await (hint.give_back() if self._duty.drained else hint.done())

    def _readiness(self) -> int:
        """How ready we are for one more model. While loads fail here, not at all: room that nothing comes to fill stays
        free, and would draw every hint."""
        return NOT_READY if self._parts.history.failing(self._clock()) else self.zone.ready_level

    def _is_loading(self, model: str) -> bool | None:
        """Whether a claim has not got its model yet; None when there is no claim."""
        tenant = self._tenants.get(model)
        return None if tenant is None else tenant.claim.step in _BEFORE_SERVING

    # --- orders ----------------------------------------------------------------------------------

    async def _cancel(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._cancelled.carry_out(arguments, self._tenants)

    def _quarantined(self) -> list[dict[str, Any]]:
        """Builds that do not load: what they failed with, or which workers they ended, and when they are tried next."""
        now, clock = time.time(), self._clock()
        failed = [
            {
                "model": known.rsplit("/", 3)[0],  # see ``known_as``
                "attempts": each.attempts,
                "seconds": round(max(0.0, each.retry_at - clock), 1),
                "reason": each.reason,
            }
            for known, each in self._parts.history.all().items()
        ]
        killed = [
            {
                "model": each.model,
                "attempts": each.attempts,
                "seconds": round(max(0.0, each.retry_at - now), 1),
                "reason": each.reason,
            }
            for each in self._parts.guards.quarantined()
        ]
        return failed + killed

    # --- what others see -------------------------------------------------------------------------

    def not_ready(self) -> str | None:
        """Why this worker takes no jobs now, or None."""
        if self._stopping.is_set():
            return "draining"
        if self._duty.drained:
            return "drained by an operator: qworker workers resume"
        session = self._sessions.open
        if session is None:
            return "no connection to the broker"
        if session.blocked:
            return "the broker refuses publishes (memory or disk alarm)"
        return self._registry.trouble

    def state(self) -> dict[str, Any]:
        """A snapshot for people and programs: models with their states, the ledger, the counters."""
        return {
            "worker": self._settings.name,
            "ready": self.not_ready() is None,
            "reason": self.not_ready(),
            "models": [
                {
                    "model": row.model,
                    "state": str(row.state),
                    "nbytes": row.nbytes,
                    "key": row.key,
                    "in_hand": row.in_hand,
                    "pinned": row.pinned,
                    "seconds": round(self._clock() - row.since, 3),
                }
                for row in self.zone.rows()
            ],
            "claims": {model: str(tenant.claim.step) for model, tenant in self._tenants.items()},
            "draining": self._stopping.is_set(),
            "drained": self._duty.drained,
            "pins": self._orders.pins(),
            "held": self._held(),
            "peers": self._peers.known(),
            "broker": self._pulse.state(self._sessions.open),
            "quarantined": self._quarantined(),
            "refusing": [model for model, tenant in self._tenants.items() if tenant.claim.refusing],
            "waiting": [{"model": m, "seconds": s, "why": why} for m, s, why in self.zone.blocked()],
            "brake": self._brake.state(),
            "preloads": self._keeper.preloads(),
            "ledger": {"budget": self.zone.budget, "held": self.zone.held, "peak": self.zone.peak},
            "ledgers": self.zone.ledgers(),
            "consumers": self._consumers(),
            "loop": self._watchdog.state(),
            "counters": self.counters.as_dict(),
        }

    def snapshot(self) -> dict[str, Any]:
        """The same for those who watch."""
        return snapshot(self.state(), self.counters.measures, self._started)

    def _held(self) -> list[dict[str, Any]]:
        """Models that an operator keeps from being loaded."""
        held = self._parts.history.holds(self._clock())
        return [{"model": model, "seconds": round(s, 1), "reason": why} for model, (s, why) in held.items()]

    def _consumers(self) -> dict[str, dict[str, Any]]:
        """Of each model: how many this worker has, as it believes, and all that the broker counts by lane."""
        found = {model: tenant.consumers() for model, tenant in self._tenants.items()}
        return {model: {"expected": mine, "counted": counted} for model, (mine, counted) in found.items()}


def _residency(settings: Settings, budget: int) -> Residency:
    eviction = make_eviction(settings.eviction)
    residency = Residency(budget, eviction, min_residency=settings.min_residency, max_cold_wait=settings.max_cold_wait)
    for model in settings.pin:
        residency.pin(model)
    return residency


def _give_way() -> None:
    """Called in each thread that loads: hot models must not feel it, so it gets what they leave of the CPUs.

    The engines that they load run in other threads.
    """
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOAD_NICENESS)


async def _until_lost(chore: Coroutine[Any, Any, None]) -> None:
    """Run a chore of one session; that the session ends under it is no error of its own."""
    try:
        await chore
    except* BrokerUnavailable as lost:
        log.debug("chore.ended", reason=str(lost.exceptions[0]))
