"""``qworker dead``: jobs that were set aside, with why, where, when and how often; put back, or dropped."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qworker.api import connector_for
from qworker.cli.call import fail
from qworker.client.dead_letters import DeadLetters, Letter, Wanted
from qworker.config import load_settings
from qworker.errors import QworkerError

_T = TypeVar("_T")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

group = typer.Typer(name="dead", help="Dead letters: list, show, put back, drop.", no_args_is_help=True)

Causes = Annotated[
    list[str] | None, typer.Option("--cause", help="Only of this cause, as poison_job or reply_gone (repeat).")
]
Models = Annotated[list[str] | None, typer.Option("--model", help="Only of this model (repeat).")]
Jobs = Annotated[list[str] | None, typer.Option("--job", help="Only the job of this id (repeat).")]
Older = Annotated[str | None, typer.Option(metavar="TIME", help="Only those set aside before, as 30m, 2h or 7d ago.")]
Newer = Annotated[str | None, typer.Option(metavar="TIME", help="Only those set aside since, as 30m, 2h or 7d ago.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many.")]
Everything = Annotated[bool, typer.Option("--all", help="All of them, where no filter is given.")]
Broker = Annotated[str | None, typer.Option(help="amqp(s)://user:password@host:port/vhost [QWORKER_BROKER]")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings [QWORKER_CONFIG]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the group ``dead`` to the command line."""
    app.add_typer(group)


@group.command("list")
def list_letters(
    causes: Causes = None,
    models: Models = None,
    jobs: Jobs = None,
    older: Older = None,
    newer: Newer = None,
    limit: Limit = None,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first. They stay where they are."""
    wanted = _wanted(causes, models, jobs, older, newer)
    letters = _on_the_broker(lambda dead: dead.look(wanted, limit=limit), broker, config, as_json)
    if as_json:
        _print_json([letter.as_dict() for letter in letters])
    elif letters:
        _show_table(letters)
    else:
        _say("no dead letters")


@group.command("show")
def show_letter(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    body: Annotated[Path | None, typer.Option("--body", metavar="FILE", help="Save the job's body.")] = None,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter with all that is known of it. Exit codes: 0 found, 1 there is none."""
    found = _on_the_broker(lambda dead: dead.body(job_id), broker, config, as_json)
    if found is None:
        _say(f"no dead letter of the job {job_id}")
        raise typer.Exit(1)
    letter, content = found
    if body is not None:
        body.write_bytes(content)
    if as_json:
        _print_json(letter.as_dict())
        return
    table = Table(show_header=False, box=None)
    for name, value in letter.as_dict().items():
        table.add_row(f"[bold]{name.replace('_', ' ')}[/bold]", Text(_when(letter) if name == "at" else str(value)))
    _console().print(table)


@group.command("requeue")
def requeue_letters(
    causes: Causes = None,
    models: Models = None,
    jobs: Jobs = None,
    older: Older = None,
    newer: Newer = None,
    limit: Limit = None,
    everything: Everything = False,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Put dead letters back into their lanes, as if they were published now. Mend what was wrong first.

    What is on record against a poison job's payload is forgotten. A deadline that has passed is taken off.
    """
    wanted = _wanted(causes, models, jobs, older, newer)
    _need_a_choice(wanted, everything)
    letters = _on_the_broker(lambda dead: dead.requeue(wanted, limit=limit), broker, config, as_json)
    _tell("requeued", letters, as_json)


@group.command("drop")
def drop_letters(
    causes: Causes = None,
    models: Models = None,
    jobs: Jobs = None,
    older: Older = None,
    newer: Newer = None,
    limit: Limit = None,
    everything: Everything = False,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Take dead letters out for good."""
    wanted = _wanted(causes, models, jobs, older, newer)
    _need_a_choice(wanted, everything)
    letters = _on_the_broker(lambda dead: dead.drop(wanted, limit=limit), broker, config, as_json)
    _tell("dropped", letters, as_json)


def _on_the_broker(
    work: Callable[[DeadLetters], Awaitable[_T]], broker: str | None, config: Path | None, as_json: bool
) -> _T:
    async def run() -> _T:
        settings = load_settings({"broker": broker}, config)
        async with await connector_for(settings, "qworker-dead").connect() as session:
            return await work(DeadLetters(session))

    try:
        return asyncio.run(run())
    except QworkerError as exc:
        fail(exc, as_json)


def _wanted(
    causes: list[str] | None, models: list[str] | None, jobs: list[str] | None, older: str | None, newer: str | None
) -> Wanted:
    return Wanted(
        frozenset(causes or ()),
        frozenset(models or ()),
        frozenset(jobs or ()),
        _ago(older, "--older"),
        _ago(newer, "--newer"),
    )


def _ago(text: str | None, option: str) -> float | None:
    """Unix seconds of a time as ``2h`` ago."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text.strip())
    if match is None:
        raise typer.BadParameter(f"expected {option} like 90s, 30m, 2h or 7d; found {text[:40]!r}")
    return time.time() - float(match[1]) * _UNITS[match[2]]


def _need_a_choice(wanted: Wanted, everything: bool) -> None:
    if wanted.everything and not everything:
        raise typer.BadParameter("say which: --cause, --model, --job, --older or --newer; or --all of them")


def _tell(what: str, letters: list[Letter], as_json: bool) -> None:
    if as_json:
        _print_json({what: [letter.as_dict() for letter in letters]})
    else:
        _say(f"{what} {len(letters)}")


def _show_table(letters: list[Letter]) -> None:
    table = Table()
    for name in ("when", "cause", "model", "job", "runs", "worker", "reason"):
        table.add_column(name, overflow="fold", no_wrap=name == "when")
    for letter in letters:
        row = (
            _when(letter),
            letter.cause,
            letter.model,
            letter.job_id,
            str(letter.attempts),
            letter.worker,
            letter.reason,
        )
        table.add_row(*map(Text, row))
    _console().print(table)


def _when(letter: Letter) -> str:
    return "-" if letter.at is None else f"{datetime.fromtimestamp(letter.at, UTC):%Y-%m-%d %H:%M:%S}"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
