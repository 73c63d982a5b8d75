"""From a cold model to a warm engine: fetch and verify, book the bytes, take a slot, load, warm up, measure.

*Fetch first, evict last*: nobody is evicted for a model whose bytes turn out to be missing or corrupt.
Every stage that fails gives back what the stages before it took.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog

from qworker.engine.base import Backend, Engine, ModelSource
from qworker.errors import JobError, LoadFailed, QworkerError
from qworker.store.base import Fetched, Store
from qworker.store.card import Card
from qworker.telemetry.counters import Counters
from qworker.worker.headroom import Headroom
from qworker.worker.hot_zone import Clock, HotZone
from qworker.worker.load_guard import LoadGuard, Quarantined, known_as

log = structlog.get_logger(__name__)
T = TypeVar("T")

Rehearse = Callable[[Card], Awaitable[None]]
"""Loads a build elsewhere. Raises LoadFailed for one that had better not be loaded here, StoreError."""

GROWTH_TOLERANCE, GROWTH_SLACK = 1.25, 32 << 20
"""A measured size within this factor and these bytes of the card's is noise: the worker's own traffic, and
the library's first use, move its RSS too."""


class NoRoom(QworkerError):
    """The bytes were not free within the claim's time. The jobs wait; the sweep will try again."""

    code = "model_unavailable"
    retryable = True


@dataclass(frozen=True, slots=True)
class Loaded:
    """A warm engine whose bytes are booked in the zone."""

    engine: Engine
    card: Card
    load_seconds: float


class Loader:
    """Loads models, at most ``slots`` at once. One load a model: the caller is single-flight."""

    def __init__(
        self,
        store: Store,
        backend: Backend | Mapping[str, Backend],
        zone: HotZone,
        slots: asyncio.Semaphore,
        headroom: Headroom,
        threads: ThreadPoolExecutor,
        counters: Counters,
        clock: Clock,
        *,
        claim_timeout: float,
        load_timeout: float,
        rehearse: Rehearse | None = None,
    ) -> None:
        """``rehearse``: to be called before the first load of a build here."""
        self._store = store
        self._backends: Mapping[str, Backend] = backend if isinstance(backend, Mapping) else {}
        self._only = None if isinstance(backend, Mapping) else backend
        self._zone = zone
        self._slots = slots
        self._headroom = headroom
        self._threads = threads
        self._counters = counters
        self._clock = clock
        self._claim_timeout = claim_timeout
        self._load_timeout = load_timeout
        self._rehearse = rehearse
        self._rehearsed: set[str] = set()  # builds that did well there, by ``known_as``
        self._measured: dict[str, int] = {}  # by digest: what a load here took, where the card said less
        self._in_progress = 0

    async def card(self, model: str) -> Card:
        """Raises ModelNotFound, CorruptModel, StoreError."""
        with self._counters.measures.stage("card"):
            return await self._in_thread(lambda: self._store.card(model))

    async def load(self, card: Card, *, urgency: int = 0, guard: LoadGuard | None = None) -> Loaded:
        """A warm engine. From here its bytes are held until the caller unloads it.

        The more urgent one gets bytes first, as far as ``policy.residency`` lets it pass.

        Raises CorruptModel and LoadFailed (this file will not load), StoreError (it may later), NoRoom,
        ModelTooLarge, Quarantined (``guard`` says that it has ended workers).
        """
        try:
            return await self._load(card, urgency, guard)
        finally:
            self._counters.measures.chronicle.leave(card.model)

    async def _load(self, card: Card, urgency: int, guard: LoadGuard | None) -> Loaded:
        measures = self._counters.measures
        stages, expected = measures.chronicle, card.load_seconds
        stages.enter(card.model, "fetch", expected)
        with measures.stage("fetch"):
            fetching = self._in_thread(lambda: self._store.fetch(card))
            found, why_not = await asyncio.gather(fetching, _check(guard))
        if why_not is not None:
            raise why_not
        source, sample = [_source(card, found)], found.sample
        del found  # the file's bytes live in ``source`` alone, and leave it with the load
        nbytes = max(card.resident_bytes, self._measured.get(card.digest, 0))
        stages.enter(card.model, "room", expected)
        with measures.stage("room"):
            if not await self._zone.room(
                card.model, nbytes, within=self._claim_timeout, kind=card.backend, urgency=urgency
            ):
                if kept_out := self._zone.kept_out(nbytes, card.backend):
                    raise NoRoom(f"{card.model} {kept_out}: unpin one, or serve it on another worker")
                raise NoRoom(f"{card.model} needs {nbytes} bytes, and they were not free in {self._claim_timeout:g} s")
        asked = self._clock()
        stages.enter(card.model, "slot", expected)
        try:
            overshoot = max(0, (card.peak_bytes or 0) - nbytes)
            async with self._slots, self._headroom.hold(overshoot):
                measures.stages["slot"].observe(self._clock() - asked)
                stages.enter(card.model, "load", expected)
                if self._rehearse is not None and known_as(card) not in self._rehearsed:
                    await self._rehearse(card)  # it takes about what is booked for the load
                    self._rehearsed.add(known_as(card))
                if guard is not None:
                    await guard.begin()
                return await self._load_booked(card, source, sample, nbytes)
        except BaseException:
            # Whatever went wrong, the bytes are free again: an engine that was made has been closed, or will
            # be by its thread when we were cancelled, which means that the worker ends.
            self._zone.gone(card.model)
            raise

    async def unload(self, card: Card, engine: Engine) -> None:
        """Free the engine and give its bytes back to the zone once the memory has gone back to the system."""
        backend = self._backend(card)
        before = backend.used_bytes()
        await self._in_thread(lambda: _free(backend, engine))
        self._zone.gone(card.model)
        self._counters.unloads += 1
        self._counters.measures.unloaded(card.model)
        log.info("model.unloaded", model=card.model, bytes_returned=before - backend.used_bytes())

    async def _load_booked(self, card: Card, source: list[ModelSource], sample: Path | None, nbytes: int) -> Loaded:
        backend = self._backend(card)
        self._in_progress += 1
        self._counters.measures.loading += 1
        alone = self._in_progress == 1
        before, started = backend.used_bytes(), self._clock()
        try:
            engine = await self._make(card, source, sample)
            alone = alone and self._in_progress == 1
        finally:
            self._in_progress -= 1
            self._counters.measures.loading -= 1
        seconds = self._clock() - started
        try:
            self._check_size(card, nbytes, backend.used_bytes() - before if alone else None)
        except NoRoom:
            await self._in_thread(lambda: _free(backend, engine))
            raise
        self._zone.loaded(card.model, seconds)
        self._counters.loads += 1
        self._counters.measures.loaded(card.model, seconds)
        log.info("model.loaded", model=card.model, version=card.version, seconds=round(seconds, 4), bytes=nbytes)
        return Loaded(engine, card, seconds)

    async def _make(self, card: Card, source: list[ModelSource], sample: Path | None) -> Engine:
        """Load and warm up in a thread. Raises LoadFailed."""
        backend = self._backend(card)

        marks: list[float] = []

        def make() -> Engine:
            marks.append(time.perf_counter())
            engine = backend.load(source.pop())
            marks.append(time.perf_counter())
            try:
                if sample is not None:
                    with np.load(sample, allow_pickle=False) as arrays:
                        backend.warm_up(engine, dict(arrays))
                elif card.warmed or card.plan is not None:  # a plan says itself what it takes
                    backend.warm_up(engine, None)
                # else the probe found no inputs that suit it: the first job warms it up
                backend.trim()
                marks.append(time.perf_counter())
            except JobError as error:
                engine.close()
                raise LoadFailed(f"{card.model} loads, but does not run on its warm-up sample: {error}") from error
            except BaseException:
                engine.close()
                raise
            return engine

        future = self._threads.submit(make)
        try:
            engine = await self._made(card, asyncio.wrap_future(future))
            self._counters.measures.made(marks)
            return engine
        except asyncio.CancelledError:
            future.add_done_callback(_close_abandoned)
            raise

    async def _made(self, card: Card, making: asyncio.Future[Engine]) -> Engine:
        """What the thread makes, if it is made within ``load_timeout``. Raises LoadFailed."""
        done, _ = await asyncio.wait({making}, timeout=self._load_timeout)
        if done:
            return making.result()
        # A thread cannot be stopped. The bytes stay booked until it ends, since it holds them.
        log.error("model.load_hangs", model=card.model, seconds=self._load_timeout)
        try:
            engine = await making
        except QworkerError as error:
            raise LoadFailed(f"{card.model} did not load in {self._load_timeout:g} s, and then: {error}") from error
        backend = self._backend(card)
        await self._in_thread(lambda: _free(backend, engine))
        raise LoadFailed(f"{card.model} took longer than load_timeout ({self._load_timeout:g} s) to load")

    def _check_size(self, card: Card, booked: int, measured: int | None) -> None:
        """Book what was measured where the card said too little; remember it for the next load."""
        if measured is None:
            return
        if measured <= card.resident_bytes * GROWTH_TOLERANCE + GROWTH_SLACK:
            self._measured.pop(card.digest, None)
            return
        # Jobs of other models that run meanwhile can only make it look larger: the least that was seen is nearest.
        measured = min(measured, self._measured.get(card.digest, measured))
        self._measured[card.digest] = measured
        if measured <= booked:
            return
        log.warning("model.larger_than_card", model=card.model, card_bytes=card.resident_bytes, measured_bytes=measured)
        if not self._zone.grow(card.model, measured):
            raise NoRoom(
                f"{card.model} takes {measured} bytes where its card says {booked}, and that does not fit now: "
                "the next load books the measured size; register the model again to correct the card"
            )

    def _backend(self, card: Card) -> Backend:
        """What loads builds of this kind. Raises LoadFailed where this worker has none."""
        backend = self._only or self._backends.get(card.backend)
        if backend is None:
            raise LoadFailed(
                f"{card.model} is a build for {card.backend}, and this worker has {', '.join(self._backends)}: "
                "start one with that backend"
            )
        return backend

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


async def _check(guard: LoadGuard | None) -> Quarantined | None:
    return None if guard is None else await guard.check()


def _free(backend: Backend, engine: Engine) -> None:
    engine.close()
    backend.trim()


def _close_abandoned(future: Future[Engine]) -> None:
    """Nobody waits for the engine any more, and its thread could not be stopped: close what it has made."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def _source(card: Card, found: Fetched) -> ModelSource:
    host_code = card.plan is not None and card.plan.lean_runtime  # such a plan was chosen, so the store is trusted
    return ModelSource(
        card.model,
        card.version,
        found.path,
        found.content,
        card.intra_op_threads,
        found.mapped,
        host_code,
        found.optimised,
    )
