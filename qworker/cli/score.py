"""``qworker score``: a file in, a file out."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from qworker.api import connector_for
from qworker.config import Settings, load_settings
from qworker.errors import ConfigError, QworkerError
from qworker.score.cargo import Tally
from qworker.score.prepare import Ask
from qworker.score.run import Progress, Summary, score_file
from qworker.store.local import LocalStore

SOME_FAILED = 3
INTERRUPTED = 130

Option = typer.Option


def register(app: typer.Typer) -> None:
    """Add ``score`` to the command line."""
    app.command("score")(score)


def score(
    source: Annotated[
        str,
        Option("--input", "-i", metavar="PATH", help="A file (.parquet .arrow .csv .jsonl .npy .npz), folder or glob."),
    ],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="Ends in .parquet, .jsonl or .npz.")],
    model: Annotated[str | None, Option("--model", "-m", help="The model's id.")] = None,
    models: Annotated[str | None, Option("--models", metavar="A,B", help="Each row goes to all of them.")] = None,
    model_column: Annotated[
        str | None, Option("--model-column", help="The column that names each row's model; `model` when left out.")
    ] = None,
    mapping: Annotated[
        list[str] | None,
        Option(
            "--map", metavar="INPUT=COLUMN", help="Which column feeds an input; INPUT=A,B or INPUT=F* packs numbers."
        ),
    ] = None,
    columns: Annotated[str | None, Option("--columns", metavar="A,B", help="Columns that go through.")] = None,
    key: Annotated[str | None, Option("--key", help="The column that tells rows apart; goes through.")] = None,
    only: Annotated[
        list[str] | None, Option("--only", metavar="OUTPUT", help="Write this output only (repeat).")
    ] = None,
    batch_rows: Annotated[int | None, Option(min=1, help="Rows of a job; by the model's card when left out.")] = None,
    in_flight: Annotated[int | None, Option(min=1, help="Jobs on their way; found out when left out.")] = None,
    models_at_once: Annotated[int, Option(min=1, help="Models whose rows are sent at once.")] = 2,
    ordered: Annotated[bool, Option("--ordered", help="Rows in the order of the input.")] = False,
    resume: Annotated[bool, Option("--resume", help="Go on with a run that was interrupted.")] = False,
    limit: Annotated[int | None, Option(min=1, help="Only so many rows, from the first one.")] = None,
    max_errors: Annotated[int | None, Option(min=0, help="Stop when more rows fail.")] = None,
    max_error_rate: Annotated[
        float | None, Option(min=0, max=1, help="Stop when a larger part of the rows fails.")
    ] = None,
    store: Annotated[str | None, Option(help="Folder of the cold store [QWORKER_STORE]")] = None,
    broker: Annotated[str | None, Option(help="amqp(s)://user:password@host:port/vhost [QWORKER_BROKER]")] = None,
    config: Annotated[Path | None, Option("--config", help="TOML file with settings [QWORKER_CONFIG]")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Score all rows of a file by the workers, out of the way of online calls.

    Killed or stopped at any moment, the same command with --resume goes on where it was. Exit codes: 0 all rows,
    3 some rows failed (they are told in OUTPUT.errors.jsonl), 1 the run failed, 2 wrong usage.
    """
    try:
        settings = load_settings({"store": store, "broker": broker}, config)
        ask = Ask(
            input=source,
            output=output,
            models=tuple(part for part in ([model] if model else []) + _listed(models)),
            model_column=model_column,
            mapping=_mapping(mapping or ()),
            columns=tuple(_listed(columns)),
            key=key,
            outputs=tuple(only or ()),
            batch_rows=batch_rows,
            in_flight=in_flight,
            ordered=ordered,
            resume=resume,
            limit=limit,
            max_errors=max_errors,
            max_error_rate=max_error_rate,
            models_at_once=models_at_once,
        )
        summary = _run(ask, settings, quiet=as_json or not sys.stderr.isatty())
    except KeyboardInterrupt:
        _stopped(output, as_json)
    except QworkerError as exc:
        _fail(exc, as_json)
    except BaseExceptionGroup as group:
        expected, unexpected = group.split(QworkerError)
        if unexpected is not None or expected is None:
            raise
        _fail(_first(expected), as_json)
    _show(summary, output, as_json)
    raise typer.Exit(SOME_FAILED if summary.failed else 0)


def _run(ask: Ask, settings: Settings, *, quiet: bool) -> Summary:
    card = LocalStore(settings.store).card
    view = _View(quiet)

    async def run() -> Summary:
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        loop.add_signal_handler(signal.SIGTERM, main.cancel)
        return await score_file(
            ask,
            connector_for(settings, "qworker-score"),
            card,
            max_body=int(settings.max_body),
            queue_type=settings.queue_type,
            told=view.show,
        )

    with view:
        try:
            return asyncio.run(run())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


class _View:
    """The progress as a person sees it; nothing where nobody looks."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True, quiet=quiet)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[more]}"),
            console=console,
            disable=quiet,
        )
        self._task: TaskID | None = None
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> _View:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        done = progress.done + progress.failed
        if self._task is None:
            self._task = self._bar.add_task(progress.stage, total=progress.rows, completed=done, speed="", more="")
        if self._first is None and progress.stage == "scoring":
            self._first = (self._bar.get_time(), done)
        more = [f"{progress.in_flight}/{progress.window} jobs"]
        loads = sum(len(tally.load_seconds) for tally in progress.tallies.values())
        more += [f"{loads} loads"] if loads else []
        more += [f"{progress.failed} errors"] if progress.failed else []
        more += ["the broker takes nothing now"] if progress.blocked and progress.stage == "scoring" else []
        more += [", ".join(progress.models[:3])] if progress.models else []
        speed = ""
        if self._first is not None and self._bar.get_time() > self._first[0]:
            speed = f"{(done - self._first[1]) / (self._bar.get_time() - self._first[0]):,.0f} rows/s"
        self._bar.update(
            self._task,
            description=progress.stage,
            completed=done,
            total=progress.rows,
            speed=speed,
            more="  ".join(more),
        )


def _show(summary: Summary, output: Path, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(_told(summary, output)) + "\n")
        return
    if summary.already:
        sys.stdout.write(f"{output} is complete already, of this very run: nothing to do\n")
        return
    speed = (summary.rows - summary.resumed) / max(summary.seconds, 1e-9)
    sys.stdout.write(f"{output}: {summary.rows:,} rows in {summary.seconds:.1f} s ({speed:,.0f} rows/s)")
    sys.stdout.write(f", {summary.resumed:,} of them from before\n" if summary.resumed else "\n")
    if summary.errors_file is not None:
        sys.stdout.write(f"{summary.failed:,} rows failed: see {summary.errors_file}\n")
    if not sys.stdout.isatty():
        return
    table = Table(title="cost by model", title_justify="left")
    for heading in ("model", "rows", "failed", "jobs", "retries", "loads", "load s", "run s"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for model, tally in summary.tallies.items():
        table.add_row(model, *(str(value) for value in _cost(tally).values()))
    Console(highlight=False, markup=False).print(table)


def _told(summary: Summary, output: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "rows": summary.rows,
        "failed": summary.failed,
        "seconds": round(summary.seconds, 3),
        "resumed": summary.resumed,
        "already": summary.already,
        "errors": summary.errors_file,
        "models": {model: _cost(tally) for model, tally in summary.tallies.items()},
    }


def _cost(tally: Tally) -> dict[str, Any]:
    return {
        "rows": tally.rows,
        "failed": tally.failed,
        "jobs": tally.jobs,
        "retries": tally.retries,
        "loads": len(tally.load_seconds),
        "load_seconds": round(sum(tally.load_seconds), 3),
        "run_seconds": round(tally.run_seconds, 3),
    }


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _mapping(literals: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in literals:
        name, equals, column = text.rpartition("=") if text.count("=") == 1 else text.partition("=")
        if not equals or not name or not column:
            raise typer.BadParameter(f"expected --map INPUT=COLUMN; found {text[:80]!r}")
        found[name] = column
    return found


def _stopped(output: Path, as_json: bool) -> NoReturn:
    message = "stopped; what is done is kept: run the same command with --resume to go on"
    if not output.with_name(output.name + ".score").exists():
        message = "stopped before anything was sent"
    if as_json:
        sys.stdout.write(json.dumps({"error": {"code": "interrupted", "message": message}}) + "\n")
    else:
        sys.stderr.write(message + "\n")
    raise typer.Exit(INTERRUPTED)


def _fail(error: QworkerError, as_json: bool) -> NoReturn:
    if as_json:
        sys.stdout.write(json.dumps({"error": {"code": error.code, "message": str(error)}}) + "\n")
    else:
        sys.stderr.write(f"{error.code}: {error}\n")
    raise typer.Exit(2 if isinstance(error, ConfigError) else 1)


def _first(group: BaseExceptionGroup[QworkerError]) -> QworkerError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
