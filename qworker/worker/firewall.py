"""The firewall: a job that may have ended a worker runs alone, and not for ever.

When a worker dies, the broker gives all that it had in hand to others, and flags it as redelivered. One of those
jobs may be the reason, the rest were merely beside it. So each of them is a *suspect*: it runs when nothing else of
its model is in hand, one at a time in the whole worker, with a strike on record before it begins. A strike that
stays has ended a process, and it can only be this job's. Who was merely in hand never gets one.

Jobs whose worker lost its connection and lives on are no suspects, where they come back to that worker.

A first delivery pays three comparisons here.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from qworker.broker.base import Delivery, Session
from qworker.errors import BrokerError, BrokerUnavailable, DeviceLost, PoisonJob
from qworker.policy.outcome import Budgets, FailureClass, used_up
from qworker.telemetry.counters import Counters
from qworker.worker.strikes import Record, Strike, StrikeBook

log = structlog.get_logger(__name__)

MOST_SURVIVORS = 10_000
MOST_CONVICTS = 1_000

_ENDED = {
    FailureClass.CRASH: "ended the workers that ran it",
    FailureClass.DEVICE_FAULT: "broke the devices that ran it",
    FailureClass.UNSENT: "ran, and its answer could not be sent",
}


@dataclass(slots=True)
class Trial:
    """The run of a suspect. ``attempts`` counts it as well."""

    session: Session
    delivery: Delivery
    model: str
    mark: str
    attempts: int
    verdict: PoisonJob | None = None
    """It must not run again: answer it with this."""
    kept: bool = False
    """What is on record of it stays there."""


class Firewall:
    """One a worker.

    Owned here, on the event loop: the trial under way, the ids of jobs that outlived a session of ours, and the
    sizes and marks of payloads that were convicted here.
    """

    def __init__(self, worker: str, budgets: Budgets, counters: Counters) -> None:
        self.book = StrikeBook(worker)
        self.budgets = budgets
        self.trial: Trial | None = None
        self.sizes: set[int] = set()
        """Of the bodies of convicted payloads: who publishes one of them again is not let in among the others."""
        self._turn = asyncio.Lock()
        self._crashing = False
        self._counters = counters
        self._survivors: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._convicts: OrderedDict[str, int] = OrderedDict()

    def survived(self, model: str, job_id: str | None) -> None:
        """A session was lost with this job in hand, and this process lives on: it is no suspect."""
        if job_id:
            self._survivors[model, job_id] = None
            while len(self._survivors) > MOST_SURVIVORS:
                self._survivors.popitem(last=False)

    def is_survivor(self, model: str, job_id: str | None) -> bool:
        """Once for each time it survived: the next redelivery is another matter."""
        survivor = bool(job_id) and (model, job_id) in self._survivors
        if survivor:
            del self._survivors[model, job_id or ""]
        return survivor

    def is_convict(self, mark: str) -> bool:
        """Whether this payload was convicted here; the record decides whether it still is."""
        return mark in self._convicts

    def redelivered(self) -> None:
        self._counters.redeliveries += 1

    def attempts(self, delivery: Delivery) -> int | None:
        """The number of the run that ``delivery`` has on trial; None when it is not on trial."""
        trial = self.trial
        return trial.attempts if trial is not None and trial.delivery is delivery else None

    def mark(self, delivery: Delivery) -> str | None:
        """What the payload of ``delivery`` is on record as, when it is on trial."""
        trial = self.trial
        return trial.mark if trial is not None and trial.delivery is delivery else None

    @asynccontextmanager
    async def try_alone(self, session: Session, delivery: Delivery, model: str, mark: str) -> AsyncGenerator[Trial]:
        """The one trial of this worker: on record from here on, and taken back once it is over.

        Raises BrokerUnavailable when the session has ended before it began.
        """
        async with self._turn:
            trial = await self._open_trial(session, delivery, model, mark)
            self.trial = trial
            try:
                yield trial
            except asyncio.CancelledError:
                if not self._crashing:  # told to stop, with no time left: not the job's fault
                    self.book.note(session, mark, model, Strike.GIVEN_BACK)
                raise
            finally:
                self.trial = None
            if not trial.kept:  # this process is alive: whatever came of the job, it has done no harm
                await self.book.forget(session, mark)

    async def _open_trial(self, session: Session, delivery: Delivery, model: str, mark: str) -> Trial:
        try:
            await self.book.pay(session)
            record = await self.book.read(session, mark)
            trial = Trial(session, delivery, model, mark, record.strikes.attempts)
            kind = used_up(record.strikes, self.budgets)
            if kind is not None:
                trial.verdict, trial.kept = PoisonJob(_verdict(kind, record, mark)), True
                self._convict(mark, len(delivery.body))
                return trial
            await self.book.begin(session, mark, model)
        except BrokerUnavailable:
            raise
        except BrokerError as error:  # no permission, say: better alone without a record than not at all
            log.warning("strikes.unusable", model=model, mark=mark, reason=str(error))
            trial = Trial(session, delivery, model, mark, 1)
        trial.attempts += 1
        self._counters.jobs_tried_alone += 1
        log.info("job.tried_alone", model=model, mark=mark, attempt=trial.attempts)
        return trial

    def crashed(self, bug: BaseException) -> None:
        """The process is about to end for ``bug``: put on record what is known of it."""
        self._crashing = True
        trial = self.trial
        if trial is not None and isinstance(bug, DeviceLost):
            self.book.note(trial.session, trial.mark, trial.model, Strike.DEVICE_FAULT)

    def unsent(self, delivery: Delivery) -> None:
        """The answer of ``delivery`` did not leave, and it goes back to its queue."""
        trial = self.trial
        if trial is not None and trial.delivery is delivery and not trial.kept:
            trial.kept = True
            self.book.note(trial.session, trial.mark, trial.model, Strike.UNSENT)

    def _convict(self, mark: str, size: int) -> None:
        self._counters.jobs_convicted += 1
        self._convicts[mark] = size
        while len(self._convicts) > MOST_CONVICTS:
            self._convicts.popitem(last=False)
        self.sizes.clear()
        self.sizes.update(self._convicts.values())


class Ward:
    """Where jobs of one model wait to run apart.

    Owned here: ``busy``, how many are dealt with apart, and ``held``, how many of them have not begun.
    """

    def __init__(self, firewall: Firewall, in_hand: Callable[[], int]) -> None:
        self.firewall = firewall
        self.sizes = firewall.sizes
        self.busy = 0
        self.held = 0
        self._in_hand = in_hand
        self._order = asyncio.Lock()
        self._stirred = asyncio.Event()

    def hold(self) -> None:
        """A job came that begins when its turn comes."""
        self.busy += 1
        self.held += 1

    def begin(self) -> None:
        """A job that was held begins, or ends without having begun."""
        self.held -= 1

    def left(self) -> None:
        """A job that was held is dealt with."""
        self.busy -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """In the order in which they came: nobody else begins meanwhile."""
        try:
            async with self._order:
                yield
        finally:
            self.left()

    def stir(self) -> None:
        """A job of this model has been settled."""
        self._stirred.set()

    async def all_settled(self) -> None:
        """Wait until all that began has been settled."""
        while self._in_hand() > self.held:
            self._stirred.clear()
            await self._stirred.wait()


def _verdict(kind: FailureClass, record: Record, mark: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.at)) if record.at else "at an unknown time"
    times = {
        FailureClass.CRASH: record.strikes.crashes,
        FailureClass.DEVICE_FAULT: record.strikes.device_faults,
        FailureClass.UNSENT: record.strikes.unsent,
    }[kind]
    return (
        f"the job {_ENDED[kind]}: once beside others, {times} times alone, the last time on "
        f"{record.worker or 'a worker'} at {when} (fingerprint {mark}): look at it, and put it back with "
        "`qworker dead requeue` when that is mended"
    )
