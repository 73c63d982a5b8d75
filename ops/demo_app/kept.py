"""What goes on after the demo, with ``--keep``: models that push each other out, for an operator to look at.

Three models of the same size, of which a worker holds one, are called in turn; beside them a few small ones that fit.
So there is one to find in ``qworker top``, to pin, and to ask ``qworker why`` about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ops.demo_app.platform import WorkerProcess
from ops.demo_app.report import Answer
from ops.models import LaidOut
from qworker.store.card import Card

FITS = 1.3
"""A worker's budget by its largest model: it may be pinned (``pin_quota`` is 0.8), and no second one fits beside it."""
MORE_RIVALS = 2
SMALL_MODELS = 8
RIVAL_PAUSE = 1.0
SMALL_PAUSE = 0.1
CALL_SECONDS = 600.0

Ask = Callable[[LaidOut, int], Awaitable[Answer]]


@dataclass(slots=True)
class Tally:
    """How the kept calls ended. Owner: ``go_on``."""

    right: int = 0
    wrong: int = 0
    failed: int = 0
    lost: int = 0

    def note(self, answer: Answer) -> None:
        setattr(self, answer.ending, getattr(self, answer.ending) + 1)

    def line(self) -> str:
        return f"{self.right} calls answered, {self.wrong} wrong, {self.failed} failed, {self.lost} lost"


def twins(entry: LaidOut) -> list[LaidOut]:
    """More models of the same file, as a platform has fine-tuned versions of one."""
    return [replace(entry, model=replace(entry.model, id=f"{entry.model.id}-{n + 2}")) for n in range(MORE_RIVALS)]


async def go_on(
    models: Mapping[str, LaidOut],
    cards: Mapping[str, Card],
    rivals: list[LaidOut],
    workers: list[WorkerProcess],
    ask: Ask,
    told: Callable[[str], None],
) -> None:
    """Call until cancelled. Raises DemoError when a worker ends."""
    tally = Tally()
    small = sorted((model for model in models if model in cards), key=lambda model: cards[model].resident_bytes)

    async def caller(wanted: list[LaidOut], pause: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while True:
            entry = wanted[int(rng.integers(len(wanted)))]
            tally.note(await ask(entry, int(rng.integers(4))))
            await asyncio.sleep(pause)

    async with asyncio.TaskGroup() as tasks:
        for n, rival in enumerate(rivals):
            tasks.create_task(caller([rival], RIVAL_PAUSE, n))
        tasks.create_task(caller([models[model] for model in small[:SMALL_MODELS]], SMALL_PAUSE, len(rivals)))
        while True:
            for worker in workers:
                worker.check()
            told(tally.line())
            await asyncio.sleep(1.0)
