"""Loads that may end their worker: on record before they begin, and put off longer each time that one did.

A library that crashes on a plan, or a model that has the system kill us for its memory, would otherwise end one
worker after the other: each finds the jobs waiting and loads it. But workers are killed for other reasons, too, and
then the load was merely what they were at: so at first its jobs wait, and only after several deaths in a row are they
refused (``policy.backoff.after_kills``).

The record is at the broker, under the mark of this registration of these bytes, so it outlives workers and is seen by
all of them; other bytes start afresh.

A build that this process has loaded once is not on record for its later loads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog

from qworker.broker.base import Session
from qworker.errors import BrokerError, QworkerError
from qworker.policy.backoff import after_kills
from qworker.store.card import Card
from qworker.telemetry.counters import Counters
from qworker.worker.strikes import Record, Strike, StrikeBook, mark_of

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """A build that is not loaded now, and why. Times are unix seconds.

    ``seconds`` is what was left of its time; ``refusing``: its jobs get a failure meanwhile, else they wait.
    """

    model: str
    known_as: str
    record: Record
    retry_at: float
    seconds: float
    refusing: bool
    reason: str

    @property
    def attempts(self) -> int:
        return self.record.strikes.begun


class Quarantined(QworkerError):
    """Loads of these bytes have ended workers, and it is not time for the next one."""

    code = "model_unavailable"
    retryable = True

    def __init__(self, held_back: Held) -> None:
        super().__init__(held_back.reason)
        self.held = held_back


def known_as(card: Card) -> str:
    """What a failed load is remembered by: this registration of these bytes.

    Not the digest alone: a damaged file says nothing of a whole one with the same bytes under another name,
    and who registers the same bytes again, as the error advises, is not to wait for the back-off.
    """
    return f"{card.model}/{card.version}/{card.digest}/{card.created.isoformat()}"


def load_mark(card: Card) -> str:
    """The mark of a build's loads on the broker's record."""
    return mark_of("load", known_as(card))


def held(card: Card, record: Record, allowed: int, now: float) -> Held | None:
    """What keeps ``card`` from being loaded now, with that on record of its loads; None: nothing."""
    kills = record.strikes.begun
    off = after_kills(kills, allowed)
    # no longer than that, whatever the clocks of two machines say
    left = min(off.seconds, record.at + off.seconds - now)
    if left <= 0:
        return None
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.at))
    meanwhile = "are refused" if off.refusing else "wait in their queue"
    reason = (
        f"loading {card.model} version {card.version} ended {kills} workers in a row, the last one ({record.worker}) "
        f"at {when}: it is tried again in {left:.0f} s, and its jobs {meanwhile} until then; look at that worker's end "
        "(out of memory, a crash of the library, somebody's kill), and register the model again when it is mended"
    )
    return Held(card.model, known_as(card), record, now + left, left, off.refusing, reason)


class LoadGuards:
    """One a worker. Owned here: what this process has loaded before, and what it found to be put off."""

    def __init__(self, book: StrikeBook, counters: Counters, allowed: int) -> None:
        """``allowed``: the setting ``max_load_crashes``."""
        self.book = book
        self.allowed = allowed
        self._counters = counters
        self._proven: set[str] = set()
        self._held: dict[str, Held] = {}
        self._waited: dict[str, Record] = {}  # by model: what is on record of a load that has waited its time

    def of(self, session: Session, card: Card) -> LoadGuard | None:
        """The guard of one load; None where this process has loaded the build before."""
        return None if load_mark(card) in self._proven else LoadGuard(self, session, card)

    def quarantined(self) -> list[Held]:
        """Builds that were found to be put off here, and have not been loaded since."""
        now = time.time()
        return [each for each in self._held.values() if each.refusing or each.retry_at > now]

    def holds(self, model: str) -> bool:
        """Whether ``model`` is put off, as far as is known here; an operator's release ends it."""
        return model in self._held

    def waited(self, model: str, record: Record) -> bool:
        """Whether a load of ``model`` has waited here for what ``record`` asks, by this process's own clock."""
        return self._waited.get(model) == record

    def let_go(self, waited: Held) -> None:
        """Its time is over: one more try for what is on record of it."""
        self._waited[waited.model] = waited.record

    def found(self, card: Card, held_back: Held | None) -> None:
        if held_back is None:
            self._held.pop(card.model, None)
        else:
            self._counters.loads_quarantined += 1
            self._held[card.model] = held_back

    def proved(self, mark: str) -> None:
        self._proven.add(mark)


class LoadGuard:
    """One load: ``check`` early, ``begin`` just before the bytes become an engine, ``ended`` when we live on.

    While the broker cannot be asked, loads go on unguarded.
    """

    def __init__(self, guards: LoadGuards, session: Session, card: Card) -> None:
        self._guards = guards
        self._session = session
        self._card = card
        self._mark = load_mark(card)
        self._begun = False
        self.record: Record | None = None
        """What was found, once it was looked at."""

    async def check(self) -> Quarantined | None:
        """Why it must not be loaded now, or None. Never raises for the broker's trouble."""
        book = self._guards.book
        try:
            record = await book.read(self._session, self._mark)
        except BrokerError as error:
            log.info("load.unguarded", model=self._card.model, reason=str(error))
            return None
        self.record = record
        held_back = None
        if not self._guards.waited(self._card.model, record):
            held_back = held(self._card, record, self._guards.allowed, time.time())
        self._guards.found(self._card, held_back)
        return None if held_back is None else Quarantined(held_back)

    async def begin(self) -> None:
        """Put the load on record. Never raises for the broker's trouble."""
        if self._session.blocked:
            return  # it takes no publishes now, and a load is not to wait for that
        try:
            await self._guards.book.begin(self._session, self._mark, self._card.model)
        except BrokerError as error:
            log.info("load.unguarded", model=self._card.model, reason=str(error))
        else:
            self._begun = True

    def abandoned(self) -> None:
        """The worker stops, and has no time for this load: that is not the build's fault."""
        if self._begun:
            self._begun = False
            self._guards.book.note(self._session, self._mark, self._card.model, Strike.GIVEN_BACK)

    async def ended(self, *, well: bool) -> None:
        """The load is over, well or not, and this process lives: take it off the record."""
        if well:
            self._guards.proved(self._mark)
        if self._begun or (well and self.record is not None and self.record.strikes.begun):
            await self._guards.book.forget(self._session, self._mark)
