"""Which models hold memory on one worker, and who leaves when another wants in.

Pure: no clock, no I/O. One owner calls it synchronously; an event that can let somebody in or out returns
a :class:`Decision`, which the owner carries out and answers with further events. After an event without
one (``used``, ``finished``, ``grow``, ``unpin``) ask ``next_tick``: it says ``now`` when there is
something to decide.

**Bytes.** A model holds its bytes from admission until ``gone``, while it drains as well: memory that was
promised is not memory that came back. Bytes of draining models are *on their way*; while those and the
free ones are enough for the first in line, nobody else is told to leave.

**The line** is first come, first served, the more urgent before the less urgent; but nobody goes before
one that is overdue, that is, has waited for ``max_cold_wait``. Its *head* is the first request that does
not fit now. A later one passes only if it fits in free bytes and ``free + on their way - its own`` is
still enough for the head. So once the head is covered nothing that passes uncovers it, and while it is
not covered nobody passes and all that comes free is for the head. After ``max_cold_wait`` even busy
models must go for it, without a way back. Hence the head is admitted once the loads and jobs in hand have
ended, at the latest ``max_cold_wait + min_residency`` after it came, and then the next one is the head;
the more urgent ones before it all came within its own ``max_cold_wait``: nobody starves. The exception is
a request that cannot fit beside the models pinned now. It keeps its place and holds back nobody until the
pins allow it.

**Victims** are the smallest set that frees enough, in the order of the eviction key: hot, idle, unpinned,
and resident for ``min_residency``. For an *overdue* head (it has waited ``max_cold_wait``) drains that
may still turn back are made final first; after those come the usual victims, then young ones, then busy
ones. A newcomer keeps its brake until it has finished one job, or a crowd of overdue requests would load
models in turn and none would ever serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop

from qworker.policy.eviction import Eviction
from qworker.policy.placement import level


class State(StrEnum):
    """Where a model stands. A cold one has no entry."""

    WAITING = "waiting"
    """Wants memory, holds none."""
    LOADING = "loading"
    """Holds its bytes, not usable yet."""
    HOT = "hot"
    DRAINING = "draining"
    """Told to leave, holds its bytes until they are back."""


@dataclass(frozen=True, slots=True)
class Evict:
    """``model`` must drain, unload and then be reported ``gone``.

    ``forced``: at once, and it cannot be revived. Sent again, forced, for a model that drains unforced
    already.
    """

    model: str
    forced: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What the owner carries out: who may allocate, who must leave, who can never fit."""

    admit: tuple[str, ...] = ()
    evict: tuple[Evict, ...] = ()
    refuse: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One model, as the operator sees it. ``since``: when it came into its state."""

    model: str
    state: State
    nbytes: int
    key: float
    in_hand: int
    pinned: bool
    since: float


@dataclass(slots=True)
class _Entry:
    nbytes: int
    state: State
    since: float
    urgency: int = 0
    served: bool = False  # finished a job since it became hot
    forced: bool = False  # draining without a way back
    spare: bool = False  # in bytes that nobody else wanted: it has no claim to stay


_NOTHING = Decision()


class Residency:
    """The table of one worker. All of it is owned by the caller's single thread of control."""

    def __init__(
        self, budget: int, eviction: Eviction, *, min_residency: float = 5.0, max_cold_wait: float = 30.0
    ) -> None:
        self._budget = budget
        self._eviction = eviction
        self._min_residency = min_residency
        self._max_cold_wait = max_cold_wait
        self.eviction = eviction
        """What ranks the models; its history is the owner's to keep."""
        self._entries: dict[str, _Entry] = {}
        self._line: list[str] = []  # the waiting ones, first come first
        self._in_hand: dict[str, int] = {}  # apart from entries: jobs that are refused have none
        self._offline: dict[str, int] = {}  # offline jobs in hand
        self._used: dict[str, float] = {}  # when the last online job came
        self._pinned: set[str] = set()
        self._draining: dict[str, _Entry] = {}  # those of the entries
        self._held = 0
        self._peak = 0

    # --- events ----------------------------------------------------------------------------------

    def want(self, model: str, nbytes: int, now: float, *, urgency: int = 0) -> Decision:
        """A claim wants ``nbytes``: admitted in this or a later decision, or refused at once for good.

        The more urgent one goes before the others in line, but for those that are overdue.
        Raises ValueError for a model that is in the table already: a claim asks only when it is cold.
        """
        if (entry := self._entries.get(model)) is not None:
            raise ValueError(f"want({model!r}) needs a cold model, found it {entry.state}")
        if nbytes < 0:
            raise ValueError(f"want({model!r}) needs bytes >= 0, found {nbytes}")
        if nbytes > self._budget:
            return Decision(refuse=(model,))
        self._entries[model] = _Entry(nbytes, State.WAITING, now, urgency)
        self._stand_in_line(model, urgency, now)
        return self._settle(now)

    def want_spare(self, model: str, nbytes: int, now: float) -> bool:
        """Book ``nbytes`` for a model that nobody waits for, if they are free and nobody waits for any.

        It can be told to leave as soon as it is loaded. ValueError as for ``want``.
        """
        if self._line or nbytes > self.free:
            return False
        self.want(model, nbytes, now)
        self._entries[model].spare = True
        return True

    def abandon(self, model: str, now: float) -> Decision:
        """A waiting model is not wanted any more. Who drains for it goes on draining."""
        self._entry("abandon", model, State.WAITING)
        del self._entries[model]
        self._line.remove(model)
        return self._settle(now)

    def grow(self, model: str, nbytes: int, now: float) -> bool:  # noqa: ARG002  # every event says when
        """A loaded model was measured to need ``nbytes`` (more or less than it has).

        True: booked. False: it does not fit now; the caller unloads it and reports ``gone``.
        """
        entry = self._entry("grow", model, State.LOADING, State.HOT)
        if nbytes - entry.nbytes > self.free:
            return False
        self._book(nbytes - entry.nbytes)
        entry.nbytes = nbytes
        return True

    def loaded(self, model: str, load_seconds: float, now: float) -> Decision:
        """The load went well and took ``load_seconds``."""
        entry = self._entry("loaded", model, State.LOADING)
        self._eviction.cost(model, load_seconds, entry.nbytes)
        self._enter_hot(entry, now)
        if entry.spare:
            entry.since, entry.served = now - self._min_residency, True
        return self._settle(now)

    def used(self, model: str, now: float) -> None:
        """One online request for ``model``, in any state."""
        self._used[model] = now
        self._eviction.used(model, now)

    def started(self, model: str) -> None:
        """One more job of ``model`` is in hand."""
        self._in_hand[model] = self._in_hand.get(model, 0) + 1

    def finished(self, model: str, now: float) -> None:  # noqa: ARG002  # every event says when
        """One job of ``model`` is out of our hands, whatever became of it."""
        left = self._in_hand.get(model, 0) - 1
        if left < 0:
            raise ValueError(f"finished({model!r}) without a job in hand: each needs a started() before")
        if left:
            self._in_hand[model] = left
        else:
            del self._in_hand[model]
        if (entry := self._entries.get(model)) is not None and entry.state is State.HOT:
            entry.served = True

    def offline_started(self, model: str) -> None:
        """One more offline job of ``model`` is in hand: it keeps no online request waiting, but other offline ones."""
        self._offline[model] = self._offline.get(model, 0) + 1

    def offline_finished(self, model: str) -> None:
        """One offline job of ``model`` is out of our hands."""
        left = self._offline.pop(model) - 1
        if left:
            self._offline[model] = left

    def hurry(self, model: str, now: float) -> Decision:
        """Online jobs came for a model that waits for offline ones alone: from here on it is wanted like others."""
        entry = self._entries.get(model)
        if entry is None or entry.state is not State.WAITING or entry.urgency >= 0:
            return _NOTHING
        entry.urgency, entry.since = 0, now
        self._line.remove(model)
        self._stand_in_line(model, 0, now)
        return self._settle(now)

    def revived(self, model: str, now: float) -> Decision:
        """A draining model found more jobs and stays. ValueError if it was forced: see ``may_revive``."""
        entry = self._entry("revived", model, State.DRAINING)
        if entry.forced:
            raise ValueError(f"revived({model!r}): its drain is forced, another model waits for its bytes")
        del self._draining[model]
        self._enter_hot(entry, now)
        return self._settle(now)

    def may_revive(self, model: str) -> bool:
        """True for a model that drains and may still turn back."""
        entry = self._entries.get(model)
        return entry is not None and entry.state is State.DRAINING and not entry.forced

    def leaving(self, model: str, now: float) -> Decision:
        """A hot model leaves on its own account: shutdown, operator, lost lease. If it drains already,
        nothing changes."""
        entry = self._entry("leaving", model, State.HOT, State.DRAINING)
        if entry.state is State.HOT:
            entry.state, entry.since, entry.forced = State.DRAINING, now, False
            self._draining[model] = entry
        return self._settle(now)

    def gone(self, model: str, now: float) -> Decision:
        """The model's bytes are back: it was unloaded, or its load failed."""
        entry = self._entry("gone", model, State.LOADING, State.HOT, State.DRAINING)
        del self._entries[model]
        self._draining.pop(model, None)
        self._book(-entry.nbytes)
        return self._settle(now)

    def pin(self, model: str) -> None:
        """Never evict ``model``. A drain in progress goes on; it is not forced any more from here."""
        self._pinned.add(model)

    def unpin(self, model: str) -> None:
        """``model`` may be evicted again."""
        self._pinned.discard(model)

    def tick(self, now: float) -> Decision:
        """Time passed."""
        return self._settle(now)

    # --- what it says ----------------------------------------------------------------------------

    def next_tick(self, now: float) -> float | None:
        """When to call ``tick``: ``now`` if there is something to decide, else when time alone may
        change something, else None."""
        if not self._line:
            return None
        if self._admissible() or self._victims(now):
            return now
        if (head := self._head()) is None:
            return None
        times = [self._entries[head].since + self._max_cold_wait]
        for model, entry in self._entries.items():
            if entry.state is State.HOT and model not in self._pinned:
                times.append(entry.since + self._min_residency)
                if self._entries[head].urgency < 0:
                    times.append(self._used.get(model, now) + self._max_cold_wait)
        return min((at for at in times if at > now), default=None)

    def holds(self, model: str) -> int:
        """Bytes of one model."""
        entry = self._entries.get(model)
        return entry.nbytes if entry is not None and entry.state is not State.WAITING else 0

    def is_coming(self, model: str) -> bool:
        """Whether a waiting model is the first in line, and enough bytes for it are on their way."""
        on_the_way = self.free + self._draining_bytes()
        return self._head() == model and self._entries[model].nbytes <= on_the_way

    @property
    def crowded(self) -> bool:
        """Whether somebody waits for bytes."""
        return bool(self._line)

    def kept_out(self, nbytes: int) -> str:
        """Why so many bytes cannot become free while the pins stand; "" when they can."""
        pinned = self._pinned_bytes()
        if nbytes <= self._budget - pinned:
            return ""
        return f"needs {_mib(nbytes)}, and pinned models keep {_mib(pinned)} of {_mib(self._budget)}"

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def held(self) -> int:
        """Bytes of the loading, hot and draining models."""
        return self._held

    @property
    def ready_level(self) -> int:
        """How ready the worker is for one more model; see ``policy.placement``."""
        return level(self.free, self._held, len(self._entries) - len(self._line), crowded=bool(self._line))

    @property
    def peak(self) -> int:
        """The most bytes ever held."""
        return self._peak

    @property
    def free(self) -> int:
        return self._budget - self._held

    def snapshot(self, now: float) -> tuple[Row, ...]:
        """All models in the table, in the order in which they came."""
        return tuple(
            Row(
                model,
                entry.state,
                entry.nbytes,
                self._eviction.key(model, now),
                self._in_hand.get(model, 0),
                model in self._pinned,
                entry.since,
            )
            for model, entry in self._entries.items()
        )

    def standing(self, model: str, now: float) -> tuple[float, str]:
        """The eviction key of ``model``, in the table or not, and what it is made of, in words."""
        return self._eviction.key(model, now), self._eviction.explain(model, now)

    def blocked(self, now: float) -> list[tuple[str, float, str]]:
        """Who waits, for how many seconds, and why, in words."""
        head = self._head()
        return [(model, now - self._entries[model].since, self._why(model, head, now)) for model in self._line]

    # --- deciding --------------------------------------------------------------------------------

    def _settle(self, now: float) -> Decision:
        if not self._line:
            return _NOTHING
        admit = self._admit(now)
        if not self._line or (head := self._head()) is None:
            return Decision(admit)
        evict = tuple(self._evict(model, head, now) for model in self._victims(now))
        if evict:  # the head is covered now, so that somebody may pass
            admit += self._admit(now)
        return Decision(admit, evict)

    def _admit(self, now: float) -> tuple[str, ...]:
        admit = tuple(self._admissible())
        for model in admit:
            entry = self._entries[model]
            entry.state, entry.since = State.LOADING, now
            self._line.remove(model)
            self._book(entry.nbytes)
        return admit

    def _admissible(self) -> list[str]:
        """Who may come in now: from the front while they fit, then who passes without harm to the head."""
        chosen: list[str] = []
        free, fits_beside_pins = self.free, self._budget - self._pinned_bytes()
        spare: int | None = None  # what the head does not need; unknown until there is a head
        for model in self._line:
            nbytes = self._entries[model].nbytes
            if nbytes > fits_beside_pins:
                continue
            if nbytes <= (free if spare is None else min(free, spare)):
                chosen.append(model)
                free -= nbytes
                spare = None if spare is None else spare - nbytes
                fits_beside_pins -= nbytes if model in self._pinned else 0
            elif spare is None:
                spare = free + self._draining_bytes() - nbytes
        return chosen

    def _head(self) -> str | None:
        """The first in line that would fit beside the pinned models, were the others gone."""
        fits_beside_pins = self._budget - self._pinned_bytes()
        return next((model for model in self._line if self._entries[model].nbytes <= fits_beside_pins), None)

    def _victims(self, now: float) -> list[str]:
        """The fewest models that must go for the head, or none when no set is enough (yet)."""
        if (head := self._head()) is None:
            return []
        overdue = self._overdue(head, now)
        short = self._entries[head].nbytes - self.free
        short -= sum(entry.nbytes for entry in self._draining.values() if entry.forced or not overdue)
        if short <= 0:  # ranking all residents is what costs most here
            return []
        chosen: list[str] = []
        offline = self._entries[head].urgency < 0
        for model in self._candidates(overdue, now):
            if short <= 0:
                break
            if offline and self._is_kept_from_offline(model, now):
                continue
            chosen.append(model)
            short -= self._entries[model].nbytes
        if short > 0:
            return []
        for model in reversed(chosen):  # a big one late may have made smaller ones before it needless
            if short + self._entries[model].nbytes <= 0:
                chosen.remove(model)
                short += self._entries[model].nbytes
        return chosen

    def _is_kept_from_offline(self, model: str, now: float) -> bool:
        """Whether ``model`` stays when offline jobs want its bytes: it works on some itself, or may be called soon."""
        return model in self._offline or now < self._used.get(model, -self._max_cold_wait) + self._max_cold_wait

    def _candidates(self, overdue: bool, now: float) -> Iterator[str]:
        """Who may be told to leave, the least dear first."""
        if not overdue:  # the usual case: all are of rank 1, and few of many will have to go
            hot, old, kept = State.HOT, now - self._min_residency, self._pinned.union(self._in_hand)
            usual = [model for model, entry in self._entries.items() if entry.state is hot and entry.since <= old]
            if kept:
                usual = [model for model in usual if model not in kept]
            heap = list(zip(self._eviction.keys(usual, now), usual, strict=True))
            heapify(heap)
            while heap:
                yield heappop(heap)[1]
            return
        ranked: list[tuple[int, float, str]] = []
        for model, entry in self._entries.items():
            if (rank := self._rank(model, entry, overdue, now)) is not None:
                ranked.append((rank, self._eviction.key(model, now), model))
        yield from (model for _, _, model in sorted(ranked))

    def _rank(self, model: str, entry: _Entry, overdue: bool, now: float) -> int | None:
        """0: drains, make it final; 1: usual victim; 2: young; 3: busy; None: stays."""
        if model in self._pinned:
            return None
        if entry.state is State.DRAINING:
            return 0 if overdue and not entry.forced else None
        if entry.state is not State.HOT:
            return None
        young, busy = now < entry.since + self._min_residency, model in self._in_hand
        if not young and not busy:
            return 1
        if not overdue or (young and not entry.served):
            return None
        return 3 if busy else 2

    def _evict(self, model: str, head: str, now: float) -> Evict:
        entry, wanting = self._entries[model], self._entries[head]
        forced, key = self._overdue(head, now), self._eviction.key(model, now)
        why = self._eviction.explain(model, now)
        was = "draining" if entry.state is State.DRAINING else "busy" if model in self._in_hand else "idle"
        reason = (
            f"makes room for {head} ({_mib(wanting.nbytes)}, waited {now - wanting.since:.1f} s, "
            f"{_mib(self.free)} free): {was}, {why}, key {key:.4g}, frees {_mib(entry.nbytes)}"
        )
        if entry.state is State.HOT:
            entry.state, entry.since = State.DRAINING, now
            self._draining[model] = entry
            self._eviction.evicted(model, now)
        entry.forced = forced
        return Evict(model, forced, reason + (", final: the wait is over its limit" if forced else ""))

    # --- small change ----------------------------------------------------------------------------

    def _entry(self, event: str, model: str, *states: State) -> _Entry:
        entry = self._entries.get(model)
        if entry is None or entry.state not in states:
            found = "cold" if entry is None else str(entry.state)
            raise ValueError(f"{event}({model!r}) needs it {' or '.join(states)}, found it {found}")
        return entry

    def _enter_hot(self, entry: _Entry, now: float) -> None:
        entry.state, entry.since, entry.served, entry.forced = State.HOT, now, False, False

    def _book(self, nbytes: int) -> None:
        self._held += nbytes
        self._peak = max(self._peak, self._held)

    def _stand_in_line(self, model: str, urgency: int, now: float) -> None:
        at = len(self._line)
        while (
            at > 0 and self._entries[before := self._line[at - 1]].urgency < urgency and not self._overdue(before, now)
        ):
            at -= 1
        self._line.insert(at, model)

    def _overdue(self, model: str, now: float) -> bool:
        """Whether ``model`` has waited too long. Offline jobs (urgency below 0) have no such right."""
        entry = self._entries[model]
        return entry.urgency >= 0 and now >= entry.since + self._max_cold_wait

    def _pinned_bytes(self) -> int:
        """Bytes that pins keep. A pinned model that drains is on its way out all the same."""
        if not self._pinned:
            return 0
        staying = (State.LOADING, State.HOT)
        return sum(e.nbytes for model in self._pinned if (e := self._entries.get(model)) and e.state in staying)

    def _draining_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._draining.values())

    def _why(self, model: str, head: str | None, now: float) -> str:
        nbytes = self._entries[model].nbytes
        if kept_out := self.kept_out(nbytes):
            return kept_out
        if model != head:
            return f"needs {_mib(nbytes)}; {head} is before it in line"
        coming = self._draining_bytes()
        need = f"needs {_mib(nbytes)}: {_mib(self.free)} free, {_mib(coming)} on their way back"
        if self.free + coming >= nbytes:
            return need
        return need + "".join(f"; {m} stays: {why}" for m, why in self._stays(now))

    def _stays(self, now: float) -> list[tuple[str, str]]:
        """Each resident model that is not told to leave, and what keeps it."""
        kept: list[tuple[str, str]] = []
        for model, entry in self._entries.items():
            if model in self._pinned and entry.state in (State.LOADING, State.HOT):
                kept.append((model, "pinned"))
            elif entry.state is State.LOADING:
                kept.append((model, "loading"))
            elif entry.state is State.HOT and model in self._in_hand:
                kept.append((model, f"{self._in_hand[model]} jobs in hand"))
            elif entry.state is State.HOT and now < entry.since + self._min_residency:
                kept.append((model, f"loaded {now - entry.since:.1f} s ago"))
        return kept


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
