"""What a worker tells to those who watch: its state, and of each model what rates and quantiles are made of."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

from qworker.telemetry.measures import SECONDS, Measures

MOST_NOTES: Final = 40
MOST_QUEUES: Final = 300


def snapshot(state: Mapping[str, Any], measures: Measures, started: float) -> dict[str, Any]:
    """``state`` is the worker's own; counts of jobs grow from ``started`` (unix seconds) on."""
    models = [_row(row, measures) for row in state["models"]]
    wanted = ("worker", "ready", "reason", "claims", "draining", "drained", "quarantined", "held", "refusing")
    return {
        **{name: state[name] for name in (*wanted, "waiting", "ledger", "pins", "peers")},
        "at": time.time(),
        "started": started,
        "bounds": SECONDS,
        "models": models,
        "loading": measures.chronicle.loading(),
        "notes": measures.chronicle.since(0, MOST_NOTES),
        "queues": _queues(measures),
        "rows": {"runs": measures.fill.count, "fill": measures.fill.sum},
        "counters": {
            "jobs": sum(each.jobs for each in measures.models.values()),
            "reloads": measures.reloads,
            "reload_seconds": round(measures.reload_seconds, 4),
            **{
                name: state["counters"][name]
                for name in ("loads", "unloads", "evictions", "load_failures", "jobs_answered", "jobs_failed")
            },
        },
        "sweeping": measures.sweeping,
    }


def finite(key: float) -> float | None:
    """The key of a model that was never used is below all numbers, for some policies; JSON has no such number."""
    return key if math.isfinite(key) else None


def _row(row: Mapping[str, Any], measures: Measures) -> dict[str, Any]:
    told = {**row, "key": finite(row["key"])}
    measured = measures.models.get(row["model"])
    if measured is not None and measured.jobs:
        told |= {"jobs": measured.jobs, "run": measured.run.counts, "queue": measured.queue.counts}
        if measured.runs:
            told |= {"runs": measured.runs, "fill": round(measured.fill, 3)}
    return told


def _queues(measures: Measures) -> dict[str, int]:
    """Ready jobs by model, as the sweeper saw them last; the longest."""
    ready = {model: sum(jobs for jobs, _ in lanes) for model, lanes in measures.depths.items()}
    longest = sorted((model for model, jobs in ready.items() if jobs), key=lambda model: -ready[model])
    return {model: ready[model] for model in longest[:MOST_QUEUES]}
