"""What the commands for a fleet share: a desk at the broker, and how its answers are shown."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qworker.api import connector_for
from qworker.broker.base import Session
from qworker.cli.call import fail
from qworker.config import load_settings
from qworker.errors import QworkerError
from qworker.watch.orders import PATIENCE, Answers, Desk

_T = TypeVar("_T")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's id.")]
Name = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's name.")]
OneWorker = Annotated[str | None, typer.Option("--worker", help="Only this worker; all when left out.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answers of all known workers.")]
Broker = Annotated[str | None, typer.Option(help="amqp(s)://user:password@host:port/vhost [QWORKER_BROKER]")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings [QWORKER_CONFIG]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WAIT = PATIENCE
SILENT = 3
"""The exit code when a known worker did not answer."""


def at_the_desk(
    work: Callable[[Desk, Session], Awaitable[_T]], broker: str | None, config: Path | None, as_json: bool
) -> _T:
    """Run ``work``; its errors end the command."""

    async def run() -> _T:
        settings = load_settings({"broker": broker}, config)
        async with (
            await connector_for(settings, "qworker-operator").connect() as session,
            Desk(session) as desk,
        ):
            return await work(desk, session)

    try:
        return asyncio.run(run())
    except QworkerError as exc:
        fail(exc, as_json)


def finish(answers: Answers) -> None:
    """Say who did not answer, or did not do it, and end with the code for that: 3 and 1."""
    for line in answers.complaints():
        complain(line)
    if answers.silent:
        raise typer.Exit(SILENT)
    if answers.errors():
        raise typer.Exit(1)


def shown(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def plain(*values: object) -> list[Text]:
    """Cells. Names may look like markup."""
    return [Text(str(value)) for value in values]


def table_of(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table()
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def complain(line: str) -> None:
    sys.stderr.write(f"warning: {line}\n")


def give_up(line: str) -> NoReturn:
    sys.stderr.write(f"error: {line}\n")
    raise typer.Exit(1)


def mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
