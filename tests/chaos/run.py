"""One chaos run: traffic, faults, and the verdict. A scenario says which of them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos import models
from tests.chaos.book import Book
from tests.chaos.faults import Faults
from tests.chaos.schedule import PLATFORM_FAULTS, WORKER_FAULTS, plan
from tests.chaos.stage import Stage
from tests.chaos.traffic import NO_REPLY_TO, REPLIES, Demand, PikaThread, Publisher, Readers, declare_queues
from tests.chaos.verdict import Figures, conclude
from tests.e2e.caller import packed
from tests.support.waiting import wait_until

Tell = Callable[[str], None]
LAST_ANSWERS_SECONDS = 90.0
QUEUE_YOUTH = 2.5
MOST_WORKERS = {"cycles": 1, "malformed": 1, "evictions": 2}
MALFORMED_AT_ONCE = 250


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be run. ``count`` is what the scenario counts; None takes its usual number."""

    scenario: str = "mixed"
    minutes: float = 3.0
    count: int | None = None
    seed: int = 1
    plane: str = "fast"
    workers: int = 3
    mounts: bool = False
    publishers: int = 3
    window: int = 16
    keep: bool = False


@dataclass(slots=True)
class Scene:
    """What a scenario acts on."""

    wanted: Wanted
    stage: Stage
    book: Book
    demand: Demand
    faults: Faults
    bad: PikaThread
    told: Tell
    complaints: list[str] = field(default_factory=list[str])

    def count(self, usual: int) -> int:
        return usual if self.wanted.count is None else self.wanted.count


async def run(wanted: Wanted, told: Tell) -> Figures:
    """Everything, from the broker's start to the verdict."""
    act, settings, demand = SCENARIOS[wanted.scenario]
    models.inputs_of(models.SLOW, 0, 1.0)  # measures this machine, while it is quiet and before threads ask at once
    folder = Path(tempfile.mkdtemp(prefix="qworker-chaos-"))
    started = time.monotonic()
    stage = Stage(folder, wanted.plane, mounts=wanted.mounts, names=demand().models)
    try:
        await asyncio.to_thread(stage.open)
        workers = min(wanted.workers, MOST_WORKERS.get(wanted.scenario, wanted.workers))
        await asyncio.to_thread(stage.start, workers, **settings)
        await asyncio.to_thread(declare_queues, stage.url)
        await asyncio.sleep(QUEUE_YOUTH)  # RabbitMQ loses what younger queues hold when it stops
        told(f"{wanted.scenario}: seed {wanted.seed}, {len(stage.lives)} workers, plane {wanted.plane}")
        figures = await _under_traffic(wanted, stage, act, demand(), told, started)
        if wanted.keep:
            kept = shutil.copytree(folder / "workers", f"{folder}-logs")
            told(f"the workers' logs are in {kept}")
        return figures
    finally:
        await asyncio.to_thread(stage.close)


async def _under_traffic(wanted: Wanted, stage: Stage, act: Act, demand: Demand, told: Tell, started: float) -> Figures:
    book = Book()
    demand.window = wanted.window
    readers = Readers(book, stage.client_settings())
    publishers = [
        Publisher(f"p{n}", book, readers, demand, stage.client_settings(), wanted.seed)
        for n in range(wanted.publishers)
    ]
    plain = PikaThread(stage.url, book, demand, wanted.seed, "plain")
    bad = PikaThread(stage.url, book, demand, wanted.seed, "bad")
    scene = Scene(wanted, stage, book, demand, Faults(stage, bad, told), bad, told)
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(readers.run(queue)) for queue in (REPLIES, NO_REPLY_TO)]
        publishing = [tasks.create_task(publisher.run(over)) for publisher in publishers]
        plain.start()
        try:
            await act(scene)
        finally:
            over.set()
            plain.told.set()
        told(f"no more jobs; {len(book.waiting())} wait")
        await asyncio.wait(publishing, timeout=LAST_ANSWERS_SECONDS)
        await asyncio.to_thread(plain.join, 30)
        scene.complaints += scene.faults.wrong
        if readers.broken:
            scene.complaints.append(f"{readers.broken} answers could not be read")
        figures = await asyncio.to_thread(
            conclude,
            stage,
            book,
            scenario=wanted.scenario,
            seed=wanted.seed,
            started=started,
            faults=dict(scene.faults.done),
            skipped=scene.faults.skipped,
            raw_doubles=lambda: readers.doubles,
            told=told,
            complaints=scene.complaints,
        )
        for task in (*reading, *publishing):
            task.cancel()
    return figures


# --- the scenarios ------------------------------------------------------------------------------------


async def _mixed(scene: Scene) -> None:
    """All faults, two at a time, from the seed."""
    seed, seconds = scene.wanted.seed, scene.wanted.minutes * 60
    lanes = [
        plan(seed, "workers", WORKER_FAULTS, 10_000, 1.0, 6.0),
        plan(seed, "platform", PLATFORM_FAULTS, 10_000, 2.0, 6.0),
    ]
    async with asyncio.TaskGroup() as tasks:
        for lane in lanes:
            tasks.create_task(asyncio.to_thread(scene.faults.run, lane))
        await asyncio.sleep(seconds)
        scene.faults.stop()


async def _evictions(scene: Scene) -> None:
    """Nothing but traffic for more models than fit, until so many have been evicted."""
    wanted = scene.count(1000)
    said = 0
    while (done := await asyncio.to_thread(_evicted, scene.stage)) < wanted:
        if done >= said + 200:
            said = done
            scene.told(f"{done} evictions")
        await asyncio.sleep(0.5)
    scene.faults.done["eviction"] = done


def _evicted(stage: Stage) -> int:
    """Models told to leave that did: some are let stay, as jobs came for them meanwhile."""
    return sum(state["counters"]["evictions"] - state["counters"]["revivals"] for state in stage.states())


def _evicted_at_least(stage: Stage, count: int) -> int:
    """How many were evicted, once there are so many; else 0."""
    done = _evicted(stage)
    return done if done >= count else 0


async def _kills(scene: Scene) -> None:
    await _faults_in_turn(scene, ("kill_serving",), scene.count(50), 0.1, 1.5)


async def _restarts(scene: Scene) -> None:
    await _faults_in_turn(scene, ("broker_restart",), scene.count(20), 1.0, 6.0)


async def _faults_in_turn(scene: Scene, kinds: tuple[str, ...], count: int, shortest: float, longest: float) -> None:
    planned = plan(scene.wanted.seed, "alone", kinds, count, shortest, longest)
    await asyncio.to_thread(scene.faults.run, planned)


async def _malformed(scene: Scene) -> None:
    """Broken messages among good ones; then, with the publishers still at work, memory is looked at."""
    left = scene.count(10_000)
    good = [_packed(name) for name in scene.stage.names]
    sizes: list[int] = []
    while left > 0:
        some = min(left, MALFORMED_AT_ONCE)
        await asyncio.to_thread(scene.bad.bad_ones, some, scene.stage.names, good)
        scene.faults.done["malformed"] += some
        left -= some
        sizes.append(_size(scene.stage))
        if left % 2500 == 0:
            scene.told(
                f"{scene.faults.done['malformed']} malformed messages, the worker has {sizes[-1] / 2**20:.0f} MiB"
            )
    await asyncio.to_thread(scene.bad.one_good)
    quarter = max(1, len(sizes) // 4)
    growth = sorted(sizes[-quarter:])[quarter // 2] - sorted(sizes[quarter : 2 * quarter] or sizes)[quarter // 2]
    scene.told(f"from the second quarter to the last one the worker grew by {growth / 2**20:+.1f} MiB")
    if growth > 16 << 20:
        scene.complaints.append(f"malformed messages made the worker grow by {growth / 2**20:.0f} MiB")


def _size(stage: Stage) -> int:
    return max(psutil.Process(worker.process.pid).memory_info().rss for worker in stage.live())


def _packed(name: str) -> bytes:
    return packed(name, models.inputs_of(name, 1))


async def _cycles(scene: Scene) -> None:
    """Two models take turns where one fits. A delivery that came to nothing would be the end of its job here."""
    wanted = scene.count(25)
    done = await wait_until(
        lambda: asyncio.to_thread(_evicted_at_least, scene.stage, 2 * wanted), 600, what="so many cycles", every=0.3
    )
    scene.faults.done["cycle"] = done // 2
    given_back = sum(state["counters"]["jobs_given_back"] for state in await asyncio.to_thread(scene.stage.states))
    failed = scene.book.tally().good_failed
    if given_back or failed:
        scene.complaints.append(f"{given_back} jobs were given back, and {dict(failed)} failed")


Act = Callable[[Scene], Awaitable[None]]
SCENARIOS: dict[str, tuple[Act, dict[str, object], Callable[[], Demand]]] = {
    "mixed": (_mixed, {}, lambda: Demand(models.ALL)),
    "evictions": (
        _evictions,
        {"min_residency": 0, "max_cold_wait": 0.2, "memory": 2 * models.SMALL_BYTES},
        lambda: Demand((*models.SMALL, models.SLOW)),
    ),
    "cycles": (
        _cycles,
        {"min_residency": 0, "max_cold_wait": 0.2, "memory": models.SMALL_BYTES, "max_attempts": 1},
        lambda: Demand(models.SMALL[:2], plain=True),
    ),
    "kills": (_kills, {}, lambda: Demand(models.ALL)),
    "restarts": (_restarts, {}, lambda: Demand(models.ALL)),
    "malformed": (_malformed, {}, lambda: Demand(models.SMALL[:3])),
}
"""What each does, the workers' settings, and the traffic."""
