"""Writes a run of all benchmarks to ``ops/reports``: a page with its tables, and plots of them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qworker import __version__
from tests.bench.figures import Table
from tests.bench.room import ROOT

REPORTS = ROOT / "ops" / "reports"
TARGETS: dict[str, tuple[str, float]] = {
    "throughput_ratio": (">=", 4.0),
    "worker_cpu_ratio": ("<=", 0.30),
    "p50_ratio_window1": ("<=", 1.0),
    "cpu_ratio_600k": ("<=", 0.8),
    "vs_celery": (">=", 6.0),
    "vs_faststream": (">=", 12.0),
    "vs_taskiq": (">=", 5.0),
    "vs_dramatiq": (">=", 3.0),
    "served_over_inprocess": (">=", 0.85),
    "p50_over_floor": ("<=", 1.25),
    "p99_ratio": ("<=", 1.5),
    "ready_s_1000": ("<=", 10.0),
    "idle_ops_per_s_1000": ("<=", 300.0),
    "stranded_found_s_1000": ("<=", 10.0),
}
"""What each figure must be; by the beginning of its name."""


def write(tables: Mapping[str, Table], folder: Path = REPORTS) -> Path:
    """The page; its plots lie beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    day = datetime.now(UTC).date().isoformat()
    page = folder / f"bench-{day}.md"
    plots = {name: plot for name, table in tables.items() if (plot := _plot(table, folder / f"bench-{day}-{name}.svg"))}
    lines = [
        f"# Benchmarks of {day}",
        "",
        f"qworker {__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.system()}.",
        "Medians of interleaved rounds, with the least and the largest. Broker, workers and callers share the machine;",
        "ratios are of the same round.",
        "",
        *_summary(tables),
        "",
    ]
    for name, table in tables.items():
        lines += table.lines()
        if name in plots:
            lines += [f"![{name}]({plots[name].name})", ""]
    page.write_text("\n".join(lines), encoding="utf-8")
    return page


def _summary(tables: Mapping[str, Table]) -> list[str]:
    lines = ["| figure | found | must be | |", "|---|--:|--:|---|"]
    for table in tables.values():
        for name, span in table.ratios.items():
            target = next((target for start, target in TARGETS.items() if name.startswith(start)), None)
            if target is not None:
                relation, limit = target
                met = span.median >= limit if relation == ">=" else span.median <= limit
                lines.append(f"| {name} | {span} | {relation} {limit:g} | {'yes' if met else '**no**'} |")
    return lines


def _plot(table: Table, path: Path) -> Path | None:
    """Bars of the table's first figure, with the span of its rounds."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure_name = next((key for rounds in table.rounds.values() for key in rounds[0] if key != "load"), None)
    if figure_name is None:
        return None
    rows = [row for row, rounds in table.rounds.items() if figure_name in rounds[0]]
    spans = [table.span(row, figure_name) for row in rows]
    medians = [span.median for span in spans]
    reach = [[s.median - s.least for s in spans], [s.most - s.median for s in spans]]
    figure: Any
    figure, axes = plt.subplots(figsize=(9, 1 + 0.35 * len(rows)))
    axes.barh(rows, medians, xerr=reach, color="#4878a8", ecolor="#333333", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel(figure_name)
    axes.set_title(table.title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
