"""Twelve real models, two workers with memory for a quarter of them, and traffic as platforms have it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ops.models import LaidOut, LayOutError, difference, lay_out
from qworker import Client
from qworker.build.register import register
from qworker.store.local import LocalStore
from qworker.wire.topology import lane_queue
from tests.e2e.fleet import COMMAND, ROOT, Fleet, queue_depths
from tests.support.rabbitmq import SuiteNode

MODELS = (
    "magika",
    "silero-vad-fixed",
    "ppocr2-cls",
    "ppocr4-det",
    "basic-pitch",
    "melspectrogram",
    "speech-embedding",
    "romanizer-enc",
    "thai-attacut",
    "light-squeezenet",
    "onnx-words",
    "onnx-expand",
)
JOBS = 600
AT_ONCE = 24
SKEW = 1.1


@pytest.fixture(scope="module")
def real_models() -> list[LaidOut]:
    """Published models with known answers. Where they cannot be had the test is skipped, and fails in CI."""
    try:
        return lay_out(only=MODELS)
    except LayOutError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real models cannot be had: {error}")


@pytest.fixture
def real_fleet(suite_node: SuiteNode, real_models: Sequence[LaidOut], tmp_path: Path) -> Iterator[Fleet]:
    """A fleet whose store has the real models, registered as an operator would."""
    store = LocalStore(tmp_path / "store")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda m: register(store, m.folder, m.model.id), real_models[:-1]))
    fleet = Fleet(suite_node.fresh_url(), store.root, tmp_path / "workers")
    yield fleet
    fleet.stop()


@dataclass
class Looks:
    """What was seen of the broker and the workers."""

    samples: int = 0
    consumers_of_cold: int = 0
    peak: int = 0


class Watcher(threading.Thread):
    """Compares the consumers at the broker with what the workers hold, again and again.

    A model may become hot or cold between two looks, so it counts as cold only when no worker held it in the
    look before and in the one after.
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self.looks = Looks()
        self._fleet = fleet
        self._done = threading.Event()

    def run(self) -> None:
        queues = {lane_queue("jobs", model): model for model in MODELS}
        before = self._held()
        while not self._done.wait(0.05):
            consumers = queue_depths(self._fleet.url, queues)
            after = self._held()
            cold = [count for queue, (_, count) in consumers.items() if queues[queue] not in before | after]
            self.looks.samples += 1
            self.looks.consumers_of_cold = max([self.looks.consumers_of_cold, *cold])
            before = after

    def stop(self) -> Looks:
        self._done.set()
        self.join(20)
        return self.looks

    def _held(self) -> set[str]:
        held: set[str] = set()
        for worker in self._fleet.workers:
            state = worker.state()
            self.looks.peak = max(self.looks.peak, state["ledger"]["peak"] - state["ledger"]["budget"])
            held |= set(state["claims"])
        return held


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_mixed_traffic_on_twelve_models(real_fleet: Fleet, real_models: Sequence[LaidOut]) -> None:
    """600 calls by popularity: every answer is the known one, and models come and go within the budget."""
    fleet, last = real_fleet, real_models[-1]
    cards = [LocalStore(fleet.store).card(m.model.id) for m in real_models[:-1]]
    sizes = [card.resident_bytes for card in cards]
    budget = max(*sizes, sum(sizes) // 4)
    await asyncio.to_thread(fleet.start, 2, memory=str(budget))
    await asyncio.to_thread(register_at_the_shell, fleet, last)
    calls = zipf(len(real_models), JOBS)
    watcher = Watcher(fleet)
    watcher.start()
    try:
        wrong = await call_all(fleet.url, real_models, calls)
    finally:
        looks = watcher.stop()
    assert not wrong
    states = [worker.state() for worker in fleet.workers]
    assert sum(state["counters"]["evictions"] for state in states) > 0
    assert sum(state["counters"]["loads"] for state in states) > len(real_models)
    assert all(state["counters"]["loads"] > 1 for state in states), "one worker did all"
    assert sum(state["counters"]["load_failures"] for state in states) == 0
    assert looks.peak <= 0, "the ledger passed the budget"
    assert looks.samples > 5
    assert looks.consumers_of_cold == 0, "a model that is not hot has a consumer"
    await asyncio.to_thread(fleet.finish)
    assert not [line for worker in fleet.workers for line in worker.events("model.larger_than_card")]


def register_at_the_shell(fleet: Fleet, model: LaidOut) -> None:
    """``qworker models register --broker``, while the workers run."""
    command = [*COMMAND, "models", "register", str(model.folder), "--id", model.model.id]
    command += ["--store", str(fleet.store), "--broker", fleet.url, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["model"] == model.model.id


def zipf(models: int, jobs: int) -> list[tuple[int, int]]:
    """Which model and which of its inputs, seeded; each model at least once."""
    rng = np.random.default_rng(11)
    weights = 1 / np.arange(1, models + 1) ** SKEW
    picks = [*range(models), *rng.choice(models, jobs - models, p=weights / weights.sum())]
    rng.shuffle(picks)
    return [(int(pick), int(k)) for pick, k in zip(picks, rng.integers(0, 4, jobs), strict=True)]


async def call_all(url: str, models: Sequence[LaidOut], calls: Sequence[tuple[int, int]]) -> list[str]:
    """Make all calls, some at once; what was wrong with the answers."""
    wrong: list[str] = []
    slots = asyncio.Semaphore(AT_ONCE)

    async def call(client: Client, entry: LaidOut, k: int) -> None:
        async with slots:
            result = await client.call(entry.model.id, entry.inputs(k), timeout=90)
        complaint = difference(entry.outputs(k), result.arrays(), entry.model.tolerance)
        if complaint is not None:
            wrong.append(f"{entry.model.id}: {complaint}")

    async with Client(url) as client, asyncio.TaskGroup() as tasks:
        for pick, k in calls:
            tasks.create_task(call(client, models[pick], k))
    return wrong
