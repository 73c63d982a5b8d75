"""``qworker models ls|pin|unpin|preload|evict|quarantine|release`` and ``qworker why``: models on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from qworker.broker.base import Session
from qworker.cli import models
from qworker.cli.asking import (
    WAIT,
    AsJson,
    Broker,
    Config,
    Model,
    OneWorker,
    Timeout,
    at_the_desk,
    finish,
    give_up,
    mib,
    plain,
    print_json,
    say,
    shown,
    table_of,
)
from qworker.watch.fleet import COUNTS
from qworker.watch.orders import Answers, Desk
from qworker.watch.why import details, verdict
from qworker.wire.topology import lane_queue

group = models.group


def register(app: typer.Typer) -> None:
    """Add ``why``. The orders are in the group ``models``, beside the commands for the store."""
    app.command("why")(why)


@group.command("ls")
def list_everywhere(
    timeout: Timeout = WAIT, broker: Broker = None, config: Config = None, as_json: AsJson = False
) -> None:
    """List the models that workers have in memory, load or wait for, and who waits in the queues.

    Exit codes: 0, 1 for an error, 3 when a known worker did not answer.
    """
    answers = at_the_desk(lambda desk, _: desk.give("status", patience=timeout), broker, config, as_json)
    rows = model_rows(answers)
    if as_json:
        print_json({"models": rows, "silent": dict(answers.silent)})
    else:
        table = table_of(
            "model",
            "worker",
            "state",
            "memory",
            "key",
            "in hand",
            "since",
            "",
            right=("memory", "key", "in hand", "since"),
        )
        for row in rows:
            key = "" if row["key"] is None else f"{row['key']:.4g}"
            since = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
            pinned = "pinned" if row["pinned"] else ""
            table.add_row(
                *plain(
                    row["model"],
                    row["worker"] or "-",
                    row["state"],
                    mib(row["nbytes"]),
                    key,
                    row["in_hand"],
                    since,
                    pinned,
                )
            )
        shown(table)
    finish(answers)


def model_rows(answers: Answers) -> list[dict[str, Any]]:
    """Each model on each worker, and cold ones with jobs in their queue (as the sweeper saw them last)."""
    rows: list[dict[str, Any]] = []
    cold: dict[str, int] = {}
    for worker, result in sorted(answers.results().items()):
        snapshot = result["snapshot"]
        rows += [{**_without_counts(row), "worker": worker} for row in snapshot["models"]]
        cold |= snapshot["queues"]
    there = {row["model"] for row in rows}
    for model, ready in sorted(cold.items()):
        if model not in there:
            rows.append(_cold_row(model, ready))
    return sorted(rows, key=lambda row: (row["model"], row["worker"] or ""))


def _without_counts(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in COUNTS}


def _cold_row(model: str, ready: int) -> dict[str, Any]:
    row = dict.fromkeys(("worker", "key", "seconds"))
    return {"model": model, "state": "cold", "nbytes": 0, "in_hand": 0, "pinned": False, "ready": ready, **row}


# --- orders --------------------------------------------------------------------------------------


@group.command("pin")
def pin(
    model: Model,
    seconds: Annotated[float | None, typer.Option("--for", min=1, metavar="SECONDS", help="For so long.")] = None,
    hours: Annotated[
        str | None, typer.Option(metavar="HH:MM-HH:MM", help="Only in these hours of each day (UTC).")
    ] = None,
    worker: OneWorker = None,
    timeout: Timeout = WAIT,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Never evict a model, once it is hot. Lasts until unpin, its time, or the worker's end.

    Each worker lets pins keep the share ``pin_quota`` of its budget, and refuses more.
    """
    asked = {"model": model, "seconds": seconds, "hours": hours}
    _order("pin", asked, worker, timeout, broker, config, as_json)


@group.command("unpin")
def unpin(
    model: Model,
    worker: OneWorker = None,
    timeout: Timeout = WAIT,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Let a model be evicted again, whether an order or the settings have pinned it."""
    _order("unpin", {"model": model}, worker, timeout, broker, config, as_json)


@group.command("preload")
def preload(
    model: Model,
    worker: OneWorker = None,
    timeout: Timeout = WAIT,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Load a model although no job waits for it: on the worker with the most free memory, if none is named.

    It may displace others there, as a job for it would.
    """

    async def work(desk: Desk, _: Session) -> Answers:
        chosen = worker or _roomiest(await desk.give("status", patience=timeout), model)
        return await desk.give("preload", {"model": model}, worker=chosen, patience=timeout)

    _tell(at_the_desk(work, broker, config, as_json), model, as_json)


@group.command("evict")
def evict(
    model: Model,
    worker: OneWorker = None,
    timeout: Timeout = WAIT,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Unload a model once its jobs in hand are done. The next job for it loads it again, somewhere."""
    _order("evict", {"model": model}, worker, timeout, broker, config, as_json)


@group.command("quarantine")
def quarantine(
    model: Model,
    seconds: Annotated[float, typer.Option("--for", min=1, metavar="SECONDS", help="For so long.")] = 3600.0,
    reason: Annotated[str, typer.Option(help="What its jobs are told.")] = "",
    worker: OneWorker = None,
    timeout: Timeout = WAIT,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Unload a model, do not load it, and answer its jobs with model_unavailable, until release or for a time."""
    asked = {"model": model, "seconds": seconds, "reason": reason}
    _order("quarantine", asked, worker, timeout, broker, config, as_json)


@group.command("release")
def release(
    model: Model,
    worker: OneWorker = None,
    timeout: Timeout = WAIT,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Let a model be loaded again, now: ends a quarantine, and forgets its failed loads and the workers they ended."""
    _order("release", {"model": model}, worker, timeout, broker, config, as_json)


def _order(
    verb: str, asked: dict[str, Any], worker: str | None, timeout: float, broker: str | None, config: Any, as_json: bool
) -> None:
    arguments = {name: value for name, value in asked.items() if value not in (None, "")}
    answers = at_the_desk(
        lambda desk, _: desk.give(verb, arguments, worker=worker, patience=timeout), broker, config, as_json
    )
    _tell(answers, asked["model"], as_json)


def _tell(answers: Answers, model: str, as_json: bool) -> None:
    if as_json:
        print_json(answers.as_dict())
    else:
        for worker, result in sorted(answers.results().items()):
            told = ", ".join(_told(name, value) for name, value in result.items() if name != "peers")
            say(f"{worker}: {answers.verb} {model}: {told}")
    finish(answers)


def _told(name: str, value: Any) -> str:
    if name == "nbytes":
        return mib(value)
    return f"{name} " + {"True": "yes", "False": "no", "None": "-"}.get(str(value), str(value))


def _roomiest(answers: Answers, model: str) -> str:
    """The worker to load ``model``: where it is, else where most is free. Drained ones are left out."""
    snapshots = {worker: result["snapshot"] for worker, result in answers.results().items()}
    for worker, snapshot in sorted(snapshots.items()):
        if any(row["model"] == model for row in snapshot["models"]):
            return worker
    free = {
        worker: snapshot["ledger"]["budget"] - snapshot["ledger"]["held"]
        for worker, snapshot in snapshots.items()
        if snapshot["ready"]
    }
    if not free:
        give_up("no worker is ready to load it: see qworker workers ls")
    return max(sorted(free), key=lambda worker: free[worker])


# --- why -----------------------------------------------------------------------------------------


def why(
    model: Model, timeout: Timeout = WAIT, broker: Broker = None, config: Config = None, as_json: AsJson = False
) -> None:
    """Say why a model is hot, or why it is not: its state everywhere, its key, what it waits for, its last loads.

    Exit codes: 0, 1 for an error, 3 when a known worker did not answer.
    """

    async def work(desk: Desk, session: Session) -> tuple[Answers, dict[str, Any]]:
        queue = await session.depth(lane_queue("jobs", model))
        batch = await session.depth(lane_queue("batch", model))
        answers = await desk.give("why", {"model": model}, patience=timeout)
        lanes = {"jobs": queue, "batch": batch}
        found = {
            lane: {"ready": depth.ready, "consumers": depth.consumers}
            for lane, depth in lanes.items()
            if depth is not None
        }
        return answers, found

    answers, queues = at_the_desk(work, broker, config, as_json)
    views = answers.results()
    ready = sum(each["ready"] for each in queues.values()) if queues else None
    said = verdict(model, views, ready)
    if as_json:
        print_json({"model": model, "verdict": said, "queues": queues, **answers.as_dict()})
    else:
        say(said)
        for lane, depth in queues.items():
            say(f"queue {lane}: {depth['ready']} ready, {depth['consumers']} consumers")
        for worker, view in sorted(views.items()):
            say(f"{worker}:")
            for line in details(view):
                say(f"  {line}")
            for note, times in _repeats(view["story"]):
                again = f" ({times} times)" if times > 1 else ""
                say(f"  {_when(note['at'])} {note['kind']}{_more(note)}{again}")
    finish(answers)


def _repeats(story: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """The last of those that say the same one after the other, and how many there are."""
    told: list[tuple[dict[str, Any], int]] = []
    for note in story:
        same = told and all(told[-1][0].get(name) == note.get(name) for name in ("kind", "reason", "seconds"))
        if same:
            told[-1] = (note, told[-1][1] + 1)
        else:
            told.append((note, 1))
    return told


def _more(note: dict[str, Any]) -> str:
    seconds = f" in {note['seconds']:.3f} s" if "seconds" in note else ""
    return seconds + (f": {note['reason']}" if note.get("reason") else "")


def _when(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}"
