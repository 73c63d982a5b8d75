"""Hand-overs in the hot zone: whatever ends a wait, and whenever, no byte stays booked."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qworker.errors import ModelTooLarge
from qworker.policy.eviction import Lru
from qworker.policy.residency import Residency
from qworker.telemetry.counters import Counters
from qworker.worker.hot_zone import HotZone
from tests.support.waiting import wait_until

BUDGET = 10


class Guest:
    """A tenant as small as can be: waits for room, loads for some turns, stays until told to go."""

    def __init__(self, zone: HotZone, model: str, nbytes: int, turns: int, patience: float = 30.0) -> None:
        self.model = model
        self.served = False
        self._zone = zone
        self._nbytes = nbytes
        self._turns = turns
        self._patience = patience
        self._told = asyncio.Event()

    def evicted(self, *, forced: bool, reason: str) -> None:
        self._told.set()

    def leave(self) -> None:
        self._told.set()
        self._zone.give_up(self.model)

    async def run(self) -> None:
        self._zone.enter(self.model, self)
        try:
            if not await self._zone.room(self.model, self._nbytes, within=self._patience):
                return
            try:
                for _ in range(self._turns):
                    await asyncio.sleep(0)
                self._zone.loaded(self.model, 0.1)
                self.served = True
                await self._told.wait()
                for _ in range(self._turns):
                    await asyncio.sleep(0)
            finally:
                self._zone.gone(self.model)
        except ModelTooLarge:
            assert self._nbytes > BUDGET
        finally:
            self._zone.left(self.model)


def zone_of(budget: int = BUDGET) -> HotZone:
    loop = asyncio.get_running_loop()
    return HotZone(Residency(budget, Lru(), min_residency=0.0, max_cold_wait=0.0), loop.time, Counters())


Plan = list[tuple[int, int, str, int]]
PLANS = st.lists(
    st.tuples(
        st.integers(1, BUDGET + 1),  # bytes
        st.integers(0, 3),  # turns that a load takes
        st.sampled_from(["stays", "cancelled", "leaves", "impatient"]),
        st.integers(0, 12),  # in which turn that happens
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=150, deadline=None)
@given(PLANS)
def test_no_byte_is_left_booked(plan: Plan) -> None:
    """Waits that are cancelled, given up or timed out in any turn, loads and evictions in between: the budget
    holds throughout, and at the end nothing is held and nobody waits."""

    async def act() -> None:
        zone = zone_of()
        async with asyncio.TaskGroup() as tasks:
            clock = tasks.create_task(zone.run())
            guests: list[tuple[Guest, asyncio.Task[None], str, int]] = []
            for number, (nbytes, turns, fate, turn) in enumerate(plan):
                patience = 0.0 if fate == "impatient" else 30.0
                guest = Guest(zone, f"m{number}", nbytes, turns, patience)
                guests.append((guest, tasks.create_task(guest.run()), fate, turn))
            for now in range(14):
                for guest, task, fate, turn in guests:
                    if turn == now and fate == "cancelled":
                        task.cancel()
                    elif turn == now and fate == "leaves":
                        guest.leave()
                await asyncio.sleep(0)
                assert zone.held <= BUDGET
            for guest, *_ in guests:
                guest.leave()
            await asyncio.wait({task for _, task, _, _ in guests})
            clock.cancel()
        assert zone.held == 0
        assert zone.rows() == ()
        assert zone.blocked() == []
        assert zone.peak <= BUDGET

    asyncio.run(act())


async def test_cancelled_in_the_turn_of_its_admission() -> None:
    """The bytes came, and the one who waited for them was cancelled before it ran again: they go back."""
    zone = zone_of()
    async with asyncio.TaskGroup() as tasks:
        first = Guest(zone, "first", BUDGET, 0)
        leaving = tasks.create_task(first.run())
        await asyncio.sleep(0)
        second = tasks.create_task(Guest(zone, "second", BUDGET, 0).run())
        await asyncio.wait({leaving}, timeout=5)  # evicted by the second
        assert zone.held == BUDGET, "the second one has its bytes booked, and has not run yet"
        second.cancel()
    assert zone.held == 0


async def test_given_up_in_the_turn_of_its_admission() -> None:
    """To give up after the admission is too late: the load goes on, and its bytes are its own to give back."""
    zone = zone_of()
    zone.enter("late", Guest(zone, "late", 1, 0))
    waiting = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        waiting.set_result(await zone.room("late", 1, within=5))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait())
        await asyncio.sleep(0)
        zone.give_up("late")
    assert waiting.result() is True
    assert zone.held == 1
    zone.gone("late")
    assert zone.held == 0


async def test_too_large_at_once() -> None:
    """What can never fit is refused with both figures, and takes nothing."""
    zone = zone_of()
    with pytest.raises(ModelTooLarge, match=str(BUDGET)):
        await zone.room("giant", BUDGET + 1, within=5)
    assert (zone.held, zone.rows()) == (0, ())


async def test_a_claim_that_pins_keep_out_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hold the model for as long as claims may wait: another worker may have the room. What waits for
    a model that is busy goes on waiting."""
    monkeypatch.setattr("qworker.worker.hot_zone.KEPT_OUT_SECONDS", 0.1)
    monkeypatch.setattr("qworker.worker.hot_zone.LOOK_SECONDS", 0.02)
    loop = asyncio.get_running_loop()
    zone = HotZone(Residency(BUDGET, Lru(), min_residency=0.0, max_cold_wait=3600.0), loop.time, Counters())
    zone.pin("pinned")
    guests = [Guest(zone, "pinned", 6, 0), Guest(zone, "busy", 4, 0), Guest(zone, "patient", 3, 0)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        clock = tasks.create_task(zone.run())
        for guest in guests[:2]:
            tasks.create_task(guest.run())
        await wait_until(lambda: all(guest.served for guest in guests[:2]), what="both are there")
        zone.started("busy")
        tasks.create_task(guests[2].run())
        assert not await zone.room("large", 5, within=3600)
        assert "pinned models keep" in zone.kept_out(5)
        assert not zone.kept_out(4)
        assert not guests[2].served
        assert zone.crowded
        zone.finished("busy")
        await wait_until(lambda: guests[2].served, what="the patient one is there")
        for guest in guests:
            guest.leave()
        clock.cancel()
    assert zone.held == 0
