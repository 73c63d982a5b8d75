"""A run's figures for people: on the terminal, and in ops/reports."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import onnxruntime

from tests.chaos.run import Wanted
from tests.chaos.verdict import Figures
from tests.e2e.fleet import ROOT


def text(figures: Figures, wanted: Wanted) -> str:
    """One section in Markdown."""
    tally = figures.tally
    faults = ", ".join(f"{kind} {n}" for kind, n in sorted(figures.faults.items())) or "none"
    outcomes = ", ".join(f"{code} {n}" for code, n in tally.outcomes.most_common())
    rows = [
        ("accepted", tally.accepted),
        ("results", tally.results),
        ("typed failures", tally.failures),
        ("dead letters", tally.dead_letters),
        ("lost", tally.lost),
        ("duplicates that the client showed", tally.duplicates),
        ("doubles that it dropped, dead letters included", figures.raw_doubles + tally.doubled_letters),
        ("wrong answers", tally.wrong),
        ("unacknowledged in the end", figures.stuck_unacked),
        ("consumers of cold models", figures.consumers_of_cold_models),
        ("bytes in ledgers after the stop", figures.ledger_bytes_after),
        ("most that a worker grew by", f"{figures.rss_growth_bytes / 2**20:.1f} MiB"),
        ("loads, unloads, told to leave", f"{figures.loads}, {figures.unloads}, {figures.told_to_leave}"),
        ("worker processes", figures.more.get("workers")),
    ]
    skipped = "".join(f" Skipped: {kind} ({why})." for kind, why in figures.skipped.items())
    verdict = "good" if figures.good else "NOT GOOD"
    ended = (
        f"Outcomes: {outcomes}. Published without a confirm and never heard of: {tally.unsure}. "
        f"Good jobs that failed: {sum(tally.good_failed.values())} {dict(tally.good_failed)}. "
        f"Answer and dead letter: {tally.answer_and_letter}."
    )
    lines = [
        f"## {figures.scenario}, seed {figures.seed}, {figures.seconds:.0f} s: {verdict}",
        "",
        f"Plane {wanted.plane}, RabbitMQ {figures.more.get('broker')}. Faults: {faults}.{skipped}",
        "",
        "| | |",
        "|---|--:|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        ended,
    ]
    return "\n".join(lines) + "\n"


def add(figures: Figures, wanted: Wanted) -> Path:
    """Append the section to the day's report; the file."""
    path = ROOT / "ops" / "reports" / f"chaos-{datetime.now(UTC).date().isoformat()}.md"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.write_text(_head())
    with path.open("a") as file:
        file.write("\n" + text(figures, wanted))
    return path


def _head() -> str:
    return (
        "# Chaos runs\n\n"
        f"qworker {version('qworker')}, Python {platform.python_version()}, onnxruntime {onnxruntime.__version__}, "
        f"RabbitMQ as named below, {platform.system()} {platform.machine()}.\n"
        "`ops/chaos --scenario NAME --seed S` runs each of them again.\n"
    )
