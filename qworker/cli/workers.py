"""``qworker workers``: who is there, and taking one out of service without ending it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from qworker.broker.base import Session
from qworker.cli.asking import (
    WAIT,
    AsJson,
    Broker,
    Config,
    Name,
    Timeout,
    at_the_desk,
    complain,
    finish,
    mib,
    plain,
    print_json,
    say,
    shown,
    table_of,
)
from qworker.watch.orders import Answers, Desk

group = typer.Typer(name="workers", help="Workers: list, show, drain, resume.", no_args_is_help=True)

LOOK = 0.2


def register(app: typer.Typer) -> None:
    """Add the group ``workers`` to the command line."""
    app.add_typer(group)


@group.command("ls")
def list_workers(
    timeout: Timeout = WAIT, broker: Broker = None, config: Config = None, as_json: AsJson = False
) -> None:
    """List the workers that are connected, with what they hold, and those that do not answer.

    Exit codes: 0, 1 for an error, 3 when a known worker did not answer.
    """
    answers = at_the_desk(lambda desk, _: desk.give("status", patience=timeout), broker, config, as_json)
    rows = [summary(result["snapshot"]) for _, result in sorted(answers.results().items())]
    if as_json:
        print_json({"workers": rows, "silent": dict(answers.silent)})
    else:
        table = table_of(
            "worker",
            "state",
            "held",
            "budget",
            "hot",
            "loading",
            "jobs",
            right=("held", "budget", "hot", "loading", "jobs"),
        )
        for row in rows:
            cells = (mib(row["held"]), mib(row["budget"]), row["hot"], row["loading"], row["jobs"])
            table.add_row(*plain(row["worker"], row["state"], *cells))
        for worker in sorted(answers.silent):
            table.add_row(*plain(worker, "does not answer", "", "", "", "", ""))
        shown(table)
    finish(answers)


def summary(snapshot: dict[str, Any]) -> dict[str, Any]:
    states = [row["state"] for row in snapshot["models"]]
    return {
        "worker": snapshot["worker"],
        "state": "ready" if snapshot["ready"] else snapshot["reason"],
        "drained": snapshot["drained"],
        "held": snapshot["ledger"]["held"],
        "budget": snapshot["ledger"]["budget"],
        "hot": states.count("hot"),
        "loading": states.count("loading"),
        "waiting": states.count("waiting"),
        "in_hand": sum(row["in_hand"] for row in snapshot["models"]),
        "jobs": snapshot["counters"]["jobs_answered"],
    }


@group.command("show")
def show_worker(
    name: Name, timeout: Timeout = WAIT, broker: Broker = None, config: Config = None, as_json: AsJson = False
) -> None:
    """Show one worker: its models, its memory, what it waits for, its pins, and what happened of late."""
    answers = at_the_desk(lambda desk, _: desk.give("status", worker=name, patience=timeout), broker, config, as_json)
    for result in answers.results().values():
        snapshot: dict[str, Any] = result["snapshot"]
        if as_json:
            print_json(snapshot)
        else:
            _show(snapshot)
    finish(answers)


def _show(snapshot: dict[str, Any]) -> None:
    row = summary(snapshot)
    memory = f"{mib(row['held'])} of {mib(row['budget'])} held"
    say(f"{row['worker']}: {row['state']}; {memory}, {row['in_hand']} jobs in hand")
    table = table_of("model", "state", "memory", "key", "in hand", "since", right=("memory", "key", "in hand", "since"))
    for each in snapshot["models"]:
        key = "" if each["key"] is None else f"{each['key']:.4g}"
        state = each["state"] + (", pinned" if each["pinned"] else "")
        table.add_row(
            *plain(each["model"], state, mib(each["nbytes"]), key, each["in_hand"], f"{each['seconds']:.0f} s")
        )
    shown(table)
    for each in snapshot["waiting"]:
        say(f"{each['model']} waits since {each['seconds']:.1f} s: {each['why']}")
    for model, pin in snapshot["pins"].items():
        say(
            f"{model} is pinned by order"
            + ("" if pin["holds"] else ", not now")
            + (f", {pin['hours']}" if pin["hours"] else "")
        )
    for each in (*snapshot["held"], *snapshot["quarantined"]):
        say(f"{each['model']} is not loaded for {each['seconds']:.0f} s more: {each['reason']}")
    for note in snapshot["notes"][-10:]:
        say(f"{note['kind']} {note['model']}" + (f": {note['reason']}" if note.get("reason") else ""))


@group.command("drain")
def drain_worker(
    name: Name,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it is empty; 0: do not wait.")] = 60.0,
    timeout: Timeout = WAIT,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Have a worker finish what it has in hand, let go of its models, and take nothing until it is resumed.

    No job is lost: those in hand are answered, the others wait for other workers. The process goes on.
    Exit codes: 0 it is empty (or --wait 0), 1 an error, or it is not empty in time, 3 it did not answer.
    """

    async def work(desk: Desk, _: Session) -> tuple[Answers, int]:
        answers = await desk.give("drain", worker=name, patience=timeout)
        left = await _until_empty(desk, name, wait) if wait and answers.results() else 0
        return answers, left

    answers, left = at_the_desk(work, broker, config, as_json)
    if as_json:
        print_json({**answers.as_dict(), "left": left})
    elif answers.results():
        say(f"{name} is drained" + (f"; {left} models are still leaving" if left else ""))
    finish(answers)
    if left:
        complain(f"{name} is not empty after {wait:g} s: it takes nothing new, and its jobs in hand go on")
        raise typer.Exit(1)


@group.command("resume")
def resume_worker(
    name: Name, timeout: Timeout = WAIT, broker: Broker = None, config: Config = None, as_json: AsJson = False
) -> None:
    """Let a drained worker take jobs again."""
    answers = at_the_desk(lambda desk, _: desk.give("resume", worker=name, patience=timeout), broker, config, as_json)
    if as_json:
        print_json(answers.as_dict())
    elif answers.results():
        say(f"{name} takes jobs again")
    finish(answers)


async def _until_empty(desk: Desk, name: str, seconds: float) -> int:
    """Models that it still has after that time, 0 as soon as it has none."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        results = (await desk.give("status", worker=name)).results()
        claims = {claim for result in results.values() for claim in result["snapshot"]["claims"]}
        if results and not claims:
            return 0
        if asyncio.get_running_loop().time() >= deadline:
            return len(claims) or 1
        await asyncio.sleep(LOOK)
