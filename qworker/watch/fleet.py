"""The fleet as people look at it: rates, quantiles and a timeline, made of the snapshots of its workers.

Pure: whoever owns it says what time it is (monotonic seconds). Both ``top`` and the status page show its ``view``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

WINDOW: Final = 10.0
"""Seconds over which rates and quantiles are taken."""
SWITCH_WINDOW: Final = 60.0
MOST_NOTES: Final = 500
MOST_POINTS: Final = 900
LATE: Final = 5.0
"""Seconds without a word after which a worker's figures are told to be old."""

COUNTS: Final = ("run", "queue", "runs", "fill")
"""Fields of a model's row that rates and quantiles are made of."""
_CLAIMED: Final = ("loaded", "no_room", "failed", "refused")
"""Notes on how a claim ended."""

Snapshot = Mapping[str, Any]


@dataclass(slots=True)
class _Seen:
    """What was heard of one worker."""

    last: Snapshot
    heard: float
    past: deque[tuple[float, Snapshot]] = field(default_factory=deque[tuple[float, Snapshot]])
    notes: deque[dict[str, Any]] = field(default_factory=lambda: deque[dict[str, Any]](maxlen=MOST_NOTES))
    newest: int = 0
    """The number of the last note."""
    memory: deque[tuple[float, int]] = field(default_factory=lambda: deque[tuple[float, int]](maxlen=MOST_POINTS))


class Fleet:
    """One owner calls it, synchronously."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._silent: dict[str, float | None] = {}

    def take(self, snapshot: Snapshot, now: float) -> None:
        """A worker told its state."""
        worker = str(snapshot["worker"])
        seen = self._seen.get(worker)
        if seen is None or seen.last["started"] != snapshot["started"]:
            fresh = _Seen(snapshot, now)
            if seen is not None:  # a worker of that name was there before: what happened to it is not forgotten
                fresh.notes, fresh.memory = seen.notes, seen.memory
            seen = self._seen[worker] = fresh
        if seen.past and snapshot["at"] <= seen.last["at"]:
            return  # an answer to an order that was made before the last snapshot
        seen.last, seen.heard = snapshot, now
        seen.past.append((now, snapshot))
        while len(seen.past) > 2 and seen.past[1][0] < now - SWITCH_WINDOW:
            seen.past.popleft()
        for note in snapshot["notes"]:
            if note["number"] > seen.newest:
                seen.newest = note["number"]
                seen.notes.append({**note, "worker": worker})
        seen.memory.append((snapshot["at"], snapshot["ledger"]["held"]))
        self._silent.pop(worker, None)

    def called(self, there: Iterable[str], silent: Mapping[str, float | None]) -> None:
        """Who answered a roll call, and who did not though it is connected. All others have gone."""
        kept = {*there, *silent}
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker in kept}
        self._silent = dict(silent)

    def view(self, now: float) -> dict[str, Any]:
        """Everything that is shown, as JSON has it. Times are unix seconds or seconds of age."""
        seen = sorted(self._seen.items())
        notes = sorted((note for _, each in seen for note in each.notes), key=lambda note: note["at"])
        models = [row for worker, each in seen for row in _models(worker, each)]
        return {
            "workers": [self._worker(worker, each, now) for worker, each in seen],
            "models": models,
            "cold": _cold(seen, {row["model"] for row in models if row["state"] != "waiting"}),
            "loading": [_load(worker, load) for worker, each in seen for load in each.last["loading"]],
            "evictions": [note for note in notes if note["kind"] == "evicted"][-10:],
            "reloaded": reloaded(notes, max((each.last["at"] for _, each in seen), default=0.0)),
            "timeline": notes[-MOST_NOTES:],
            "memory": {worker: [list(point) for point in each.memory] for worker, each in seen},
            "silent": [
                {"worker": worker, "heard": heard}
                for worker, heard in sorted(self._silent.items())
                if worker not in self._seen
            ],
        }

    def _worker(self, worker: str, seen: _Seen, now: float) -> dict[str, Any]:
        last = seen.last
        recent, minute = _span(seen, now - WINDOW), _span(seen, now - SWITCH_WINDOW)
        states = [row["state"] for row in last["models"]]
        runs = _grown(recent, "rows", "runs")
        return {
            "worker": worker,
            "state": "silent" if worker in self._silent else "ready" if last["ready"] else last["reason"],
            "heard": round(now - seen.heard, 1),
            "late": now - seen.heard > LATE or worker in self._silent,
            "drained": last["drained"],
            "sweeping": last["sweeping"],
            "budget": last["ledger"]["budget"],
            "bytes": last["ledger"]["held"],
            "peak": last["ledger"]["peak"],
            "hot": states.count("hot"),
            "loads": states.count("loading"),
            "in_hand": sum(row["in_hand"] for row in last["models"]),
            "rate": _per_second(recent, _grown(recent, "counters", "jobs")),
            "fill": round(_grown(recent, "rows", "fill") / runs, 3) if runs else None,
            "switches": round(
                60 * _per_second(minute, _grown(minute, "counters", "loads") + _grown(minute, "counters", "unloads")), 1
            ),
            "reloads": _grown(minute, "counters", "reloads"),
            "pins": last["pins"],
            "held": [*last["held"], *last["quarantined"]],
        }


Span = tuple[tuple[float, Snapshot], tuple[float, Snapshot]]


def _span(seen: _Seen, since: float) -> Span:
    """The newest snapshot, and the oldest one that is not from before ``since``."""
    return next((each for each in seen.past if each[0] >= since), seen.past[-1]), seen.past[-1]


def _grown(span: Span, group: str, name: str) -> float:
    return max(0, span[1][1][group][name] - span[0][1][group][name])


def _per_second(span: Span, count: float) -> float:
    """By the workers' own clocks: how long a snapshot was on its way says nothing."""
    seconds = span[1][1]["at"] - span[0][1]["at"]
    return round(count / seconds, 2) if seconds > 0 else 0.0


def _models(worker: str, seen: _Seen) -> list[dict[str, Any]]:
    span = _span(seen, seen.heard - WINDOW)
    before = {row["model"]: row for row in span[0][1]["models"]}
    bounds: Sequence[float] = seen.last["bounds"]
    refusing = set(seen.last["refusing"])
    rows: list[dict[str, Any]] = []
    for row in seen.last["models"]:
        old = before.get(row["model"], {})
        fresh_runs, fresh_fill = (row.get(name, 0) - old.get(name, 0) for name in ("runs", "fill"))
        runs, fill = (fresh_runs, fresh_fill) if fresh_runs else (row.get("runs", 0), row.get("fill", 0.0))
        run, queue = (_less(row.get(name, ()), old.get(name, ())) for name in ("run", "queue"))
        rows.append(
            {
                **{name: value for name, value in row.items() if name not in COUNTS},
                "worker": worker,
                "jobs": row.get("jobs", 0),
                "state": "refusing" if row["model"] in refusing else row["state"],
                # what was there before a model was first seen here is no rate
                "rate": _per_second(span, max(0, row.get("jobs", 0) - old.get("jobs", 0))) if old else 0.0,
                "p50": quantile(bounds, run, 0.5),
                "p99": quantile(bounds, run, 0.99),
                "fill": round(fill / runs, 3) if runs else None,
                "wait_p99": quantile(bounds, queue, 0.99),
            }
        )
    return rows


def _less(counts: Sequence[int], before: Sequence[int]) -> list[int]:
    """Counts since ``before``; all of them when nothing has come since then, so that a quiet model shows its past."""
    if len(before) != len(counts):
        return list(counts)
    fresh = [max(0, new - old) for new, old in zip(counts, before, strict=True)]
    return fresh if any(fresh) else list(counts)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which ``share`` of the counted lie, by a straight line within its bucket; None without any.

    What is beyond the last bound counts as just there.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, below = share * total, 0
    for at, count in enumerate(counts):
        if count and below + count >= wanted:
            if at >= len(bounds):
                return bounds[-1]
            low = bounds[at - 1] if at else 0.0
            return low + (bounds[at] - low) * (wanted - below) / count
        below += count
    return bounds[-1]


def _cold(seen: Sequence[tuple[str, _Seen]], there: set[str]) -> list[dict[str, Any]]:
    """Models with jobs that nobody runs: those that wait for bytes, and those in whose queue the sweeper saw some.

    ``load_seconds``: what is left to wait once the bytes are free, by the card.
    """
    found: dict[str, dict[str, Any]] = {}
    unknown = dict.fromkeys(("ready", "worker", "seconds", "why", "load_seconds"))
    for _, each in seen:
        for model, ready in each.last["queues"].items():
            if model not in there:
                row = found.setdefault(model, {"model": model, **unknown})
                row["ready"] = max(ready, row["ready"] or 0)
    for worker, each in seen:
        expected = {load["model"]: load["expected"] for load in each.last["loading"]}
        for waiting in each.last["waiting"]:
            row = found.setdefault(waiting["model"], {"model": waiting["model"], **unknown})
            row.update(worker=worker, seconds=round(waiting["seconds"], 1), why=waiting["why"])
            row["load_seconds"] = expected.get(waiting["model"])
    for row in found.values():
        if row["why"] is None:
            row["why"] = _found_no_room(row["model"], seen)
    return sorted(found.values(), key=lambda row: -(row["seconds"] or 0.0))


def _found_no_room(model: str, seen: Sequence[tuple[str, _Seen]]) -> str | None:
    """What its last claim said, where that found no room."""
    notes = [note for _, each in seen for note in each.notes if note["model"] == model and note["kind"] in _CLAIMED]
    last = max(notes, key=lambda note: (note["at"], note["number"]), default=None)
    return last["reason"] if last is not None and last["kind"] == "no_room" else None


def reloaded(notes: Sequence[Mapping[str, Any]], now: float) -> list[dict[str, Any]]:
    """Models that were loaded more than once within the last minute, the most often first: what thrashes, and why.

    ``notes`` in their order. ``why``: what it was evicted for last, anywhere.
    """
    found: dict[str, dict[str, Any]] = {}
    for note in notes:
        if note["at"] <= now - SWITCH_WINDOW or note["kind"] not in ("loaded", "evicted"):
            continue
        none: dict[str, Any] = {
            "model": note["model"],
            "loads": 0,
            "seconds": 0.0,
            "evictions": 0,
            "workers": [],
            "why": None,
        }
        row = found.setdefault(note["model"], none)
        if note["kind"] == "evicted":
            row["evictions"] += 1
            row["why"] = note.get("reason")
            continue
        row["loads"] += 1
        row["seconds"] = round(row["seconds"] + (note.get("seconds") or 0.0), 3)
        row["workers"] = sorted({*row["workers"], note["worker"]})
    often = [row for row in found.values() if row["loads"] > 1 and row["evictions"]]
    return sorted(often, key=lambda row: (-row["loads"], -row["seconds"], row["model"]))


def _load(worker: str, load: Mapping[str, Any]) -> dict[str, Any]:
    """``percent``: of the seconds that the card expects, while it loads; a load that takes longer stays at 99."""
    loads = load["stage"] == "load" and load["expected"] > 0
    percent = min(99, round(100 * load["seconds"] / load["expected"])) if loads else None
    return {**load, "worker": worker, "percent": percent}
