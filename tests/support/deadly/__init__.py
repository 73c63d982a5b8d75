"""Inputs and models that end the process which runs or loads them: see ``site/sitecustomize.py``."""

from __future__ import annotations

from pathlib import Path

KILLS = 666.0
"""A worker whose engine finds this in an input is gone at once, by SIGKILL."""
KILLS_AT_LOAD = "deadly"
"""So is one that loads a model whose name begins so, while the switch (a file) is there."""

ROOT = Path(__file__).resolve().parents[3]


def environment(switch: Path) -> dict[str, str]:
    """For ``Fleet.environment``: its workers die of such inputs, and of such models while ``switch`` exists."""
    return {"PYTHONPATH": f"{Path(__file__).parent / 'site'}:{ROOT}", "DEADLY_SWITCH": str(switch)}
