"""Says in words why a model is hot or not, from what each worker knows of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MIB = 1 << 20


def verdict(model: str, views: Mapping[str, Mapping[str, Any]], ready: int | None) -> str:
    """One sentence. ``views``: what each worker answered to ``why``; ``ready``: jobs in its queue, None: no queue."""
    by_state: dict[str, list[str]] = {}
    for worker, view in sorted(views.items()):
        by_state.setdefault(view["state"], []).append(worker)
    jobs = "no queue at the broker" if ready is None else f"{ready} jobs ready"
    if hot := by_state.get("hot"):
        return f"{model} is hot on {', '.join(hot)}; {jobs}"
    for state, words in (("loading", "is loading on"), ("draining", "is leaving"), ("refusing", "is refused by")):
        if there := by_state.get(state):
            return f"{model} {words} {', '.join(there)}{_reason(views[there[0]])}; {jobs}"
    if waiting := by_state.get("waiting"):
        return f"{model} waits for memory on {waiting[0]}: {views[waiting[0]]['waits']}; {jobs}"
    return f"{model} is cold: {_why_cold(views, ready)}"


def _why_cold(views: Mapping[str, Mapping[str, Any]], ready: int | None) -> str:
    for worker, view in sorted(views.items()):
        if view["held"]:
            return f"{view['held']['reason']} (on {worker}, for {view['held']['seconds']:.0f} s more)"
    for worker, view in sorted(views.items()):
        if view["failures"]:
            last = view["failures"][-1]
            return f"its last load on {worker} failed ({last['attempts']} times): {last['reason']}"
    unknown = [view["card"]["error"]["message"] for view in views.values() if "error" in view["card"]]
    if views and len(unknown) == len(views):
        return unknown[0]
    if views and all(view["drained"] for view in views.values()):
        return "all workers are drained: qworker workers resume"
    if ready is None:
        return "it has no queue at the broker: register it with --broker, or publish a job for it"
    if ready == 0:
        return "no jobs wait for it, and nobody keeps what nobody wants once others need the room" + _left(views)
    if room := _no_room(views):
        return f"{ready} jobs wait for it; {room}"
    return f"{ready} jobs wait for it, and no worker has claimed it yet: the sweep wakes one within seconds"


def _no_room(views: Mapping[str, Mapping[str, Any]]) -> str:
    """What its last claims found, where they found no room."""
    found: list[str] = []
    for worker, view in sorted(views.items()):
        ends = [note for note in view["story"] if note["kind"] in ("loaded", "no_room", "failed", "refused")]
        if ends and ends[-1]["kind"] == "no_room":
            found.append(f"{worker}: {ends[-1]['reason']}")
    return "; ".join(found)


def _left(views: Mapping[str, Mapping[str, Any]]) -> str:
    notes = [note for view in views.values() for note in view["story"] if note["kind"] == "evicted"]
    last = max(notes, key=lambda note: note["at"], default=None)
    return "" if last is None else f". Last eviction: {last.get('reason', '')}"


def _reason(view: Mapping[str, Any]) -> str:
    if view["held"]:
        return f" ({view['held']['reason']})"
    if view["failures"]:
        return f" ({view['failures'][-1]['reason']})"
    if view["loading"]:
        return f" (at {view['loading']['stage']} since {view['loading']['seconds']:.1f} s)"
    return ""


def details(view: Mapping[str, Any]) -> list[str]:
    """Lines on one worker."""
    lines = [f"state: {view['state']}" + ("" if view["seconds"] is None else f" since {view['seconds']:.1f} s")]
    if view["nbytes"]:
        pinned = ", pinned" if view["pinned"] else ""
        lines.append(f"holds {view['nbytes'] / MIB:.1f} MiB, {view['in_hand']} jobs in hand{pinned}")
    if view["step"]:
        lines.append(f"claim: at the step {view['step']}")
    if view["waits"]:
        lines.append(f"waits: {view['waits']}")
    lines.append(f"key {_key(view['key'])}: {view['why_key']}")
    if view["lowest"]:
        lines.append(f"the first to go here is {view['lowest']['model']} with key {_key(view['lowest']['key'])}")
    card = view["card"]
    if "error" in card:
        lines.append(f"card: {card['error']['message']}")
    else:
        free, needs = view["free"] / MIB, card["nbytes"] / MIB
        lines.append(f"needs {needs:.1f} MiB of {free:.1f} MiB free, loads in about {card['load_seconds']:.2f} s")
    lines += [f"failed {each['attempts']} times: {each['reason']}" for each in view["failures"]]
    if view["held"]:
        lines.append(f"held for {view['held']['seconds']:.0f} s more: {view['held']['reason']}")
    if view["drained"]:
        lines.append("this worker is drained by an operator")
    return lines


def _key(key: float | None) -> str:
    return "lowest" if key is None else f"{key:.4g}"
