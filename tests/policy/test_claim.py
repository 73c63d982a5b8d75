"""The claim's step table, path by path."""

from __future__ import annotations

import itertools

import pytest

from qworker.policy.claim import Claim, Hint, Outcome, Reason, Step, advance, force, holds_hint, on_hint


def walk(claim: Claim, *outcomes: Outcome) -> tuple[Claim, list[Step]]:
    """The claim after ``outcomes``, and the steps that it went through, the first one left out."""
    steps: list[Step] = []
    for outcome in outcomes:
        claim = advance(claim, outcome)
        steps.append(claim.step)
    return claim, steps


TO_SERVE = (Outcome.GOT, Outcome.OK, Outcome.READY, Outcome.OK, Outcome.OK)
SERVING = walk(Claim(), *TO_SERVE)[0]


def test_a_hint_leads_to_serving() -> None:
    """lease, announce, look, load, consume, serve."""
    claim, steps = walk(Claim(), *TO_SERVE)
    assert steps == [Step.ANNOUNCE, Step.LOOK, Step.LOAD, Step.CONSUME, Step.SERVE]
    assert (claim.loaded, claim.refusing) == (True, False)


def test_a_stale_hint_leads_to_no_load() -> None:
    """Nothing ready: the lease is dropped, a last look, done."""
    _, steps = walk(Claim(), Outcome.GOT, Outcome.OK, Outcome.EMPTY, Outcome.OK, Outcome.EMPTY)
    assert steps[-3:] == [Step.DROP_LEASE, Step.LOOK_LAST, Step.DONE]


def test_a_last_look_that_sees_jobs_wakes_somebody() -> None:
    """Jobs that came while the lease still stood left no hint, so one is published for them."""
    _, steps = walk(Claim(), Outcome.GOT, Outcome.OK, Outcome.EMPTY, Outcome.OK, Outcome.READY, Outcome.OK)
    assert steps[-2:] == [Step.WAKE, Step.DONE]


def test_a_taken_slot_ends_a_plain_claim_and_not_one_for_a_replica() -> None:
    """Only the reason backlog tries further slots, up to the model's last."""
    assert advance(Claim(slots=2), Outcome.TAKEN).step is Step.DONE
    second = advance(Claim(slots=2, backlog=True), Outcome.TAKEN)
    assert (second.step, second.slot) == (Step.LEASE, 1)
    assert advance(second, Outcome.TAKEN).step is Step.DONE


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.GAVE_UP])
def test_a_load_that_may_work_later_wakes_nobody(outcome: Outcome) -> None:
    """A wake would bring the same claim back at once, in a circle: the sweep does it in its own time."""
    _, steps = walk(Claim(), Outcome.GOT, Outcome.OK, Outcome.READY, outcome, Outcome.OK)
    assert steps[-2:] == [Step.DROP_LEASE, Step.DONE]


def test_a_refused_load_answers_the_queue_until_it_is_empty() -> None:
    """Refusing consumes like serving, is not loaded, and unloads nothing."""
    claim, _ = walk(Claim(), Outcome.GOT, Outcome.OK, Outcome.READY, Outcome.REFUSED, Outcome.OK)
    assert (claim.step, claim.refusing, claim.loaded) == (Step.SERVE, True, False)
    _, steps = walk(claim, Outcome.EMPTY, Outcome.OK, Outcome.EMPTY, Outcome.OK, Outcome.EMPTY)
    assert steps == [Step.CANCEL, Step.LOOK_BACK, Step.DROP_LEASE, Step.LOOK_LAST, Step.DONE]


def test_a_leaving_model_that_finds_jobs_serves_on() -> None:
    """It is still in memory: consuming again costs nothing."""
    _, steps = walk(SERVING, Outcome.LEAVE, Outcome.OK, Outcome.READY, Outcome.OK)
    assert steps == [Step.CANCEL, Step.LOOK_BACK, Step.CONSUME, Step.SERVE]


def test_a_forced_leave_does_not_look_back_but_wakes_others() -> None:
    """Another model waits for the bytes; the jobs are for whoever takes the lease next."""
    _, steps = walk(force(SERVING), Outcome.LEAVE, Outcome.OK, Outcome.OK, Outcome.READY, Outcome.OK, Outcome.OK)
    assert steps == [Step.CANCEL, Step.DROP_LEASE, Step.LOOK_LAST, Step.WAKE, Step.UNLOAD, Step.DONE]


def test_a_leave_that_is_forced_while_it_looks_back_goes() -> None:
    """The force counts from the moment it is known, whatever the look says."""
    looking, _ = walk(SERVING, Outcome.LEAVE, Outcome.OK)
    assert advance(force(looking), Outcome.READY).step is Step.DROP_LEASE


def test_a_lost_session_makes_a_hot_model_lease_again() -> None:
    """From slot 0, in the next session, and straight back to consuming: it is loaded."""
    again = advance(SERVING, Outcome.LOST)
    assert (again.step, again.slot, again.loaded) == (Step.LEASE, 0, True)
    _, steps = walk(again, Outcome.GOT, Outcome.OK, Outcome.OK)
    assert steps == [Step.ANNOUNCE, Step.CONSUME, Step.SERVE]


def test_a_loaded_model_tries_every_slot_and_some_rounds_before_it_unloads() -> None:
    """The broker may still hold the lease for our former connection."""
    claim = advance(Claim(step=Step.SERVE, slot=1, slots=2, loaded=True), Outcome.LOST)
    slots: list[int] = []
    while claim.step is Step.LEASE:
        slots.append(claim.slot)
        claim = advance(claim, Outcome.TAKEN)
    assert slots == [0, 1] * 4
    assert claim.step is Step.UNLOAD


def test_a_lost_session_while_leaving_leads_to_the_unload() -> None:
    """The lease is gone already; what is left is to give the bytes back."""
    leaving, _ = walk(SERVING, Outcome.LEAVE)
    assert advance(leaving, Outcome.LOST).step is Step.UNLOAD
    assert advance(force(SERVING), Outcome.LOST).step is Step.UNLOAD
    assert advance(Claim(step=Step.ANNOUNCE), Outcome.LOST).step is Step.DONE


def test_a_loaded_model_can_leave_without_a_session() -> None:
    """A broker that stays away must not keep an evicted model in memory."""
    claim, steps = walk(advance(SERVING, Outcome.LOST), Outcome.LEAVE, Outcome.OK)
    assert (steps, claim.loaded) == ([Step.UNLOAD, Step.DONE], False)


def test_the_hint_is_held_until_the_load_has_ended() -> None:
    """A held hint is the back-pressure, and comes back to the queue when the loader dies."""
    claim, held = Claim(), list[bool]()
    for outcome in TO_SERVE:
        held.append(holds_hint(claim))
        claim = advance(claim, outcome)
    assert held == [True, True, True, True, False]
    assert not holds_hint(advance(SERVING, Outcome.LOST))


def test_a_hint_for_a_model_on_its_way_out_is_kept() -> None:
    """Past its look back a claim will not see that job: the hint starts the next claim."""
    kept = {step for step in Step if on_hint(Claim(step=step)) is Hint.KEEP}
    assert kept == {Step.DROP_LEASE, Step.LOOK_LAST, Step.WAKE, Step.UNLOAD}
    assert on_hint(None) is on_hint(Claim(step=Step.DONE)) is Hint.START


def ends(claim: Claim, outcome: Outcome) -> str | None:
    """Why ``claim`` cannot end its step with ``outcome``; None when it can."""
    try:
        advance(claim, outcome)
    except ValueError as error:
        return str(error)
    return None


def test_every_step_has_a_way_out_and_refuses_what_it_cannot_mean() -> None:
    """Each step takes one outcome at least; each other one raises and names step and outcome."""
    for step, loaded, refusing in itertools.product(Step, (False, True), (False, True)):
        claim = Claim(step=step, loaded=loaded, refusing=refusing)
        answers = {outcome: ends(claim, outcome) for outcome in Outcome}
        assert all(f"step {step} cannot end with {o}" in why for o, why in answers.items() if why is not None)
        assert (None not in answers.values()) is (step is Step.DONE)


def test_the_reason_of_a_hint() -> None:
    """A copy of a job has none; a reason of another version is taken as the plainest one."""
    assert Reason.of(None) is Reason.JOB
    assert Reason.of("backlog") is Reason.BACKLOG
    assert Reason.of("of-tomorrow") is Reason.of(7) is Reason.JOB
