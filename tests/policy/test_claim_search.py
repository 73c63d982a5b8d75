"""Every interleaving of the claim protocol, at sizes for each run of the tests.

Bigger ones: ``python -m tests.policy.claim_search --big``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from qworker.policy.claim import Claim, Hint, Outcome, Step, advance
from tests.policy import claim_search
from tests.policy.claim_search import Advance, Setting, dark, search

WITH_SWEEP = {
    "two lanes, a lost session, ghost consumers": Setting(2, (1, 1), losses=1, lossy=True, ghosts=True, capacity=1),
    "a crash and a lost session": Setting(2, (1, 0), crashes=1, losses=1, lossy=True, ghosts=True),
    "three jobs, a crash": Setting(2, (2, 1), crashes=1, lossy=True, capacity=1),
    "two crashes, ghost consumers": Setting(2, (2, 0), crashes=2, lossy=True, ghosts=True),
    "bad loads, a lost session, forced": Setting(2, (1, 0), bad_loads=1, losses=1, forces=1, lossy=True, capacity=1),
    "replicas, a crash": Setting(2, (1, 1), slots=2, backlogs=1, crashes=1, lossy=True, capacity=1),
    "replicas, a lost session": Setting(2, (1, 0), slots=2, backlogs=1, losses=1, capacity=1),
    "three workers": Setting(3, (2, 0), crashes=1, lossy=True, capacity=1),
}

WITHOUT_SWEEP = {
    "no fault": Setting(sweep=False),
    "a crash, a lost session": Setting(2, (2, 0), crashes=1, losses=1, sweep=False),
    "replicas, two lanes": Setting(2, (1, 1), slots=2, backlogs=1, forces=1, sweep=False),
    "bad loads": Setting(2, (1, 1), bad_loads=1, crashes=1, sweep=False),
    "three workers": Setting(3, (2, 0), crashes=1, sweep=False),
}

PLAIN = Setting(3, (2, 1), atomic=True, sweep=False, capacity=3)
"""Publishes arrive at once and nothing fails: what is stuck here is the protocol's own fault."""
CRASH_WHILE_LOADING = replace(PLAIN, workers=2, crashes=1, crash_at=frozenset({Step.LOAD}))


def _marked(name: str) -> object:
    """Two of them take longer than all the rest of ``ops/check``."""
    marks = [pytest.mark.slow] if name.startswith("replicas") else []
    return pytest.param(WITH_SWEEP[name], id=name, marks=marks)


@pytest.mark.parametrize("setting", [_marked(name) for name in WITH_SWEEP])
def test_with_the_sweep_every_job_can_still_be_done_from_every_state(setting: Setting) -> None:
    """No stuck state, no lost job, no double load in a slot, nothing done without its lease."""
    found = search(setting)
    assert found.violations == []
    assert found.stuck == [], found.trace
    assert found.states > 1_000


@pytest.mark.parametrize("setting", WITHOUT_SWEEP.values(), ids=WITHOUT_SWEEP.keys())
def test_without_the_sweep_one_more_job_revives_the_model(setting: Setting) -> None:
    """Some states are stuck (a job between routing and its queue), which is why there is a sweep; none
    is dark."""
    found = search(setting)
    assert found.violations == []
    assert found.stuck, "if nothing is stuck without the sweep, the search does not see the races"
    assert dark(setting, found.stuck) == []


@pytest.mark.parametrize("setting", [PLAIN, CRASH_WHILE_LOADING, replace(PLAIN, slots=2, workers=2, backlogs=1)])
def test_without_faults_the_claims_alone_are_enough(setting: Setting) -> None:
    """With atomic publishes no sweep is needed, also not when a worker dies while it loads."""
    found = search(setting)
    assert found.violations == []
    assert found.stuck == [], found.trace


# --- the search can fail --------------------------------------------------------------------------


def no_last_look(claim: Claim, outcome: Outcome) -> Claim:
    after = advance(claim, outcome)
    return advance(after, Outcome.EMPTY) if after.step is Step.LOOK_LAST else after


def last_look_before_the_lease_is_dropped(claim: Claim, outcome: Outcome) -> Claim:
    if claim.step is Step.LOOK_BACK and outcome is Outcome.EMPTY:
        return replace(claim, step=Step.LOOK_LAST)
    if claim.step is Step.LOOK_LAST and outcome is Outcome.EMPTY:
        return replace(claim, step=Step.DROP_LEASE)
    if claim.step is Step.DROP_LEASE:
        return replace(claim, step=Step.UNLOAD if claim.loaded else Step.DONE)
    return advance(claim, outcome)


def lease_dropped_before_cancel(claim: Claim, outcome: Outcome) -> Claim:
    if claim.step is Step.SERVE and outcome is Outcome.LEAVE:
        return replace(claim, step=Step.DROP_LEASE)
    return advance(claim, outcome)


def lease_never_dropped(claim: Claim, outcome: Outcome) -> Claim:
    after = advance(claim, outcome)
    return replace(after, step=Step.UNLOAD) if after.step is Step.DROP_LEASE and after.loaded else after


def consumes_on_after_a_lost_session(claim: Claim, outcome: Outcome) -> Claim:
    if outcome is Outcome.LOST and claim.loaded:
        return replace(claim, step=Step.CONSUME)
    return advance(claim, outcome)


def loads_without_a_lease(claim: Claim, outcome: Outcome) -> Claim:
    if claim.step is Step.LEASE and outcome is Outcome.TAKEN and not claim.loaded:
        return replace(claim, step=Step.LOAD)
    return advance(claim, outcome)


def _held_while_leasing(claim: Claim) -> bool:
    return claim.step is Step.LEASE


def _never_kept(claim: Claim | None) -> Hint:
    return Hint.START if claim is None else Hint.DROP


def _never(_lanes: Iterable[tuple[int, int]]) -> bool:
    return False


@pytest.mark.parametrize("wrong", [no_last_look, last_look_before_the_lease_is_dropped])
def test_a_table_that_looks_too_little_is_found_out(wrong: Advance) -> None:
    """Without a second look after the lease is dropped, jobs are stuck."""
    assert search(PLAIN, wrong).stuck


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lease_dropped_before_cancel, "consumes without a lease"),
        (lease_never_dropped, "a lease is kept after the leave"),
        (consumes_on_after_a_lost_session, "without its lease"),
        (loads_without_a_lease, "load without its lease"),
    ],
)
def test_a_table_that_breaks_the_lease_is_found_out(wrong: Callable[[Claim, Outcome], Claim], says: str) -> None:
    """Each of these breaks a rule that the search watches in every state."""
    found = search(Setting(2, (1, 0), losses=1), wrong, until_wrong=True)
    assert any(says in violation for violation in found.violations), found.violations


def test_a_lease_that_is_never_dropped_makes_the_model_dark() -> None:
    """Its announcement swallows the hints of all later jobs."""
    setting = Setting(1, (2, 0), sweep=False)
    assert dark(setting, search(setting, lease_never_dropped).stuck, lease_never_dropped)


def test_a_hint_acked_before_the_load_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies while it loads then leaves nothing behind that wakes another."""
    monkeypatch.setattr(claim_search, "holds_hint", _held_while_leasing)
    assert search(CRASH_WHILE_LOADING).stuck


def test_a_hint_dropped_on_the_way_out_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only hint of a job must not be dropped by a claim that will not look again."""
    monkeypatch.setattr(claim_search, "on_hint", _never_kept)
    assert search(replace(PLAIN, workers=1)).stuck


def test_a_sweep_that_never_wakes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep of the search is the rule of the product."""
    monkeypatch.setattr(claim_search, "needs_wake", _never)
    assert search(Setting()).stuck
