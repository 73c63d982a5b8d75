"""What came of the demo: figures, the verdict, a table. Pure, but for printing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table

Ending = Literal["right", "wrong", "lost", "failed"]


@dataclass(frozen=True, slots=True)
class Answer:
    """How one good call ended. ``cold``: it waited for its model to be loaded."""

    model: str
    ending: Ending
    seconds: float
    cold: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """The last line of ``ops/demo --json``, under these names."""

    models: int
    jobs: int
    answered: int
    wrong: int
    lost: int
    failed: int
    bad_inputs: int
    bad_inputs_answered: int
    loads: int
    evictions: int
    budget_bytes: int
    """Of one worker; so is ``peak_ledger_bytes``, the largest of them."""
    peak_ledger_bytes: int
    peak_rss_bytes: int
    hot_p50_ms: float | None
    hot_p99_ms: float | None
    cold_p50_ms: float | None
    cold_p99_ms: float | None
    max_consumers_of_cold_models: int
    seconds: float

    def line(self) -> str:
        return json.dumps(asdict(self))

    def complaints(self) -> list[str]:
        """Why the demo did not succeed; empty when it did."""
        wanted = {
            "some good calls had a wrong, lost or failed answer": not (self.wrong or self.lost or self.failed),
            "not every good call was answered": self.answered == self.jobs,
            "not every bad input got the typed error that it should": self.bad_inputs_answered == self.bad_inputs,
            "nothing was evicted: the budget was never short": self.evictions > 0,
            "the ledger passed the budget": self.peak_ledger_bytes <= self.budget_bytes,
            "a model that is not hot had a consumer": self.max_consumers_of_cold_models == 0,
        }
        return [complaint for complaint, holds in wanted.items() if not holds]


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(seconds, percent)) * 1000, 2) if seconds else None


@dataclass(slots=True)
class Answers:
    """All answers to good calls so far."""

    all: list[Answer] = field(default_factory=list[Answer])

    def count(self, ending: Ending) -> int:
        return sum(answer.ending == ending for answer in self.all)

    def seconds(self, *, cold: bool, model: str | None = None) -> list[float]:
        return [
            answer.seconds
            for answer in self.all
            if answer.cold == cold and answer.ending == "right" and model in (None, answer.model)
        ]


def loads_by_model(logs: Iterable[Path]) -> dict[str, int]:
    """How often each model was loaded, from the workers' JSON logs."""
    loads: dict[str, int] = defaultdict(int)
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if '"model.loaded"' in line:
                loads[json.loads(line)["model"]] += 1
    return dict(loads)


def table(answers: Answers, loads: Mapping[str, int], nbytes: Mapping[str, int], ranking: Sequence[str]) -> Table:
    """One row a model, the most popular first."""
    shown = Table(title="Real models through RabbitMQ", caption="latencies in ms, from publish to reply")
    shown.add_column("model")
    for heading in ("MiB", "jobs", "loads", "hot p50", "hot p99", "cold p50", "cold p99"):
        shown.add_column(heading, justify="right")
    for model in ranking:
        hot, cold = answers.seconds(cold=False, model=model), answers.seconds(cold=True, model=model)
        cells = [percentile_ms(seconds, percent) for seconds in (hot, cold) for percent in (50, 99)]
        jobs = sum(answer.model == model for answer in answers.all)
        shown.add_row(
            model,
            f"{nbytes[model] / 2**20:.1f}",
            str(jobs),
            str(loads.get(model, 0)),
            *("-" if cell is None else f"{cell:.1f}" for cell in cells),
        )
    return shown


def summary(figures: Figures, console: Console) -> None:
    """The figures in words."""
    mib = 2**20
    console.print(
        f"{figures.answered} of {figures.jobs} calls answered ({figures.wrong} wrong, {figures.lost} lost, "
        f"{figures.failed} failed), {figures.bad_inputs_answered} of {figures.bad_inputs} bad inputs got the right "
        f"error, in {figures.seconds:.1f} s."
    )
    console.print(
        f"{figures.loads} loads, {figures.evictions} evictions; a worker's ledger peaked at "
        f"{figures.peak_ledger_bytes / mib:.0f} of {figures.budget_bytes / mib:.0f} MiB, its memory at "
        f"{figures.peak_rss_bytes / mib:.0f} MiB."
    )
    console.print(
        f"Hot calls: p50 {figures.hot_p50_ms} ms, p99 {figures.hot_p99_ms} ms. Cold calls: p50 {figures.cold_p50_ms} "
        f"ms, p99 {figures.cold_p99_ms} ms. Consumers of models that were not hot: "
        f"{figures.max_consumers_of_cold_models}."
    )
