"""Exhaustive search of the claim protocol: every interleaving of workers, publishers and faults.

One model, a few workers, a few jobs. The workers run ``policy.claim.advance`` itself, never a copy; what
stands here is only the broker, the publisher and the faults. A publish is two steps, ROUTE (bindings are
read) and ENQUEUE (the queue has it), as in RabbitMQ. A lost session is two steps as well: the broker has
forgotten everything, and only later does the worker see it.

*stuck*: a reachable state from which "all jobs done" cannot be reached any more. *dark*: a stuck state
that one more job does not revive. Run ``python -m tests.policy.claim_search --big`` for larger sizes.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from qworker.policy.claim import Claim, Hint, Outcome, Step, advance, force, holds_hint, on_hint
from qworker.policy.sweep import needs_wake

Advance = Callable[[Claim, Outcome], Claim]
LANES = (0, 1)  # online, batch
UNLEASED = frozenset({Step.LEASE, Step.LOOK_LAST, Step.WAKE, Step.UNLOAD, Step.DONE})
LOCAL = frozenset({Step.LOAD, Step.UNLOAD})


@dataclass(frozen=True)
class Setting:
    """What one search allows."""

    workers: int = 2
    jobs: tuple[int, int] = (2, 0)
    crashes: int = 0
    losses: int = 0  # of sessions
    bad_loads: int = 0
    forces: int = 0
    backlogs: int = 0
    capacity: int = 2  # of the activation queue
    slots: int = 1
    lossy: bool = False  # hints may vanish
    ghosts: bool = False  # a cancelled consumer counts until its deliveries are settled
    sweep: bool = True
    atomic: bool = False  # ROUTE and ENQUEUE in one: leaves only the races that the protocol itself must close
    crash_at: frozenset[Step] = frozenset(Step)


_CLAIMS: list[Claim] = []
_NUMBERS: dict[Claim, int] = {}


def number(claim: Claim) -> int:
    """Claims as small numbers: a state is hashed a million times, and a number is cheap to hash."""
    if (known := _NUMBERS.get(claim)) is None:
        known = _NUMBERS[claim] = len(_CLAIMS)
        _CLAIMS.append(claim)
    return known


class Worker(NamedTuple):
    number: int = -1  # of the claim
    alive: bool = True  # the session that the claim began on; False: ended, and not seen yet
    lease: int = -1  # the slot held on the broker
    announced: bool = False
    consuming: bool = False
    unacked: tuple[int, int] = (0, 0)
    hint: bool = False  # the one that started the claim, unacked
    kept: int = 0  # 1: another one, for after the claim; 2: with the reason backlog

    @property
    def claim(self) -> Claim | None:
        return _CLAIMS[self.number] if self.number >= 0 else None


IDLE = Worker()


class State(NamedTuple):
    unpublished: tuple[int, int]
    routed: tuple[int, int] = (0, 0)
    ready: tuple[int, int] = (0, 0)
    hints: tuple[int, int] = (0, 0)  # plain, backlog
    workers: tuple[Worker, ...] = ()
    done: int = 0
    crashes: int = 0
    losses: int = 0
    bad_loads: int = 0
    forces: int = 0
    backlogs: int = 0
    sweeping: bool = False


Move = tuple[str, State]


@dataclass
class Found:
    """What a search saw."""

    states: int = 0
    stuck: list[State] = field(default_factory=list[State])
    violations: list[str] = field(default_factory=list[str])
    trace: list[str] = field(default_factory=list[str])  # the shortest way to the first stuck state


def search(
    setting: Setting, step: Advance = advance, start: State | None = None, *, until_wrong: bool = False
) -> Found:
    """All states reachable from ``start`` under ``setting``, with what is wrong in them.

    ``until_wrong`` ends the search at the first violation.
    """
    world = _World(setting, step)
    first = start if start is not None else world.start()
    total = _jobs_in(first)
    index: dict[State, int] = {first: 0}
    before: list[list[int]] = [[]]
    came: list[tuple[int, str]] = [(-1, "")]
    todo = deque([first])
    found = Found()
    goals: list[int] = []
    while todo and not (until_wrong and found.violations):
        state = todo.popleft()
        at = index[state]
        if state.done == total:
            goals.append(at)
        for wrong in _wrong(state, total):
            if len(found.violations) < 5:
                found.violations.append(f"{wrong}: {' '.join(_way(came, at))}")
        for label, after in world.moves(state):
            if after not in index:
                index[after] = len(index)
                before.append([])
                came.append((at, label))
                todo.append(after)
            before[index[after]].append(at)
    good = _ancestors(goals, before)
    found.states = len(index)
    found.stuck = [state for state, at in index.items() if at not in good]
    if found.stuck:
        found.trace = _way(came, index[found.stuck[0]])
    return found


def dark(setting: Setting, stuck: list[State], step: Advance = advance) -> list[State]:
    """Those stuck states from which one more job, without further faults, does not get all done."""
    calm = Setting(setting.workers, capacity=setting.capacity, slots=setting.slots, sweep=False, ghosts=setting.ghosts)
    return [
        state
        for state in stuck
        if _hopeless(
            calm, step, state._replace(unpublished=(1, 0), crashes=0, losses=0, bad_loads=0, forces=0, backlogs=0)
        )
    ]


def _hopeless(setting: Setting, step: Advance, start: State) -> bool:
    return start in set(search(setting, step, start).stuck)


# --- what must hold in every state ----------------------------------------------------------------


def _jobs_in(state: State) -> int:
    waiting = sum(state.unpublished) + sum(state.routed) + sum(state.ready)
    return waiting + sum(sum(w.unacked) for w in state.workers) + state.done


def _wrong(state: State, total: int) -> Iterator[str]:
    if _jobs_in(state) != total:
        yield "a job is lost or doubled"
    leases = [w.lease for w in state.workers if w.lease >= 0]
    if len(leases) != len(set(leases)):
        yield "two hold one lease"
    at_work: list[int] = []
    for worker in state.workers:
        claim = worker.claim
        if not worker.alive or claim is None:
            if worker.lease >= 0 or worker.consuming or sum(worker.unacked):
                yield "something is held by nobody"
            continue
        if claim.step in UNLEASED and claim.step is not Step.LEASE and worker.lease >= 0:
            yield "a lease is kept after the leave"
        if claim.step not in UNLEASED and worker.lease != claim.slot:
            yield f"{claim.step} without its lease"
        if worker.consuming and not (claim.loaded or claim.refusing):
            yield "consumes without a model"
        if worker.consuming and worker.lease < 0:
            yield "consumes without a lease"
        if claim.step is Step.LOAD or worker.consuming:
            at_work.append(claim.slot)
    if len(at_work) != len(set(at_work)):
        yield "double load in one slot"


# --- how the world moves --------------------------------------------------------------------------


class _World:
    def __init__(self, setting: Setting, step: Advance) -> None:
        self.setting = setting
        self._step = step
        self._known: dict[tuple[int, str], Claim] = {}

    def start(self) -> State:
        s = self.setting
        return State(
            s.jobs,
            workers=(IDLE,) * s.workers,
            crashes=s.crashes,
            losses=s.losses,
            bad_loads=s.bad_loads,
            forces=s.forces,
            backlogs=s.backlogs,
        )

    def moves(self, state: State) -> Iterator[Move]:
        yield from self._publisher(state)
        if self.setting.sweep:
            yield from self._sweeper(state)
        if self.setting.lossy:
            for kind in LANES:
                if state.hints[kind]:
                    yield "hint-lost", state._replace(hints=_plus(state.hints, kind, -1))
        for i, worker in enumerate(state.workers):
            if i and worker == state.workers[i - 1]:
                continue  # equal workers do equal things
            for label, after in self._worker(state, i, worker):  # sorted: a state is the same whoever does what
                yield f"{label}.{i}", after._replace(workers=tuple(sorted(after.workers)))

    def _publisher(self, state: State) -> Iterator[Move]:
        for lane in LANES:
            if state.unpublished[lane]:
                after = state._replace(unpublished=_plus(state.unpublished, lane, -1))
                if not any(w.announced for w in state.workers):
                    after = self._hint(after, 0)
                if self.setting.atomic:
                    yield f"publish{lane}", after._replace(ready=_plus(after.ready, lane, 1))
                else:
                    yield f"route{lane}", after._replace(routed=_plus(after.routed, lane, 1))
            if state.routed[lane]:
                routed, ready = _plus(state.routed, lane, -1), _plus(state.ready, lane, 1)
                yield f"enqueue{lane}", state._replace(routed=routed, ready=ready)

    def _sweeper(self, state: State) -> Iterator[Move]:
        if state.sweeping:
            yield "sweep-wake", self._hint(state._replace(sweeping=False), 0)
        elif needs_wake([(ready, self._consumers(state, lane)) for lane, ready in enumerate(state.ready)]):
            yield "sweep-look", state._replace(sweeping=True)

    def _consumers(self, state: State, lane: int) -> int:
        return sum(w.consuming or bool(self.setting.ghosts and w.unacked[lane]) for w in state.workers)

    def _hint(self, state: State, kind: int) -> State:
        """One more hint; the oldest is dropped when the queue is full."""
        if sum(state.hints) < self.setting.capacity:
            return state._replace(hints=_plus(state.hints, kind, 1))
        return state

    def _worker(self, state: State, i: int, worker: Worker) -> Iterator[Move]:
        yield from self._faults(state, i, worker)
        yield from self._take_hint(state, i, worker)
        claim = worker.claim
        if claim is None:
            return
        if not worker.alive and claim.step not in LOCAL:
            yield "lost", self._after(state, i, worker._replace(alive=True), Outcome.LOST)
            return
        yield from self._deliveries(state, i, worker)
        for outcome, now, mine in self._do(state, claim, worker):
            yield f"{claim.step}:{outcome}", self._after(now, i, mine, outcome)

    def _faults(self, state: State, i: int, worker: Worker) -> Iterator[Move]:
        if worker == IDLE:
            return
        claim = worker.claim
        at = claim.step if claim is not None else Step.DONE
        if state.crashes and at in self.setting.crash_at:
            after = self._forgotten(state, worker)._replace(crashes=state.crashes - 1)
            yield "crash", _set(after, i, IDLE)
        if state.losses and worker.alive and claim is not None:
            after = self._forgotten(state, worker)._replace(losses=state.losses - 1)
            yield "session-ends", _set(after, i, Worker(worker.number, alive=False))

    def _forgotten(self, state: State, worker: Worker) -> State:
        """The broker takes back what the session held."""
        ready = (state.ready[0] + worker.unacked[0], state.ready[1] + worker.unacked[1])
        state = state._replace(ready=ready)
        if worker.hint:
            state = self._hint(state, 1 if worker.claim is not None and worker.claim.backlog else 0)
        return self._hint(state, worker.kept - 1) if worker.kept else state

    def _take_hint(self, state: State, i: int, worker: Worker) -> Iterator[Move]:
        """Prefetch 1: no other hint while one is held."""
        if worker.hint or worker.kept or not worker.alive:
            return
        for kind in LANES:
            if not state.hints[kind]:
                continue
            after = state._replace(hints=_plus(state.hints, kind, -1))
            match on_hint(worker.claim):
                case Hint.START:
                    yield "take-hint", _set(after, i, self._started(kind))
                case Hint.KEEP:
                    yield "keep-hint", _set(after, i, worker._replace(kept=kind + 1))
                case Hint.DROP:
                    yield "drop-hint", _set(after, i, worker)

    def _started(self, kind: int) -> Worker:
        return Worker(number(Claim(slots=self.setting.slots, backlog=kind == 1)), hint=True)

    def _deliveries(self, state: State, i: int, worker: Worker) -> Iterator[Move]:
        for lane in LANES:
            if worker.consuming and state.ready[lane] and not worker.unacked[lane]:
                after = state._replace(ready=_plus(state.ready, lane, -1))
                yield f"deliver{lane}", _set(after, i, worker._replace(unacked=_plus(worker.unacked, lane, 1)))
            if worker.unacked[lane]:
                mine = worker._replace(unacked=_plus(worker.unacked, lane, -1))
                yield f"settle{lane}", _set(state._replace(done=state.done + 1), i, mine)
        claim = worker.claim
        if claim is None:
            return
        if claim.step is Step.CANCEL and worker.consuming:  # deliveries come until the broker has done it
            yield "broker-cancels", _set(state, i, worker._replace(consuming=False))
        if state.forces and claim.loaded and not claim.forced:
            after = state._replace(forces=state.forces - 1)
            yield "force", _set(after, i, worker._replace(number=number(force(claim))))
        if claim.step is Step.SERVE and state.backlogs and sum(state.ready):
            yield "backlog", self._hint(state._replace(backlogs=state.backlogs - 1), 1)

    def _do(self, state: State, claim: Claim, worker: Worker) -> Iterator[tuple[Outcome, State, Worker]]:
        """Every way in which the claim's step can end, with what it does to the broker."""
        look = Outcome.READY if sum(state.ready) else Outcome.EMPTY
        match claim.step:
            case Step.LEASE:
                taken = any(w.lease == claim.slot for w in state.workers)
                yield (
                    (Outcome.TAKEN, state, worker) if taken else (Outcome.GOT, state, worker._replace(lease=claim.slot))
                )
                if claim.loaded:
                    yield Outcome.LEAVE, state, worker
            case Step.ANNOUNCE:
                yield Outcome.OK, state, worker._replace(announced=True)
            case Step.LOOK | Step.LOOK_BACK | Step.LOOK_LAST:
                yield look, state, worker
            case Step.CONSUME:
                yield Outcome.OK, state, worker._replace(consuming=True)
            case Step.DROP_LEASE:
                yield Outcome.OK, state, worker._replace(lease=-1, announced=False)
            case Step.WAKE:
                yield Outcome.OK, self._hint(state, 0), worker
            case _:
                yield from ((outcome, after, worker) for outcome, after in self._long(state, claim, worker))

    def _long(self, state: State, claim: Claim, worker: Worker) -> Iterator[tuple[Outcome, State]]:
        """The steps that take their time; none of them changes the broker by ending."""
        at_rest = not worker.consuming and not sum(worker.unacked)
        if claim.step is Step.UNLOAD or claim.step is Step.LOAD or (claim.step is Step.CANCEL and at_rest):
            yield Outcome.OK, state
        if claim.step is Step.LOAD and state.bad_loads:
            bad = state._replace(bad_loads=state.bad_loads - 1)
            yield from ((outcome, bad) for outcome in (Outcome.FAILED, Outcome.REFUSED, Outcome.GAVE_UP))
        if claim.step is Step.SERVE:
            yield Outcome.LEAVE, state
            if claim.refusing and not sum(state.ready) and not sum(worker.unacked):
                yield Outcome.EMPTY, state

    def _after(self, state: State, i: int, worker: Worker, outcome: Outcome) -> State:
        claim = worker.claim
        assert claim is not None
        key = worker.number, outcome.value
        if (after := self._known.get(key)) is None:
            after = self._known[key] = self._step(claim, outcome)
        if after.step is not Step.DONE:
            mine = worker._replace(number=number(after), hint=worker.hint and holds_hint(after))
            return _set(state, i, mine)
        # Whatever else a wrong table leaves behind on the broker stays, for the search to find.
        mine = worker._replace(number=-1, alive=True, hint=False, kept=0)
        if worker.kept:
            mine = mine._replace(number=self._started(worker.kept - 1).number, hint=True)
        return _set(state, i, mine)


# --- small change ---------------------------------------------------------------------------------


def _plus(pair: tuple[int, int], at: int, change: int) -> tuple[int, int]:
    return (pair[0] + change, pair[1]) if at == 0 else (pair[0], pair[1] + change)


def _set(state: State, i: int, worker: Worker) -> State:
    return state._replace(workers=(*state.workers[:i], worker, *state.workers[i + 1 :]))


def _ancestors(goals: list[int], before: list[list[int]]) -> set[int]:
    good, todo = set(goals), list(goals)
    while todo:
        for at in before[todo.pop()]:
            if at not in good:
                good.add(at)
                todo.append(at)
    return good


def _way(came: list[tuple[int, str]], at: int) -> list[str]:
    labels: list[str] = []
    while at > 0:
        at, label = came[at]
        labels.append(label)
    return labels[::-1]


BIG = (
    Setting(2, (2, 1), crashes=2, losses=1, lossy=True, ghosts=True, capacity=1),
    Setting(2, (2, 1), crashes=1, losses=1, bad_loads=1, forces=1, lossy=True, slots=2, backlogs=1),
    Setting(3, (2, 1), crashes=1, lossy=True, ghosts=True, slots=2, backlogs=1),
    Setting(3, (3, 0), crashes=1, losses=1, lossy=True, capacity=1),
)


def report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for setting in BIG if "--big" in sys.argv else (Setting(), Setting(sweep=False), Setting(crashes=1, sweep=False)):
        began = time.monotonic()
        result = search(setting)
        dim = "-" if setting.sweep else str(len(dark(setting, result.stuck)))
        report(str(setting))
        report(f"  {result.states} states, {len(result.stuck)} stuck, {dim} dark, {time.monotonic() - began:.1f} s")
        report(f"  {result.violations or 'no violation'} {' '.join(result.trace)}")
