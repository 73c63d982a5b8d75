"""Tells callers who ask what their jobs wait for: ``queued``, ``loading`` with its share, ``running``.

A cold job stays in its queue while its model loads: what is here of it is the hint, a copy, and that is whom the load
is told to. Jobs in hand are told by themselves. What is estimated, and how, is in ``policy.eta``; how wrong it was is
measured, here. Nothing waits for a message, and one that cannot leave is not sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from qworker.broker.base import Delivery, Properties, Session
from qworker.errors import BrokerError
from qworker.policy.eta import Loading, LoadTimes
from qworker.store.card import Card
from qworker.telemetry.counters import Counters
from qworker.telemetry.measures import ModelMeasures
from qworker.wire.codec import reply_kind
from qworker.wire.messages import Job
from qworker.wire.progress import PROGRESS_HEADER, Progress, encode_progress, wants_progress
from qworker.wire.topology import takes_replies
from qworker.worker.batcher import Answer, Batcher
from qworker.worker.hot_zone import HotZone

log = structlog.get_logger(__name__)

MOST_ASKING = 200
"""Callers of one model who are told of its load."""
MOST_PROMISED = 1_000
MOST_ON_THE_WAY = 100
"""Messages that wait for the broker; of more, none is sent."""
TELLINGS = 20
"""Of a load that takes as long as it is expected to."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
STALE_MS = 60_000
"""After so long nobody wants it: a reply queue that is not read keeps no progress."""

Spawn = Callable[[Coroutine[Any, Any, None]], object]
_Key = tuple[str, str]
"""A model, and the job's correlation id."""


@dataclass(frozen=True, slots=True)
class _Asking:
    """A caller who wants to be told, and how to reach it."""

    session: Session
    spawn: Spawn
    reply_to: str
    correlation_id: str
    job_id: str
    content_type: str


@dataclass(slots=True)
class _Load:
    """One load in progress."""

    expected: Loading
    run_seconds: float
    started: float
    tasks: asyncio.TaskGroup
    ticker: asyncio.Task[None] | None = None


class Teller:
    """One a worker. Owned here, on the event loop: who asked, by model; the loads in progress; what was promised."""

    def __init__(self, worker: str, counters: Counters) -> None:
        self._worker = worker
        self._counters = counters
        self._clock = time.monotonic
        self._times = LoadTimes()
        self._kept: dict[str, float] | None = None  # load seconds by model, from before this process
        self._claims: set[str] = set()
        self._asking: dict[str, dict[str, _Asking]] = {}
        self._loads: dict[str, _Load] = {}
        self._promised: OrderedDict[_Key, float] = OrderedDict()  # when an answer was first said to come
        self._on_the_way = 0

    # --- hints -----------------------------------------------------------------------------------

    def hinted(self, session: Session, hint: Delivery, spawn: Spawn, *, claimed: bool) -> None:
        """A hint came. ``claimed``: it starts a claim here; else it is of use only if one is on its way."""
        model = hint.routing_key
        if claimed:
            self._claims.add(model)
        if PROGRESS_HEADER not in hint.properties.headers or not (model in self._claims or model in self._loads):
            return
        asking, there = _asking(session, hint, spawn), self._asking.setdefault(model, {})
        if asking is None or len(there) >= MOST_ASKING:
            return
        there[asking.correlation_id] = asking
        if (load := self._loads.get(model)) is not None:
            self._tell_load(model, load, [asking])
            self._start_ticking(model, load)
        else:
            again = self._times.again(model)
            eta = None if again is None else again + _run_seconds(self._counters.measures.models.get(model), None)
            self._tell_first(asking, model, Progress("queued", eta=eta))

    def left(self, model: str, *, called_again: bool) -> None:
        """The claim on ``model`` has ended. ``called_again``: another one begins."""
        if not called_again:
            self._forget(model)

    # --- loads -----------------------------------------------------------------------------------

    @contextmanager
    def loading(self, card: Card, zone: HotZone, tasks: asyncio.TaskGroup) -> Generator[None]:
        """While this is entered, ``card`` is loaded: tell who asked, learn from it, and measure the estimate."""
        model = card.model
        load = self._loads[model] = _Load(
            self._expect(card, zone),
            _run_seconds(self._counters.measures.models.get(model), card),
            self._clock(),
            tasks,
        )
        if self._asking.get(model):
            self._start_ticking(model, load)
        try:
            yield
        except BaseException:
            self._end(model, load)
            for asking in self._asking.get(model, {}).values():
                self._tell(asking, model, Progress("queued"))  # again: another try may come, here or elsewhere
            raise
        self._end(model, load)
        self._forget(model)  # from here on its jobs are delivered, and told of by themselves
        self._learn(card, load)

    def _end(self, model: str, load: _Load) -> None:
        del self._loads[model]
        if load.ticker is not None:
            load.ticker.cancel()

    def _expect(self, card: Card, zone: HotZone) -> Loading:
        if self._kept is None:
            self._kept = {model: usage.load_seconds for model, usage in zone.history().items() if usage.nbytes > 0}
        return self._times.expect(
            card.model,
            card_seconds=card.load_seconds,
            nbytes=sum(each.nbytes for each in card.files),
            measured=self._kept.get(card.model),
            must_wait=not zone.fits_free(card.resident_bytes, card.backend),
        )

    def _learn(self, card: Card, load: _Load) -> None:
        measures = self._counters.measures
        measures.eta_errors["load"].observe(abs(load.expected.total - (self._clock() - load.started)))
        stages = measures.chronicle.stages_of_last_load(card.model)
        nbytes = sum(each.nbytes for each in card.files)
        self._times.loaded(card.model, stages, card_seconds=card.load_seconds, nbytes=nbytes)

    def _start_ticking(self, model: str, load: _Load) -> None:
        if load.ticker is None:
            load.ticker = load.tasks.create_task(self._tick(model, load))

    async def _tick(self, model: str, load: _Load) -> None:
        pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, load.expected.total / TELLINGS))
        while True:
            self._tell_load(model, load, list(self._asking.get(model, {}).values()))
            await asyncio.sleep(pause)

    def _tell_load(self, model: str, load: _Load, asking: list[_Asking]) -> None:
        now = self._clock()
        stage, since, _ = self._counters.measures.chronicle.stages.get(model, ("fetch", now, 0.0))
        told = Progress(
            "loading",
            share=round(load.expected.share(stage, now - since), 3),
            eta=load.expected.left(stage, now - since) + load.run_seconds,
            stage=stage,
        )
        for each in asking:
            self._tell_first(each, model, told)

    def _tell_first(self, asking: _Asking, model: str, progress: Progress) -> None:
        """Tell of a job that is not here yet. The first ETA is kept, to be held against what comes."""
        key = (model, asking.correlation_id)
        if progress.eta is not None and key not in self._promised:
            self._promised[key] = self._clock() + progress.eta
            if len(self._promised) > MOST_PROMISED:
                self._promised.popitem(last=False)
        self._tell(asking, model, progress)

    def _forget(self, model: str) -> None:
        self._claims.discard(model)
        self._asking.pop(model, None)

    # --- jobs in hand ------------------------------------------------------------------------------

    def submit(
        self,
        batcher: Batcher,
        job: Job,
        deadline: float | None,
        ran: Callable[[Answer], None],
        asked: tuple[Session, Delivery, Spawn],
    ) -> None:
        """``Batcher.submit`` of a job whose caller may have asked. Raises as it does."""
        asking = _asking(*asked)
        if asking is None:
            batcher.submit(job, deadline, ran)
            return
        ahead, (queue, run) = batcher.outlook(job)
        promised = self._promised.pop((job.model, asking.correlation_id), self._clock() + queue + run)

        def watched(answer: Answer) -> None:
            batcher.unwatch(number)
            if answer.exception() is None:
                self._counters.measures.eta_errors["job"].observe(abs(promised - self._clock()))
            ran(answer)

        number = batcher.submit(job, deadline, watched)
        batcher.watch(number, lambda: self._tell(asking, job.model, Progress("running", eta=run)))
        if ahead:
            self._tell(asking, job.model, Progress("queued", ahead=ahead, eta=queue + run))

    # --- messages ----------------------------------------------------------------------------------

    def _tell(self, asking: _Asking, model: str, progress: Progress) -> None:
        session = asking.session
        if not session.is_open or session.blocked or self._on_the_way >= MOST_ON_THE_WAY:
            return
        self._counters.measures.progress[progress.state] += 1
        told = Progress(
            progress.state,
            progress.share,
            None if progress.eta is None else round(progress.eta, 4),
            progress.stage,
            progress.ahead,
            self._worker,
        )
        body = encode_progress(asking.job_id, model, told, asking.content_type)
        envelope = Properties(  # without a message id: one plane sends messages of one id one after the other
            correlation_id=asking.correlation_id,
            content_type=asking.content_type,
            expiration_ms=STALE_MS,
            timestamp_ms=int(time.time() * 1000),
            headers={PROGRESS_HEADER: progress.state},
        )
        if not session.send("", asking.reply_to, body, envelope, _heard):
            self._on_the_way += 1
            asking.spawn(self._publish(session, asking.reply_to, body, envelope))

    async def _publish(self, session: Session, reply_to: str, body: bytes, envelope: Properties) -> None:
        try:
            await session.publish("", reply_to, body, envelope)
        except BrokerError as error:
            _heard(error)
        finally:
            self._on_the_way -= 1


def _asking(session: Session, delivery: Delivery, spawn: Spawn) -> _Asking | None:
    """Who is to be told of this job; None: nobody, or it cannot be told."""
    properties = delivery.properties
    reply_to, job_id = properties.reply_to, properties.message_id or ""
    correlation_id = properties.correlation_id or job_id
    if not reply_to or not correlation_id or not takes_replies(reply_to) or not wants_progress(properties.headers):
        return None
    kind = reply_kind(properties.content_type, delivery.body)
    return _Asking(session, spawn, reply_to, correlation_id, job_id, kind)


def _run_seconds(measured: ModelMeasures | None, card: Card | None) -> float:
    """Of a job of this model: as measured here, or as its card has it."""
    if measured is not None and measured.jobs:
        return measured.run.sum / measured.jobs
    return card.run_times[0].seconds if card is not None and card.run_times else 0.0


def _heard(error: BrokerError | None) -> None:
    """Of news that nobody waits for: the next one, or the answer, makes up for it."""
    if error is not None:
        log.debug("progress.lost", reason=str(error))
