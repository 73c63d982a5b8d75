"""When replicas come and go: a crowd is spread, it recedes, and nothing swings back and forth over an hour."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from qworker.policy.replicas import PATIENCE, Pressure, Verdict

JOB_SECONDS, LOAD_SECONDS, TARGET, LINGER = 0.1, 2.0, 5.0, 30.0
STEP = 0.5


def pressure(slot: int = 0, slots: int = 3) -> Pressure:
    return Pressure(slot, slots=slots, target=TARGET, linger=LINGER, load_seconds=LOAD_SECONDS)


def looks(
    subject: Pressure, ready: int, *, seconds: float, rate: float, consumers: int = 1, start: float = 0.0
) -> list[Verdict]:
    """What it says of a queue that stays like this, at ``rate`` jobs a second here."""
    times = [start + i * STEP for i in range(round(seconds / STEP))]
    return [subject.look(ready=ready, consumers=consumers, done=int(at * rate), now=at) for at in times]


def test_a_backlog_has_to_last() -> None:
    """A queue that is long for a moment is none; one that stays so is asked for once a load, not at each look."""
    assert Verdict.ASK not in looks(pressure(), 100, seconds=PATIENCE, rate=10)
    asked = looks(pressure(), 100, seconds=10, rate=10)
    assert asked.count(Verdict.ASK) == math.ceil((10 - PATIENCE) / (1.5 * LOAD_SECONDS))


def test_backlog_counts_in_seconds_and_among_consumers() -> None:
    """Many quick jobs are no backlog, few slow ones are; and two consumers halve it."""
    assert Verdict.ASK not in looks(pressure(), 400, seconds=20, rate=100)
    assert Verdict.ASK in looks(pressure(), 40, seconds=20, rate=1)
    assert Verdict.ASK not in looks(pressure(), 60, seconds=20, rate=10, consumers=2)
    assert Verdict.ASK in looks(pressure(), 120, seconds=20, rate=10, consumers=2)


@pytest.mark.parametrize("seconds", [0.6, 4.0, 60.0])
def test_jobs_that_take_longer_than_a_look_count_in_full(seconds: float) -> None:
    """Ten jobs of some seconds each are a backlog, also while the first one is not done yet."""
    subject = pressure()
    assert Verdict.ASK in looks(subject, 10, seconds=20, rate=1 / seconds)
    assert subject.backlog >= 10 * min(seconds, 19) * 0.8


def test_all_slots_taken_is_all() -> None:
    """Nobody can come any more."""
    assert Verdict.ASK not in looks(pressure(), 1000, seconds=60, rate=10, consumers=3)


def test_the_first_slot_asks_for_all() -> None:
    """Others ask as well, later: the first slot may be free."""
    other = looks(pressure(1), 100, seconds=20, rate=10)
    assert looks(pressure(), 100, seconds=20, rate=10).index(Verdict.ASK) < other.index(Verdict.ASK)


def test_only_replicas_leave_and_the_last_slot_first() -> None:
    """What is in slot 0, or is the only consumer, stays however idle it is."""

    def idle(slot: int, consumers: int) -> list[Verdict]:
        return looks(pressure(slot), 0, seconds=120, rate=0, consumers=consumers)

    assert Verdict.LEAVE not in idle(0, consumers=2)
    assert Verdict.LEAVE not in idle(2, consumers=1)
    first, second = (idle(slot, consumers=3).index(Verdict.LEAVE) for slot in (2, 1))
    assert LINGER <= first * STEP < second * STEP


@dataclass
class World:
    """A queue, its replicas as fluid: each does a job every ``JOB_SECONDS``, comes and goes as it is told."""

    slots: int
    queue: float = 0.0
    now: float = 0.0
    holders: dict[int, Pressure] = field(default_factory=dict[int, Pressure])
    done: dict[int, float] = field(default_factory=dict[int, float])
    coming: list[float] = field(default_factory=list[float])
    came: list[float] = field(default_factory=list[float])
    went: list[float] = field(default_factory=list[float])

    def run(self, seconds: float, arrivals: Callable[[float], float]) -> None:
        end = self.now + seconds
        while self.now < end:
            self.queue += arrivals(self.now) * STEP
            for slot in list(self.holders):
                did = min(self.queue, STEP / JOB_SECONDS, self.queue / len(self.holders) + 1)
                self.queue -= did
                self.done[slot] += did
            self.now += STEP
            for slot, holder in list(self.holders.items()):
                self._look(slot, holder)
            while self.coming and self.coming[0] <= self.now:
                self.coming.pop(0)
                self.join()

    def join(self) -> None:
        free = next((slot for slot in range(self.slots) if slot not in self.holders), None)
        if free is not None:
            self.holders[free] = pressure(free, self.slots)
            self.done.setdefault(free, 0.0)
            self.came.append(self.now)

    def _look(self, slot: int, holder: Pressure) -> None:
        verdict = holder.look(
            ready=int(self.queue), consumers=len(self.holders), done=int(self.done[slot]), now=self.now
        )
        if verdict is Verdict.ASK:
            self.coming.append(self.now + LOAD_SECONDS)
        elif verdict is Verdict.LEAVE:
            del self.holders[slot]
            self.went.append(self.now)


def test_a_flash_crowd_is_spread_and_recedes() -> None:
    """Four times what one can do: help is there within seconds, the queue is gone soon, and so is the help."""
    world = World(6)
    world.join()
    world.run(60, lambda _: 2.0)
    assert len(world.holders) == 1
    world.run(60, lambda _: 40.0)
    assert world.came[1] - 60 < 12
    assert len(world.holders) >= 4
    world.run(300, lambda _: 2.0)
    assert world.queue < 2
    assert set(world.holders) == {0}


@pytest.mark.parametrize("load", [0.3, 0.7, 1.1, 1.5, 2.2, 2.8])
def test_a_steady_load_settles(load: float) -> None:
    """Over an hour at any one rate, replicas come a few times and then stay: they do not take turns."""
    world = World(6)
    world.join()
    world.run(3_600, lambda _: load / JOB_SECONDS)
    assert len(world.came) + len(world.went) <= 6, (world.came, world.went)
    assert max([*world.came, *world.went]) < 600
    assert load <= len(world.holders) <= 2 * math.ceil(load) + 1


def test_an_hour_of_waves() -> None:
    """A load that rises and falls every ten minutes moves them at most a few times a wave."""
    world = World(6)
    world.join()
    world.run(3_600, lambda at: (1.6 + 1.4 * math.sin(2 * math.pi * at / 600)) / JOB_SECONDS)
    assert len(world.came) + len(world.went) <= 6 * 10, (world.came, world.went)
