"""The ``qworker`` command: one file a group of verbs."""

from __future__ import annotations

import typer

import qworker
from qworker.cli import (
    broker,
    build,
    call,
    dashboard,
    dead,
    doctor,
    fleet,
    history,
    models,
    score,
    simulate,
    top,
    worker,
    workers,
)

app = typer.Typer(
    name="qworker",
    help="Inference jobs from RabbitMQ, run by workers that subscribe to a model only while it is hot.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(qworker.__version__)
        raise typer.Exit


for group in (
    worker,
    models,
    fleet,
    workers,
    top,
    dashboard,
    build,
    call,
    score,
    dead,
    simulate,
    history,
    doctor,
    broker,
):
    group.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()
