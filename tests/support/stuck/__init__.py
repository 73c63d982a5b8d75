"""A worker whose engines never finish loading, and one whose event loop stands: see ``site/sitecustomize.py``."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def environment(switch: Path, where: str = "load") -> dict[str, str]:
    """For ``Fleet.environment``: while ``switch`` exists, loads hang, or the event loop (``where``) does."""
    return {"PYTHONPATH": f"{Path(__file__).parent / 'site'}:{ROOT}", "STUCK_SWITCH": str(switch), "STUCK_WHERE": where}
