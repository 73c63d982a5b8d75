"""Snapshots as workers tell them, made by the worker's own code."""

from __future__ import annotations

from typing import Any

from qworker.telemetry.counters import Counters
from qworker.telemetry.measures import Measures
from qworker.worker.snapshot import snapshot

MIB = 1 << 20


def row(model: str, state: str = "hot", **more: Any) -> dict[str, Any]:
    told = {"model": model, "state": state, "nbytes": MIB, "key": 1.0, "in_hand": 0, "pinned": False, "seconds": 5.0}
    return told | more


def told(worker: str, at: float, measures: Measures, *rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What ``worker`` says at the unix time ``at``."""
    state: dict[str, Any] = {
        "worker": worker,
        "ready": True,
        "reason": None,
        "claims": {},
        "draining": False,
        "drained": False,
        "quarantined": [],
        "held": [],
        "refusing": [],
        "waiting": [],
        "ledger": {"budget": 100 * MIB, "held": sum(each["nbytes"] for each in rows), "peak": 0},
        "pins": {},
        "peers": {},
        "counters": Counters().as_dict(),
        "models": list(rows),
    }
    return snapshot(state | more, measures, 0.0) | {"at": at}
