"""Figures of interleaved rounds: medians with their span, and ratios of what was measured in one round."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

Measured = dict[str, float]
FIELDS = ("rate", "p50_ms", "p99_ms", "worker_us", "client_us", "broker_us")


@dataclass(frozen=True, slots=True)
class Span:
    """Median, least and largest of some rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Span:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.least)} to {_short(self.most)})"


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


QUIET_PERCENT = 25.0


def rounds(chosen: argparse.Namespace) -> Iterator[int]:
    """The rounds of a benchmark. With ``--quiet`` each waits, for a while, until others leave the CPUs alone."""
    for number in range(chosen.rounds):
        until = time.monotonic() + chosen.quiet
        while time.monotonic() < until and psutil.cpu_percent(interval=2.0) > QUIET_PERCENT:
            pass
        yield number


@dataclass(slots=True)
class Table:
    """Rows of one benchmark by name, each with what its rounds measured; and the ratios that are its result."""

    title: str
    rounds: dict[str, list[Measured]] = field(default_factory=dict[str, list[Measured]])
    ratios: dict[str, Span] = field(default_factory=dict[str, Span])
    notes: list[str] = field(default_factory=list[str])

    def add(self, row: str, measured: Measured) -> None:
        self.rounds.setdefault(row, []).append(measured)

    def span(self, row: str, figure: str) -> Span:
        return Span.of([found[figure] for found in self.rounds[row]])

    def ratio(self, name: str, row: str, base: str, figure: str) -> Span:
        """``row`` over ``base``, round by round: whatever slows the machine slows both."""
        pairs = zip(self.rounds[row], self.rounds[base], strict=False)
        self.ratios[name] = found = Span.of([ours[figure] / max(1e-9, theirs[figure]) for ours, theirs in pairs])
        return found

    def spread(self, name: str, values: Sequence[float]) -> None:
        """A result that is no ratio of two rows."""
        self.ratios[name] = Span.of(values)

    def lines(self) -> list[str]:
        """As Markdown."""
        columns = [
            f for f in dict.fromkeys(k for rows in self.rounds.values() for row in rows for k in row) if f != "load"
        ]
        loads = [row["load"] for rows in self.rounds.values() for row in rows if "load" in row] or [os.getloadavg()[0]]
        lines = [f"## {self.title}", "", f"Load of the machine {min(loads):.1f} to {max(loads):.1f}.", ""]
        lines += [f"| | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
        for row, rounds in self.rounds.items():
            cells = [
                str(Span.of([r[c] for r in rounds if c in r])) if any(c in r for r in rounds) else "" for c in columns
            ]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        lines += ["", "| ratio | median (least to most) |", "|---|--:|"]
        lines += [f"| {name} | {span} |" for name, span in self.ratios.items()]
        return [*lines, "", *self.notes, ""] if self.notes else [*lines, ""]

    def flat(self) -> dict[str, float]:
        return {name: round(span.median, 4) for name, span in self.ratios.items()}
