"""The residency table, measured from outside: by what a shell that carries its decisions out holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from qworker.policy.eviction import Gdsf, Lru
from qworker.policy.residency import Decision, Residency, State

BUDGET, BRAKE, PATIENCE = 100, 5.0, 30.0
NAMES = tuple("abcde")
MODELS = st.sampled_from(NAMES)
SIZES = st.one_of(st.integers(5, 60), st.integers(60, 110))
Place = Literal["waiting", "loading", "hot", "draining"]


class Tenant:
    """What the shell knows of one model, by its own bookkeeping."""

    def __init__(self, nbytes: int, now: float, urgency: int = 0) -> None:
        self.nbytes = nbytes
        self.urgency = urgency
        self.place: Place = "waiting"
        self.since = now
        self.in_hand = 0
        self.forced = False
        self.served = False
        self.offline = 0

    def overdue(self, now: float) -> bool:
        """Offline wants have no right to what others work with, however long they wait."""
        return self.urgency >= 0 and now >= self.since + PATIENCE


class ResidencyMachine(RuleBasedStateMachine):
    """A shell that does what it is told, in any order and at any pace, and checks each decision."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0
        self.tenants: dict[str, Tenant] = {}
        self.pinned: set[str] = set()
        self.last_used: dict[str, float] = {}
        self.peak = 0
        self.residency = Residency(BUDGET, Lru(), min_residency=BRAKE, max_cold_wait=PATIENCE)

    @initialize(gdsf=st.booleans())
    def choose(self, gdsf: bool) -> None:
        eviction = Gdsf() if gdsf else Lru()
        self.residency = Residency(BUDGET, eviction, min_residency=BRAKE, max_cold_wait=PATIENCE)

    # --- carrying out, and checking what is told --------------------------------------------------

    def held(self) -> int:
        return sum(t.nbytes for t in self.tenants.values() if t.place != "waiting")

    def at(self, *places: Place) -> list[str]:
        return sorted(m for m, t in self.tenants.items() if t.place in places)

    def head(self) -> str | None:
        """The first waiter that would fit beside the pinned ones."""
        kept = sum(self.tenants[m].nbytes for m in self.pinned if m in self.at("loading", "hot"))
        waiting = (m for m, t in self.tenants.items() if t.place == "waiting")
        return next((m for m in waiting if self.tenants[m].nbytes <= BUDGET - kept), None)

    def obey(self, decision: Decision) -> None:
        line = self.at("waiting")
        for model in decision.admit:
            tenant = self.tenants[model]
            assert tenant.place == "waiting"
            self.enter(tenant, "loading")
        for eviction in decision.evict:
            self.check_victim(eviction.model, eviction.forced)
            tenant = self.tenants[eviction.model]
            self.enter(tenant, "draining")
            tenant.forced = eviction.forced
            assert len(eviction.reason) > 10
        if decision.evict:
            self.check_all_needed([e.model for e in decision.evict])
        self.check_nobody_uncovered_the_head(decision, line)
        self.peak = max(self.peak, self.held())

    def enter(self, tenant: Tenant, place: Place) -> None:
        tenant.place, tenant.since, tenant.served = place, self.now, False

    def check_victim(self, model: str, forced: bool) -> None:
        """Who must leave, and may that be?"""
        tenant, head = self.tenants[model], self.head()
        young = self.now < tenant.since + BRAKE
        assert head is not None, "evicted for nobody"
        assert model not in self.pinned, "evicted a pinned model"
        if tenant.place == "draining":
            assert forced, "told twice"
            assert not tenant.forced, "told twice that it is final"
        else:
            assert tenant.place == "hot", f"evicted a model that is {tenant.place}"
        if forced:
            assert self.tenants[head].overdue(self.now), "forced, and the head has not waited long"
            assert not young or tenant.served or tenant.place == "draining", "evicted before it served once"
            return
        assert not tenant.in_hand, "evicted a busy model"
        assert not young, "evicted a young model"
        if self.tenants[head].urgency < 0:
            assert not tenant.offline, "offline work evicted offline work"
            assert self.now >= self.last_used.get(model, -PATIENCE) + PATIENCE, (
                "evicted what is called, for offline work"
            )

    def check_all_needed(self, victims: list[str]) -> None:
        """Without any one of the victims the head would not fit, and with all of them it does."""
        head = self.head()
        assert head is not None
        forced = any(self.tenants[m].forced for m in victims)
        coming = 0
        for model in self.at("draining"):
            # For a forced decision only drains that cannot turn back are sure to come.
            sure = self.tenants[model].forced or not forced
            coming += self.tenants[model].nbytes if sure or model in victims else 0
        short = self.tenants[head].nbytes - (BUDGET - self.held()) - coming
        assert short <= 0, "the victims are not enough"
        for model in victims:
            assert short + self.tenants[model].nbytes > 0, f"{model} went for nothing"

    def check_nobody_uncovered_the_head(self, decision: Decision, line: list[str]) -> None:
        """Who came in before the head did left it enough, in free bytes and those on their way."""
        head = self.head()
        if head is None or head not in line:
            return
        came = list(self.tenants)  # in the order of the line
        passed = sum(self.tenants[m].nbytes for m in decision.admit if came.index(m) > came.index(head))
        if passed:
            coming = sum(self.tenants[m].nbytes for m in self.at("draining"))
            spare = BUDGET - self.held() + coming - self.tenants[head].nbytes
            assert spare >= 0, f"{head} was passed, and waits longer"
            for victim in (eviction.model for eviction in decision.evict):
                assert spare + passed < self.tenants[victim].nbytes, f"{victim} went for one that passed"

    # --- events -----------------------------------------------------------------------------------

    @rule(model=MODELS, nbytes=SIZES, urgency=st.sampled_from([0, 0, -1, 1, 9]))
    def want(self, model: str, nbytes: int, urgency: int) -> None:
        if model in self.tenants:
            with pytest.raises(ValueError, match=self.tenants[model].place):
                self.residency.want(model, nbytes, self.now)
            return
        decision = self.residency.want(model, nbytes, self.now, urgency=urgency)
        assert (model in decision.refuse) is (nbytes > BUDGET)
        if nbytes <= BUDGET:
            self.stand_in_line(model, Tenant(nbytes, self.now, urgency))
        self.obey(decision)

    def stand_in_line(self, model: str, new: Tenant) -> None:
        """``tenants`` is in the order of the line: right behind the last one that may not be passed."""
        line = [m for m, t in self.tenants.items() if t.place == "waiting"]
        stays = [t.urgency >= new.urgency or t.overdue(self.now) for t in map(self.tenants.get, line) if t]
        at = max((place + 1 for place, fixed in enumerate(stays) if fixed), default=0)
        others = [m for m in self.tenants if m not in line]
        self.tenants[model] = new
        self.tenants = {m: self.tenants[m] for m in (*others, *line[:at], model, *line[at:])}

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 5.0, 12.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        """The shell keeps its timer, but may be late."""
        self.now += seconds
        self.obey(self.residency.tick(self.now))

    @rule(model=MODELS)
    def used(self, model: str) -> None:
        self.residency.used(model, self.now)
        self.last_used[model] = self.now

    @rule(model=MODELS)
    def hurry(self, model: str) -> None:
        """An online job came for a model; that changes something for offline waiters alone."""
        tenant = self.tenants.get(model)
        if tenant is not None and tenant.place == "waiting" and tenant.urgency < 0:
            del self.tenants[model]
            self.stand_in_line(model, Tenant(tenant.nbytes, self.now))
        self.obey(self.residency.hurry(model, self.now))

    @precondition(lambda self: self.at("hot"))
    @rule(data=st.data())
    def offline_job(self, data: st.DataObject) -> None:
        """Begins where none is in hand, else ends."""
        tenant = self.tenants[model := data.draw(st.sampled_from(self.at("hot")))]
        if tenant.offline:
            self.residency.offline_finished(model)
        else:
            self.residency.offline_started(model)
        tenant.offline = 1 - tenant.offline
        self.timer()

    @rule(model=MODELS, pin=st.sampled_from([True, True, False]))
    def pin_or_unpin(self, model: str, pin: bool) -> None:
        if pin:
            self.residency.pin(model)
            self.pinned.add(model)
        else:
            self.residency.unpin(model)
            self.pinned.discard(model)
        self.timer()  # a pin decides as well: whom it shuts out holds back nobody

    @precondition(lambda self: self.at("waiting"))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.at("waiting")))
        del self.tenants[model]
        self.obey(self.residency.abandon(model, self.now))

    @precondition(lambda self: self.at("loading"))
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def load_ends(self, data: st.DataObject, ok: bool) -> None:
        model = data.draw(st.sampled_from(self.at("loading")))
        if not ok:
            self.bytes_back(model)
            return
        self.enter(self.tenants[model], "hot")
        self.obey(self.residency.loaded(model, 1.5, self.now))

    @precondition(lambda self: self.at("loading", "hot"))
    @rule(data=st.data(), nbytes=st.integers(0, 110))
    def grow(self, data: st.DataObject, nbytes: int) -> None:
        model = data.draw(st.sampled_from(self.at("loading", "hot")))
        tenant = self.tenants[model]
        fits = self.held() - tenant.nbytes + nbytes <= BUDGET
        assert self.residency.grow(model, nbytes, self.now) is fits
        if fits:
            tenant.nbytes = nbytes
            self.peak = max(self.peak, self.held())
            self.timer()
        elif not tenant.in_hand:
            self.bytes_back(model)

    @precondition(lambda self: self.at("hot", "draining"))
    @rule(data=st.data())
    def job_starts(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.at("hot", "draining")))
        self.tenants[model].in_hand += 1
        self.used(model)
        self.residency.started(model)

    @precondition(lambda self: any(t.in_hand for t in self.tenants.values()))
    @rule(data=st.data())
    def job_ends(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(m for m, t in self.tenants.items() if t.in_hand)))
        self.finish(model)

    def finish(self, model: str) -> None:
        self.tenants[model].in_hand -= 1
        self.tenants[model].served = self.tenants[model].place == "hot"
        self.residency.finished(model, self.now)
        self.timer()

    @precondition(lambda self: self.at("draining"))
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.at("draining")))
        tenant = self.tenants[model]
        assert self.residency.may_revive(model) is not tenant.forced
        if tenant.forced:
            with pytest.raises(ValueError, match="forced"):
                self.residency.revived(model, self.now)
            return
        self.enter(tenant, "hot")
        self.obey(self.residency.revived(model, self.now))

    @precondition(lambda self: self.at("hot"))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.at("hot")))
        self.enter(self.tenants[model], "draining")
        self.tenants[model].forced = False
        self.obey(self.residency.leaving(model, self.now))

    @precondition(lambda self: any(not self.tenants[m].in_hand for m in self.at("draining")))
    @rule(data=st.data())
    def unloaded(self, data: st.DataObject) -> None:
        idle = [m for m in self.at("draining") if not self.tenants[m].in_hand]
        self.bytes_back(data.draw(st.sampled_from(idle)))

    def bytes_back(self, model: str) -> None:
        if self.tenants[model].offline:
            self.residency.offline_finished(model)
        del self.tenants[model]
        self.obey(self.residency.gone(model, self.now))

    def timer(self) -> None:
        """What the owner's timer does after an event without a decision: only when it is told to."""
        due = self.residency.next_tick(self.now)
        if due is not None and due <= self.now:
            self.obey(self.residency.tick(self.now))

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def never_over_budget(self) -> None:
        """By the shell's own sums."""
        assert self.held() <= BUDGET

    @invariant()
    def shell_and_table_agree(self) -> None:
        """Places, bytes, jobs in hand, pins, the sums and the high-water mark."""
        ours = {(m, t.place, t.nbytes, t.in_hand, m in self.pinned) for m, t in self.tenants.items()}
        rows = self.residency.snapshot(self.now)
        assert ours == {(r.model, str(r.state), r.nbytes, r.in_hand, r.pinned) for r in rows}
        assert self.residency.held == self.held()
        assert self.residency.free == BUDGET - self.held()
        assert self.residency.peak == self.peak

    @invariant()
    def nothing_is_left_undecided(self) -> None:
        """When the shell has done its timer's work, a decision at the same instant changes nothing."""
        due = self.residency.next_tick(self.now)
        assert due is None or due > self.now
        assert self.residency.tick(self.now) == Decision()

    @invariant()
    def the_head_does_not_wait_for_nothing(self) -> None:
        """It does not fit in what is free; and once overdue, it is sure of its bytes if they can be had."""
        if (head := self.head()) is None:
            return
        need, sure = self.tenants[head].nbytes, BUDGET - self.held()
        assert sure < need, f"{head} fits, and was not let in"
        if not self.tenants[head].overdue(self.now):
            return
        sure += sum(self.tenants[m].nbytes for m in self.at("draining") if self.tenants[m].forced)
        could = sure
        for model in set(self.at("draining", "hot")) - self.pinned:
            tenant = self.tenants[model]
            old = self.now >= tenant.since + BRAKE
            could += tenant.nbytes if not tenant.forced and (tenant.place == "draining" or old) else 0
        assert sure >= need or could < need, f"{head} is overdue, and who could make room for it was not told"

    @invariant()
    def every_waiter_has_a_reason(self) -> None:
        """The operator sees each waiter, in line, with words."""
        blocked = self.residency.blocked(self.now)
        assert [m for m, _, _ in blocked] == [m for m, t in self.tenants.items() if t.place == "waiting"]
        assert all(waited >= 0 and "needs" in why for _, waited, why in blocked)

    def teardown(self) -> None:
        """Liveness: when pins are lifted, loads and drains end, jobs finish but for an endless one on
        every hot model, and the timer is kept, then everyone who waits is let in, in bounded time."""
        for model in sorted(self.pinned):
            self.pin_or_unpin(model, False)
        for model in self.at("waiting"):
            self.hurry(model)
        for model in self.at("hot"):
            self.job_starts_for_good(model)
        deadline = self.now + (PATIENCE + BRAKE + 1.0) * (len(NAMES) + 1)
        while waiting := self.at("waiting"):
            assert self.now <= deadline, f"{waiting} starve"
            if not self.settle_one():
                due = self.residency.next_tick(self.now)
                assert due is not None, f"nothing will ever wake {waiting}"
                assert due > self.now
                self.now = due
                self.obey(self.residency.tick(self.now))

    def job_starts_for_good(self, model: str) -> None:
        self.tenants[model].in_hand += 1
        self.residency.started(model)

    def settle_one(self) -> bool:
        """Finish one thing that the shell was told to do; False when there is none."""
        if draining := self.at("draining"):
            model = draining[0]
            while self.tenants[model].in_hand:
                self.finish(model)
            self.bytes_back(model)
            return True
        if loading := self.at("loading"):
            model = loading[0]
            self.enter(self.tenants[model], "hot")
            self.obey(self.residency.loaded(model, 1.0, self.now))
            if self.tenants[model].place == "hot":
                self.job_starts_for_good(model)
            return True
        return False


MACHINE_SETTINGS = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_table_holds_its_promises_whatever_happens() -> None:
    """Budget, fair victims, none needless, none left waiting: see ResidencyMachine."""
    run_state_machine_as_test(ResidencyMachine, settings=MACHINE_SETTINGS)


# --- the rules one by one -------------------------------------------------------------------------


def hot(residency: Residency, *models: tuple[str, int], now: float = 0.0) -> None:
    for model, nbytes in models:
        assert residency.want(model, nbytes, now).admit == (model,)
        residency.loaded(model, 1.0, now)


def victims(decision: Decision) -> list[tuple[str, bool]]:
    return [(e.model, e.forced) for e in decision.evict]


def lru(*models: tuple[str, int]) -> Residency:
    """A table with these models hot since 0, each used once, in this order."""
    residency = Residency(100, Lru())
    hot(residency, *models)
    for when, (model, _) in enumerate(models):
        residency.used(model, 1.0 + when / 10)
    return residency


def test_the_least_dear_leave_and_nobody_needless() -> None:
    """a (10) is the least dear, b (60) frees enough alone: a stays after all."""
    residency = lru(("a", 10), ("b", 60), ("c", 30))
    assert victims(residency.want("d", 60, 10.0)) == [("b", False)]


def test_a_pinned_model_stays_however_little_it_is_used() -> None:
    """a is the least dear, but pinned: b goes, also when the head is overdue."""
    for now in (10.0, 90.0):
        residency = lru(("a", 50), ("b", 50))
        residency.pin("a")
        residency.started("b")
        residency.want("d", 50, 10.0)
        residency.finished("b", now)
        assert [model for model, _ in victims(residency.tick(now))] == ["b"]


def test_bytes_on_their_way_are_waited_for() -> None:
    """While b drains for d, no second look evicts more; d comes in when b is gone, and not before."""
    residency = lru(("a", 40), ("b", 60))
    assert victims(residency.want("d", 40, 10.0)) == [("a", False)]
    assert residency.tick(11.0) == Decision()
    assert residency.gone("a", 12.0).admit == ("d",)


def test_a_small_request_passes_only_on_what_the_head_does_not_need() -> None:
    """90 bytes will be free, the head takes 60: of 30 free bytes all may pass, one more may not."""
    residency = lru(("a", 60), ("b", 10))
    assert victims(residency.want("head", 60, 10.0)) == [("a", False)]
    assert residency.want("thirty-one", 31, 10.0) == Decision()
    assert residency.want("thirty", 30, 10.0).admit == ("thirty",)
    assert residency.want("one", 1, 10.0) == Decision()
    assert residency.gone("a", 11.0).admit == ("head",)


def test_the_more_urgent_comes_first_but_never_before_one_that_is_overdue() -> None:
    """Among equals first come, first served; who has waited for his time is passed by nobody."""
    residency = lru(("a", 100))
    residency.started("a")
    for model, urgency in (("b", 0), ("c", 0), ("d", 5), ("e", 5), ("f", -1)):
        residency.want(model, 100, 1.0, urgency=urgency)
    assert [model for model, _, _ in residency.blocked(1.0)] == ["d", "e", "b", "c", "f"]
    residency.want("g", 100, 1.0 + PATIENCE, urgency=9)
    assert [model for model, _, _ in residency.blocked(1.0 + PATIENCE)] == ["d", "e", "b", "c", "g", "f"], (
        "offline jobs have no such right"
    )
    residency.finished("a", 40.0)
    residency.tick(40.0)
    assert residency.gone("a", 40.0).admit == ("d",)


def test_nobody_passes_a_head_that_is_not_covered() -> None:
    """The head waits for a busy model: what is free is the head's, however long that takes."""
    residency = lru(("a", 60), ("b", 10))
    residency.started("a")
    assert residency.want("head", 60, 10.0) == Decision()
    assert residency.want("small", 1, 10.0) == Decision()


def test_who_may_pass_once_victims_are_told_passes_at_once() -> None:
    """The same decision that covers the head lets in who does not harm it: nothing is left for a second look."""
    residency = lru(("a", 49))
    residency.started("a")
    residency.want("c", 52, 10.0)
    residency.want("b", 5, 10.0)
    residency.finished("a", 15.0)
    decision = residency.tick(15.0)
    assert (victims(decision), decision.admit) == ([("a", False)], ("b",))
    assert residency.next_tick(15.0) != 15.0


def test_a_request_shut_out_by_pins_holds_back_nobody() -> None:
    """It keeps its place, says why, and is first when the pin is lifted."""
    residency = lru(("a", 60))
    residency.pin("a")
    assert residency.want("big", 50, 10.0) == Decision()
    assert residency.want("small", 30, 10.0).admit == ("small",)
    assert "pinned models keep" in residency.blocked(10.0)[0][2]
    assert residency.next_tick(10.0) is None
    residency.unpin("a")
    assert residency.next_tick(10.0) == 10.0
    assert victims(residency.tick(10.0)) == [("a", False)]


def test_a_young_model_has_its_time_and_the_timer_knows_when_it_ends() -> None:
    """The brake: min_residency after the load, and not a moment later."""
    residency = lru(("a", 100))
    assert residency.want("b", 10, 3.0) == Decision()
    assert residency.next_tick(3.0) == 5.0
    assert victims(residency.tick(5.0)) == [("a", False)]


def test_a_job_that_ends_makes_the_timer_due() -> None:
    """finished() decides nothing; next_tick says that there is something to decide."""
    residency = lru(("a", 100))
    residency.started("a")
    residency.want("b", 10, 10.0)
    assert residency.next_tick(10.0) == 40.0
    residency.finished("a", 11.0)
    assert residency.next_tick(11.0) == 11.0


def test_an_overdue_head_outranks_busy_models_idle_ones_first() -> None:
    """After max_cold_wait busy models go too, for good; idle ones are taken first."""
    residency = lru(("a", 40), ("b", 40), ("c", 20))
    for model in "abc":
        residency.started(model)
    assert residency.want("d", 60, 10.0) == Decision()
    residency.finished("c", 11.0)
    assert residency.tick(39.0) == Decision()
    assert victims(residency.tick(40.0)) == [("c", True), ("a", True)]
    with pytest.raises(ValueError, match="forced"):
        residency.revived("a", 41.0)


def test_a_drain_in_progress_becomes_final_for_an_overdue_head() -> None:
    """a drains unforced and could turn back; when the head is overdue it is told once more."""
    residency = lru(("a", 100))
    assert victims(residency.want("b", 60, 10.0)) == [("a", False)]
    assert residency.may_revive("a")
    assert residency.next_tick(10.0) == 40.0
    assert victims(residency.tick(40.0)) == [("a", True)]
    assert residency.next_tick(40.0) is None


def test_a_revived_model_has_its_brake_and_another_goes() -> None:
    """b found jobs and stays; the head is not forgotten."""
    residency = lru(("b", 50), ("a", 50))
    assert victims(residency.want("d", 50, 10.0)) == [("b", False)]
    assert victims(residency.revived("b", 11.0)) == [("a", False)]


def test_a_newcomer_keeps_its_brake_until_it_has_served() -> None:
    """A crowd of overdue requests must not load models in turn that never serve."""
    residency = Residency(100, Lru())
    hot(residency, ("a", 100))
    residency.want("b", 100, 1.0)
    residency.want("c", 100, 1.0)
    assert victims(residency.tick(31.0)) == [("a", True)]
    assert residency.gone("a", 40.0).admit == ("b",)
    assert residency.loaded("b", 1.0, 41.0) == Decision()
    residency.started("b")
    assert residency.tick(42.0) == Decision()
    residency.finished("b", 43.0)
    assert victims(residency.tick(43.0)) == [("b", True)]


def test_growth_never_passes_the_budget() -> None:
    """What does not fit is not booked; what does counts at once."""
    residency = lru(("a", 40), ("b", 40))
    assert not residency.grow("a", 61, 3.0)
    assert residency.held == 80
    assert residency.grow("a", 60, 3.0)
    assert (residency.held, residency.free, residency.peak) == (100, 0, 100)
    assert residency.grow("a", 10, 3.0)
    assert (residency.held, residency.peak) == (50, 100)


def test_reasons_can_be_read_by_a_person() -> None:
    """Whose place, the key, the bytes; and for who waits, what keeps whom."""
    residency = Residency(100 << 20, Lru())
    hot(residency, ("a", 90 << 20), ("p", 5 << 20))
    residency.pin("p")
    residency.started("a")
    residency.want("b", 50 << 20, 10.0)
    ((_, waited, why),) = residency.blocked(12.0)
    assert waited == 2.0
    assert "needs 50.0 MiB: 5.0 MiB free, 0.0 MiB on their way" in why
    assert "a stays: 1 jobs in hand" in why
    assert "p stays: pinned" in why
    (eviction,) = residency.tick(40.0).evict
    assert eviction.reason.startswith("makes room for b (50.0 MiB, waited 30.0 s")
    assert "busy" in eviction.reason
    assert "frees 90.0 MiB" in eviction.reason


EVENTS: dict[str, Callable[[Residency], object]] = {
    "want a hot one": lambda r: r.want("a", 1, 9.0),
    "want less than nothing": lambda r: r.want("b", -1, 9.0),
    "loaded twice": lambda r: r.loaded("a", 1.0, 9.0),
    "revived, not draining": lambda r: r.revived("a", 9.0),
    "abandon a hot one": lambda r: r.abandon("a", 9.0),
    "gone, but cold": lambda r: r.gone("b", 9.0),
    "grow a cold one": lambda r: r.grow("b", 1, 9.0),
    "a cold one leaves": lambda r: r.leaving("b", 9.0),
    "finished, not started": lambda r: r.finished("a", 9.0),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS.keys())
def test_an_event_that_cannot_be_is_an_error_and_changes_nothing(event: Callable[[Residency], object]) -> None:
    """The error names what was expected and what was found."""
    residency = lru(("a", 40))
    before = residency.snapshot(9.0)
    with pytest.raises(ValueError, match="need"):
        event(residency)
    assert residency.snapshot(9.0) == before
    assert [r.state for r in before] == [State.HOT]


def test_offline_jobs_evict_nobody_who_is_called_nor_each_other() -> None:
    """However long they wait: a model that online jobs used lately stays, and one with offline jobs in hand."""
    residency = lru(("a", 50), ("b", 50))
    residency.used("a", 9.0)
    residency.offline_started("b")
    assert residency.want("c", 50, 10.0, urgency=-1) == Decision()
    assert residency.tick(38.0) == Decision()
    assert residency.next_tick(38.0) == 9.0 + PATIENCE
    residency.offline_finished("b")
    assert [e.model for e in residency.tick(38.5).evict] == ["b"]


def test_an_online_job_makes_an_offline_want_one_like_others() -> None:
    """It moves up in line, its wait counts from then on, and offline jobs in hand do not stop it."""
    residency = lru(("a", 100))
    residency.offline_started("a")
    residency.want("b", 100, 10.0, urgency=-1)
    assert [e.model for e in residency.hurry("b", 20.0).evict] == ["a"]
    assert residency.hurry("b", 20.0) == Decision(), "once is enough"
