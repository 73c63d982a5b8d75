"""One model's life on this worker: from a hint to serving, and out again.

``policy.claim`` says which step comes next; each method here does one step and says how it ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import structlog

from qworker.broker.base import Properties, Session
from qworker.errors import (
    BrokerError,
    BrokerUnavailable,
    CorruptModel,
    JobError,
    LoadFailed,
    ModelNotFound,
    ModelTooLarge,
    ModelUnavailable,
    QworkerError,
    UnknownModel,
)
from qworker.policy.claim import Claim, Outcome, Step, advance, force, holds_hint
from qworker.store.card import Card
from qworker.wire.topology import BATCH_NEWS, EVENTS, Lane, announcement, claimed, lane_queue, lease_queue
from qworker.worker.batcher import Batcher
from qworker.worker.hot_zone import REPLICA, SPARE, wait_at_most
from qworker.worker.intake import Hint
from qworker.worker.load_guard import Held, Quarantined, known_as
from qworker.worker.loader import Loaded, NoRoom
from qworker.worker.offline import OfflineLane
from qworker.worker.parts import Parts
from qworker.worker.reply_check import is_costly
from qworker.worker.serve import Server, Serving
from qworker.worker.subscriptions import Subscriptions
from qworker.worker.sweep import wake

log = structlog.get_logger(__name__)

CONSUMER_LOOK = 5.0
"""Seconds between looks at what the broker counts, and for a batch queue that is new."""
RECLAIM_PAUSE, LONGEST_RECLAIM_PAUSE = 0.5, 2.0
"""The broker needs a moment to see that our former connection is dead and to free its lease."""
REFUSING_LOOK = 0.2
BLOCKED_LOOK = 0.2
ONLINE_LOOK = 0.5
LOOKS, LOOK_PAUSE = 4, 0.03
LANES: tuple[Lane, ...] = ("jobs", "batch")


class HotModel:
    """A tenant of the hot zone.

    Owned here, on the event loop: the claim, the session that holds its lease, its consumers and engine.
    """

    def __init__(self, model: str, backlog: bool, hint: Hint, parts: Parts) -> None:
        self.model = model
        self.claim = Claim(slots=parts.max_replicas, backlog=backlog)
        self.task: asyncio.Task[None] | None = None
        self.next_hint: tuple[bool, Hint] | None = None
        """A hint that came while this claim was on its way out: it starts the next one."""
        self._hint = hint
        self._parts = parts
        self._session: Session | None = None
        self._subscribed: Subscriptions | None = None  # from the start of ``run`` on
        self._loaded: Loaded | None = None
        self._reclaim_until = 0.0
        self._stirred = asyncio.Event()  # something happened that a serving model must look at
        self._leaving = False
        self._stopped = False
        self._forced = False
        self._draining = False  # whether the zone counts us as on the way out
        self._evicted = False  # whether it told us to go
        self._ready_lane: Lane = "jobs"  # where the last look found jobs; online ones come first
        self._steps: dict[Step, Callable[[], Awaitable[Outcome]]] = {
            Step.LEASE: self._lease,
            Step.ANNOUNCE: self._announce,
            Step.LOOK: self._look,
            Step.LOAD: self._load,
            Step.CONSUME: self._consume,
            Step.SERVE: self._serve,
            Step.CANCEL: self._cancel,
            Step.LOOK_BACK: self._look_back,
            Step.DROP_LEASE: self._drop_lease,
            Step.LOOK_LAST: self._look_last,
            Step.WAKE: self._wake,
            Step.UNLOAD: self._unload,
        }

    async def run(self) -> None:
        """Go through the claim's steps until it is done."""
        parts = self._parts
        parts.zone.enter(self.model, self)
        try:
            async with asyncio.TaskGroup() as jobs:
                measured = parts.counters.measures.of(self.model)
                self._server = Server(
                    self.model, parts.zone, parts.settler, jobs, parts.limits, measured, parts.cancelled
                )
                self._jobs = jobs
                self._offline = OfflineLane(
                    lambda zone: Server(self.model, zone, parts.settler, jobs, parts.limits, None, parts.cancelled),
                    parts.zone,
                    parts.offline_threads,
                    parts.threads,
                )
                self._subscribed = self._subscribe()
                while self.claim.step is not Step.DONE:
                    await self._advance()
                if self._stopped:  # not before the lease is free: others would find it taken and drop the hint
                    await self._hint.give_back()
        finally:
            parts.zone.left(self.model)
            parts.settler.progress.left(self.model, called_again=self.next_hint is not None)

    def evicted(self, *, forced: bool, reason: str) -> None:
        """Told by the zone, which counts our bytes as on their way back already."""
        log.info("model.evicted", model=self.model, forced=forced, reason=reason)
        if not self._draining:
            self._parts.counters.measures.chronicle.note("evicted", self.model, reason)
            self._parts.counters.evictions += 1
            if self._loaded is not None:
                self._parts.counters.evicted_bytes += self._loaded.card.resident_bytes
        self._draining = self._evicted = True
        self._go(forced=forced)

    def stop(self) -> None:
        """Told by the worker, which stops: go, and do not come back."""
        self._stopped = True
        self._go(forced=True)
        self._parts.zone.give_up(self.model)  # a load that still waits for bytes waits no longer

    def leave(self) -> None:
        """Told by an operator: go. It may come back for the next job."""
        self._go(forced=True)
        self._parts.zone.give_up(self.model)

    def look_again(self) -> None:
        """Told by the worker: the session has ended, and the lease with it, or there is a lane that was not there."""
        self._stirred.set()

    def consumers(self) -> tuple[int, dict[str, int]]:
        """How many consumers we have, as we believe, and how many the broker counts in each lane."""
        mine = self._subscribed
        return (mine.expected, dict(mine.counted)) if mine is not None else (0, {})

    def cancel(self, job_ids: AbstractSet[str], why: JobError) -> tuple[set[str], set[str]]:
        """See ``Server.cancel``. A load goes on: others may want it."""
        if self._loaded is None:
            return set(), set()
        (ended, run), (also_ended, also_run) = (
            lane.cancel(job_ids, why) for lane in (self._server, self._offline.server)
        )
        return ended | also_ended, run | also_run

    def _go(self, *, forced: bool) -> None:
        self._forced = self._forced or forced
        self._leaving = True
        self._stirred.set()

    async def _advance(self) -> None:
        try:
            outcome = await self._steps[self.claim.step]()
        except BrokerUnavailable as error:
            log.info("model.session_lost", model=self.model, step=self.claim.step, reason=str(error))
            outcome = Outcome.LOST
            self._reclaim_until = self._parts.reclaim_until(self._session)
            self._subscriptions.forget()
            self._server.session_lost()
            self._offline.session_lost()
            # The zone has us leaving: with the lease gone too, there is no way back into the hot set.
            self._forced = self._forced or self._draining
        if self._forced:
            self.claim = force(self.claim)
        self.claim = advance(self.claim, outcome)
        if not holds_hint(self.claim) and not self._stopped:
            await self._hint.done()

    # --- claim -----------------------------------------------------------------------------------

    async def _lease(self) -> Outcome:
        if self.claim.loaded and self.claim.tries_left < Claim().tries_left and self.claim.slot == 0:
            await asyncio.sleep(RECLAIM_PAUSE)
        session = await self._parts.sessions.current()
        if session is not None and not self.claim.loaded:
            await self._until_unblocked(session)  # intake stops while the broker takes no results
        if session is None or (self._leaving and not self.claim.loaded):
            return Outcome.LEAVE
        self._session = session
        if self.claim.loaded:
            outcome = await self._reclaim(session)
        else:
            outcome = Outcome.GOT if await session.lease(self._lease_queue()) else Outcome.TAKEN
        self._parts.counters.measures.leases[outcome] += 1
        return outcome

    async def _reclaim(self, session: Session) -> Outcome:
        """Take a lease for what is loaded already, with patience: the one that has it may be our former connection.

        One that broke in silence lives on at the broker until heartbeats are missed. To unload all hot models in
        the meantime, and load them again, would cost far more than to hold their bytes for as long.
        """
        pause = RECLAIM_PAUSE
        while True:
            for slot in range(self.claim.slots):
                if await session.lease(lease_queue(self.model, slot)):
                    self.claim = replace(self.claim, slot=slot)
                    return Outcome.GOT
            if self._parts.clock() >= self._reclaim_until:
                return Outcome.TAKEN
            self._stirred.clear()
            if self._leaving:
                return Outcome.LEAVE
            await wait_at_most(self._stirred, pause)
            pause = min(2 * pause, LONGEST_RECLAIM_PAUSE)

    async def _announce(self) -> Outcome:
        session = self._on_session()
        await session.declare(*announcement(self.model, self.claim.slot))
        news = BATCH_NEWS if self.model in self._parts.registry.batch_lanes() else b""
        if session.blocked:
            return Outcome.OK
        if not session.send(EVENTS, claimed(self.model), news, Properties(), _heard):
            await session.publish(EVENTS, claimed(self.model), news, Properties())
        return Outcome.OK

    async def _look(self) -> Outcome:
        """A job is routed before it is enqueued, and its hint can overtake it: so look a few times."""
        if self._hint.unasked:
            return Outcome.READY
        for _ in range(LOOKS - 1):
            if await self._jobs_ready() is Outcome.READY:
                return Outcome.READY
            await asyncio.sleep(LOOK_PAUSE)
        return await self._jobs_ready()

    async def _load(self) -> Outcome:
        while True:
            try:
                return await self._try_to_load()
            except Quarantined as put_off:
                if not await self._wait_out(put_off.held):
                    return Outcome.GAVE_UP

    async def _wait_out(self, put_off: Held) -> bool:
        """Keep the lease, and let the jobs wait, until loads that ended workers may be tried again; False: give up."""
        parts, session = self._parts, self._session
        if session is None or (self._hint.urgency == SPARE and not await self._is_called()):
            return False  # nobody waits for it
        await self._hint.done()  # in hand, it would keep away hints of other models
        until, look_at = parts.clock() + put_off.seconds, parts.clock() + CONSUMER_LOOK
        while parts.guards.holds(self.model) and (left := until - parts.clock()) > 0:
            self._stirred.clear()
            if self._leaving or not session.is_open:
                return False
            await wait_at_most(self._stirred, min(left, CONSUMER_LOOK))
            if parts.clock() > look_at:
                look_at += CONSUMER_LOOK
                try:
                    if known_as(await parts.loader.card(self.model)) != put_off.known_as:
                        return True  # other bytes have done no harm
                except QworkerError:
                    return True  # the next try finds that, too
        parts.guards.let_go(put_off)
        return not self._leaving

    async def _try_to_load(self) -> Outcome:
        """Raises Quarantined when its jobs are to wait because loads have ended workers."""
        parts, now = self._parts, self._parts.clock()
        if (why_not := parts.history.held(self.model, now)) is not None:
            return self._refuse(ModelUnavailable(why_not))
        try:
            card = await parts.loader.card(self.model)
        except ModelNotFound as error:
            return self._refuse(UnknownModel(str(error)))
        except QworkerError as error:
            return self._load_failed(f"card of {self.model}", error, at_fault=isinstance(error, CorruptModel))
        if not parts.history.may_try(known_as(card), now):
            known = parts.history.quarantine(known_as(card))
            if known is not None and parts.history.refused(known_as(card)):
                return self._refuse(ModelUnavailable(known.reason))
            return Outcome.GAVE_UP
        await self._hold(card)
        if self._leaving:
            return Outcome.GAVE_UP
        outcome = await self._load_card(card)
        if outcome is Outcome.GAVE_UP and self._hint.urgency == SPARE and await self._is_called():
            self._hint.urgency = 0  # there were no bytes to spare, and now a job waits for it as for any other
            outcome = await self._load_card(card)
        return outcome

    async def _hold(self, card: Card) -> None:
        """Let jobs come in runs, where models push each other out; see ``worker.brake``."""
        brake = self._parts.brake
        if brake.window <= 0 or self.claim.backlog or self._hint.unasked:
            return
        if not self._parts.zone.fits_free(card.resident_bytes, card.backend):
            await self._hint.done()  # in hand, it would keep away hints of models that fit
        await brake.hold(
            self.model, card.resident_bytes, card.load_seconds, card.backend, self._stirred, lambda: self._leaving
        )

    async def _load_card(self, card: Card) -> Outcome:
        parts = self._parts
        offline = self._ready_lane == "batch"
        watch = self._jobs.create_task(self._hurry_when_called()) if offline else None
        if offline:  # it may wait for long, and a hint in hand keeps online ones away
            await self._hint.done()
        session, well = self._session, False
        guard = parts.guards.of(session, card) if session is not None and session.is_open else None
        try:
            with parts.settler.progress.loading(card, parts.zone, self._jobs):
                loaded = await parts.loader.load(card, urgency=self._urgency(offline), guard=guard)
            well = True
        except Quarantined as error:
            if error.held.refusing:
                return self._refuse(ModelUnavailable(str(error)))
            log.warning("model.put_off", model=self.model, reason=str(error))
            raise
        except NoRoom as error:
            log.warning("model.no_room", model=self.model, reason=str(error))
            parts.counters.measures.load_failures["no_room"] += 1
            parts.counters.measures.chronicle.note("no_room", self.model, str(error))
            return Outcome.GAVE_UP
        except ModelTooLarge as error:
            return self._refuse(error)
        except QworkerError as error:
            return self._load_failed(known_as(card), error, at_fault=isinstance(error, LoadFailed | CorruptModel))
        except asyncio.CancelledError:
            if guard is not None:
                guard.abandoned()
            raise
        finally:
            if watch is not None:
                watch.cancel()
            if guard is not None:  # this process lives; nobody has to wait for the record to say so
                self._server.spawn(guard.ended(well=well))
        parts.history.succeeded(known_as(card))
        self._loaded = loaded
        for server, threads in ((self._server, parts.engine_threads), (self._offline.server, parts.offline_threads)):
            server.serving = Serving(
                self._batcher(loaded, server, threads),
                card,
                card.signature(),
                since=time.time(),
                load_seconds=loaded.load_seconds,
                costly=is_costly(card),
            )
        return Outcome.OK

    def _urgency(self, offline: bool) -> int:
        """How much its bytes are wanted; see ``HotZone.room``."""
        if self.claim.backlog:
            return REPLICA
        if offline:
            return -1
        return SPARE if self._hint.urgency == SPARE else max(0, self._hint.urgency)

    async def _hurry_when_called(self) -> None:
        """While a load for offline jobs waits for bytes, look for online ones: they need not be so patient."""
        while True:
            await asyncio.sleep(ONLINE_LOOK)
            try:
                depth = await self._on_session().depth(lane_queue("jobs", self.model))
            except BrokerUnavailable:
                return  # the next step of the claim finds that, too
            if depth is not None and depth.ready:
                self._parts.zone.hurry(self.model)
                return

    def _batcher(self, loaded: Loaded, server: Server, threads: ThreadPoolExecutor) -> Batcher:
        parts = self._parts
        return Batcher(
            loaded.engine,
            loaded.card,
            threads,
            parts.counters,
            lanes=parts.threads,
            max_delay=parts.max_queue_delay,
            may_come=server.may_come,
        )

    def _load_failed(self, known_as: str, error: QworkerError, *, at_fault: bool) -> Outcome:
        parts = self._parts
        parts.counters.load_failures += 1
        parts.counters.measures.load_failed(error)
        parts.counters.measures.chronicle.note("failed", self.model, str(error))
        reason = f"{self.model} cannot be loaded: {error}"
        known = parts.history.failed(known_as, parts.clock(), refuse=at_fault, reason=reason)
        log.error("model.load_failed", model=self.model, attempts=known.attempts, reason=str(error))
        if parts.history.refused(known_as):
            return self._refuse(ModelUnavailable(reason))
        return Outcome.FAILED

    def _refuse(self, error: JobError) -> Outcome:
        log.error("model.refused", model=self.model, code=error.code, reason=str(error))
        self._parts.counters.measures.chronicle.note("refused", self.model, str(error))
        self._server.serving = self._offline.server.serving = error
        return Outcome.REFUSED

    # --- serve -----------------------------------------------------------------------------------

    async def _consume(self) -> Outcome:
        session = self._on_session()
        await self._until_unblocked(session)  # results could not leave
        try:
            await self._subscriptions.start(session, self._card())
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            log.error("queue.missing", model=self.model, reason=str(error))
            await self._subscriptions.stop()
            return Outcome.FAILED
        return Outcome.OK

    async def _serve(self) -> Outcome:
        parts = self._parts
        if parts.max_replicas == 1 or self.claim.refusing:
            return await self._serve_on()
        watch = self._jobs.create_task(self._watch_backlog(self._on_session()))
        try:
            return await self._serve_on()
        finally:
            watch.cancel()

    async def _watch_backlog(self, session: Session) -> None:
        """Ask for replicas while there is more to do than can be done; go, when this one is needed no more."""
        parts, loaded = self._parts, self._loaded
        load_seconds = loaded.load_seconds if loaded is not None else 0.0
        if await parts.backlog_of(self.model).watch(
            session, self.claim.slot, load_seconds, lambda: self._server.in_hand
        ):
            self._go(forced=False)

    async def _serve_on(self) -> Outcome:
        while True:
            self._stirred.clear()
            if self._leaving:
                return Outcome.LEAVE
            self._on_session()
            await wait_at_most(self._stirred, REFUSING_LOOK if self.claim.refusing else CONSUMER_LOOK)
            in_hand = self._server.in_hand + self._offline.in_hand
            if self.claim.refusing and in_hand == 0 and await self._jobs_ready() is Outcome.EMPTY:
                return Outcome.EMPTY
            if not self._leaving:
                await self._mend()

    async def _mend(self) -> None:
        """See that the broker still has us as its consumer. Without its queue, there is nothing to serve."""
        try:
            await self._subscriptions.mend(self._on_session(), self._card(), look=not self.claim.refusing)
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            log.error("queue.missing", model=self.model, reason=str(error))
            self._go(forced=True)

    async def _cancel(self) -> Outcome:
        if not self._draining and self._loaded is not None:
            self._draining = True
            self._parts.zone.leaving(self.model)
        await self._subscriptions.stop()
        return Outcome.OK

    async def _look_back(self) -> Outcome:
        outcome = await self._jobs_ready()
        if self._evicted and self._ready_lane == "batch":
            outcome = Outcome.EMPTY  # offline jobs keep nobody who wants the bytes waiting: they are woken for later
        if outcome is Outcome.READY and not self._forced and self._loaded is not None:
            self._evicted = False
            self._draining = False
            self._leaving = False
            self._parts.zone.revived(self.model)
        return outcome

    # --- leave -----------------------------------------------------------------------------------

    async def _drop_lease(self) -> Outcome:
        await self._on_session().release(self._lease_queue())
        return Outcome.OK

    async def _look_last(self) -> Outcome:
        return await self._jobs_ready()

    async def _wake(self) -> Outcome:
        session = self._on_session()
        if session.blocked:
            return Outcome.OK  # nobody could take it up now either; the sweep finds the jobs later
        self._parts.counters.wakes += 1
        await wake(session, self.model, "left")
        return Outcome.OK

    async def _unload(self) -> Outcome:
        loaded = self._loaded
        assert loaded is not None, "the claim says loaded"
        if not self._draining:
            self._draining = True
            self._parts.zone.leaving(self.model)
        # A lost session leaves runs in progress; the engine is freed under none of them.
        await self._server.idle()
        await self._offline.stop()
        self._server.serving = self._offline.server.serving = None
        self._loaded = None
        await self._parts.loader.unload(loaded.card, loaded.engine)
        return Outcome.OK

    # --- parts of steps --------------------------------------------------------------------------

    def _lease_queue(self) -> str:
        return lease_queue(self.model, self.claim.slot)

    def _on_session(self) -> Session:
        """The session that holds our lease. Raises BrokerUnavailable once it has ended."""
        session = self._session
        if session is None or not session.is_open:
            raise BrokerUnavailable("the session that held the lease has ended")
        return session

    async def _jobs_ready(self) -> Outcome:
        session = self._on_session()
        for lane in LANES if self._parts.registry.may_have_batch_lane(self.model) else LANES[:1]:
            depth = await session.depth(lane_queue(lane, self.model))
            if depth is not None and lane == "batch":
                self._parts.registry.has_batch_lane(self.model)
            if depth is not None and depth.ready:
                self._ready_lane = lane
                return Outcome.READY
        return Outcome.EMPTY

    async def _is_called(self) -> bool:
        try:
            return await self._jobs_ready() is Outcome.READY
        except BrokerUnavailable:
            return False  # the next step of the claim finds that, too

    async def _until_unblocked(self, session: Session) -> None:
        """Wait while the broker takes no publishes, unless we are to leave."""
        while session.blocked and session.is_open and not self._leaving:
            self._stirred.clear()
            await wait_at_most(self._stirred, BLOCKED_LOOK)

    def _subscribe(self) -> Subscriptions:
        parts = self._parts
        return Subscriptions(
            self.model,
            self._server,
            self._offline,
            parts.registry,
            parts.counters,
            parts.ack_timeout,
            self._stirred.set,
            prefetch=parts.prefetch,
            lanes=parts.threads,
        )

    @property
    def _subscriptions(self) -> Subscriptions:
        assert self._subscribed is not None, "a step is taken only in run"
        return self._subscribed

    def _card(self) -> Card | None:
        return self._loaded.card if self._loaded is not None else None


def _heard(error: BrokerError | None) -> None:
    """News of a claim only spare the sweeper some looks: when they are lost, nobody is worse off for long."""
    if error is not None:
        log.debug("news.lost", reason=str(error))
