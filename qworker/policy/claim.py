"""The life of one claim: from a hint for a cold model to a model that serves, and out again.

Pure: a step table. A worker runs ``outcome = await do(claim); claim = advance(claim, outcome)`` until
``DONE``; the state search (``tests/policy``) runs the same table through every interleaving of workers,
publishers, crashes and lost sessions. What stands where, and why:

- ``LEASE``: an exclusive queue, one a replica slot, so that one worker of the fleet loads. It comes
  first: everything after it is undone by the broker itself when the connection dies.
- ``ANNOUNCE`` before ``LOOK``: no job may find the model cold after the look and yet leave no hint.
  With the other order each job of a burst would also leave a hint during all of the load.
- ``LOOK``: a hint may be stale (its job was served long ago); a look is cheap, a load is not.
- ``LOAD``: the hint is held until this step ends, and not longer. The activation queue's prefetch is
  the number of load slots, so a held hint *is* the back-pressure, and a crash while loading gives the
  hint back at once. ``LOST`` is never an outcome here: a load in progress goes on, and its end is
  reported; the next step finds the session gone.
- ``CONSUME``/``SERVE``: deliveries come only to a model that is loaded, or to one whose loading has been
  given up (``refusing``), which answers each job with a typed failure.
- ``CANCEL`` before ``DROP_LEASE``: the lease is what makes one slot one consumer. It is over when
  cancel-ok has come *and* everything delivered is settled.
- ``LOOK_BACK``: jobs came while we were leaving and the model is still in memory: serve on. Skipped
  when the leave is forced; the jobs are then for ``LOOK_LAST``.
- ``DROP_LEASE`` before ``LOOK_LAST``: jobs routed from here on leave hints; those routed before it left
  none and are seen by the look, but for one still between routing and its queue: the sweep's.
- ``WAKE``: a hint by hand for what ``LOOK_LAST`` saw.
- ``UNLOAD`` last, after the wake: others may start while the bytes are freed.

A step runs on the session that gave the lease. When that session has ended the outcome is ``LOST``,
even if a newer session is open by then: on the new one we hold no lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

RECLAIM_TRIES = 3


class Reason(StrEnum):
    """Why a hint was published."""

    JOB = "job"
    """A job found no worker; the hint is its copy."""
    LEFT = "left"
    """A worker saw jobs after it had dropped its lease."""
    SWEEP = "sweep"
    BACKLOG = "backlog"
    """A worker serves the model and cannot keep up: a replica is wanted."""

    @classmethod
    def of(cls, header: object) -> Reason:
        """The reason that a hint's header names; a copy of a job has none."""
        try:
            return cls(header) if isinstance(header, str) else cls.JOB
        except ValueError:  # of a newer version than ours: what every hint may mean
            return cls.JOB


class Step(StrEnum):
    LEASE = "lease"
    ANNOUNCE = "announce"
    LOOK = "look"
    LOAD = "load"
    CONSUME = "consume"
    SERVE = "serve"
    CANCEL = "cancel"
    LOOK_BACK = "look_back"
    DROP_LEASE = "drop_lease"
    LOOK_LAST = "look_last"
    WAKE = "wake"
    UNLOAD = "unload"
    DONE = "done"


class Outcome(StrEnum):
    OK = "ok"
    GOT = "got"
    TAKEN = "taken"
    READY = "ready"
    """Jobs are ready in at least one lane."""
    EMPTY = "empty"
    FAILED = "failed"
    """LOAD: may work later. CONSUME: the queue is gone."""
    REFUSED = "refused"
    """LOAD: attempts used up, or it can never work."""
    GAVE_UP = "gave_up"
    """LOAD: no bytes in time, still in back-off, or the worker stops."""
    LEAVE = "leave"
    """Told to leave: evicted, stopped, or by the operator."""
    LOST = "lost"
    """The session that gave the lease has ended."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Where one model's claim stands on one worker."""

    step: Step = Step.LEASE
    slot: int = 0
    slots: int = 1
    """Replica slots that the model may have in the fleet."""
    backlog: bool = False
    """Woken to add a replica: a taken slot is not the end, the next one is tried."""
    loaded: bool = False
    refusing: bool = False
    forced: bool = False
    """Leaving without a way back. Set by :func:`force` as soon as it is known."""
    gave_up: bool = False
    """The load did not come about and will be tried later: no look and no wake, or the waiting jobs
    would wake us again at once, in a circle. The sweep wakes them."""
    tries_left: int = RECLAIM_TRIES
    """Rounds over all slots for a loaded model that lost its session: the broker may need a moment to
    see the end of our old connection and free its lease. The worker spaces them."""


class Hint(StrEnum):
    """What to do with a hint for a model, given the worker's claim on it."""

    START = "start"
    DROP = "drop"
    """Ack it: the claim that we have does all that a new one would."""
    KEEP = "keep"
    """Hold it until the claim is done, then start one: it may tell of a job that the claim, which has
    decided to go, will not look for any more."""


_DECIDED_TO_GO = frozenset({Step.DROP_LEASE, Step.LOOK_LAST, Step.WAKE, Step.UNLOAD})
_ON_THE_WAY_OUT = _DECIDED_TO_GO | {Step.CANCEL, Step.LOOK_BACK}
_LOCAL = frozenset({Step.LOAD, Step.UNLOAD, Step.DONE})
_HINT_NEEDED = frozenset({Step.LEASE, Step.ANNOUNCE, Step.LOOK, Step.LOAD})


def holds_hint(claim: Claim) -> bool:
    """True while the hint that started the claim stays unacked; the worker acks it when this turns."""
    return claim.step in _HINT_NEEDED and not claim.loaded


def on_hint(claim: Claim | None) -> Hint:
    """A hint for a model came in; ``claim`` is the worker's present one on that model."""
    if claim is None or claim.step is Step.DONE:
        return Hint.START
    return Hint.KEEP if claim.step in _DECIDED_TO_GO else Hint.DROP


def force(claim: Claim) -> Claim:
    """The leave became final (overdue head, shutdown). Good at any step, also on the way out."""
    return replace(claim, forced=True)


def advance(claim: Claim, outcome: Outcome) -> Claim:
    """The claim after its step ended with ``outcome``. Raises ValueError for one the step cannot have."""
    if outcome is Outcome.LOST and claim.step not in _LOCAL:
        return _lost(claim)
    if (change := _TABLE.get((claim.step, outcome))) is None or (outcome is Outcome.EMPTY and _must_serve(claim)):
        raise ValueError(f"step {claim.step} cannot end with {outcome}; see qworker/policy/claim.py")
    return change(claim)


def _to(step: Step) -> Callable[[Claim], Claim]:
    return lambda claim: replace(claim, step=step)


def _got(claim: Claim) -> Claim:
    return replace(claim, step=Step.ANNOUNCE, tries_left=RECLAIM_TRIES)


def _taken(claim: Claim) -> Claim:
    if (claim.backlog or claim.loaded) and claim.slot + 1 < claim.slots:
        return replace(claim, slot=claim.slot + 1)
    if claim.loaded and claim.tries_left > 0:
        return replace(claim, slot=0, tries_left=claim.tries_left - 1)
    return _end(claim)


def _announced(claim: Claim) -> Claim:
    return replace(claim, step=Step.CONSUME if claim.loaded else Step.LOOK)


def _loaded(claim: Claim) -> Claim:
    return replace(claim, step=Step.CONSUME, loaded=True)


def _refuse(claim: Claim) -> Claim:
    return replace(claim, step=Step.CONSUME, refusing=True)


def _give_up(claim: Claim) -> Claim:
    return replace(claim, step=Step.DROP_LEASE, gave_up=True)


def _cancelled(claim: Claim) -> Claim:
    return replace(claim, step=Step.DROP_LEASE if claim.forced else Step.LOOK_BACK)


def _revive(claim: Claim) -> Claim:
    return replace(claim, step=Step.DROP_LEASE if claim.forced else Step.CONSUME)


def _dropped(claim: Claim) -> Claim:
    return _end(claim) if claim.gave_up else replace(claim, step=Step.LOOK_LAST)


def _end(claim: Claim) -> Claim:
    return replace(claim, step=Step.UNLOAD if claim.loaded else Step.DONE)


def _unloaded(claim: Claim) -> Claim:
    return replace(claim, step=Step.DONE, loaded=False)


_TABLE: dict[tuple[Step, Outcome], Callable[[Claim], Claim]] = {
    (Step.LEASE, Outcome.GOT): _got,
    (Step.LEASE, Outcome.TAKEN): _taken,
    (Step.LEASE, Outcome.LEAVE): _end,  # perhaps there is no session to lease on: bytes must come back all the same
    (Step.ANNOUNCE, Outcome.OK): _announced,
    (Step.LOOK, Outcome.READY): _to(Step.LOAD),
    (Step.LOOK, Outcome.EMPTY): _to(Step.DROP_LEASE),
    (Step.LOAD, Outcome.OK): _loaded,
    (Step.LOAD, Outcome.FAILED): _give_up,
    (Step.LOAD, Outcome.GAVE_UP): _give_up,
    (Step.LOAD, Outcome.REFUSED): _refuse,
    (Step.CONSUME, Outcome.OK): _to(Step.SERVE),
    (Step.CONSUME, Outcome.FAILED): _to(Step.DROP_LEASE),
    (Step.SERVE, Outcome.LEAVE): _to(Step.CANCEL),
    (Step.SERVE, Outcome.EMPTY): _to(Step.CANCEL),
    (Step.CANCEL, Outcome.OK): _cancelled,
    (Step.LOOK_BACK, Outcome.READY): _revive,
    (Step.LOOK_BACK, Outcome.EMPTY): _to(Step.DROP_LEASE),
    (Step.DROP_LEASE, Outcome.OK): _dropped,
    (Step.LOOK_LAST, Outcome.READY): _to(Step.WAKE),
    (Step.LOOK_LAST, Outcome.EMPTY): _end,
    (Step.WAKE, Outcome.OK): _end,
    (Step.UNLOAD, Outcome.OK): _unloaded,
}


def _must_serve(claim: Claim) -> bool:
    """A loaded model does not leave because its queue is empty: memory that nobody wants is not worth
    freeing."""
    return claim.step is Step.SERVE and not claim.refusing


def _lost(claim: Claim) -> Claim:
    """The broker has forgotten the lease, the consumers and all that we had not settled."""
    if not claim.loaded or claim.forced or claim.step in _ON_THE_WAY_OUT:
        # Who was leaving has left: another model may wait for the bytes, and what was given back to the
        # queue is for the sweep, as after a crash.
        return _end(claim)
    return replace(claim, step=Step.LEASE, slot=0, tries_left=RECLAIM_TRIES)
