"""``qworker history``: what a worker remembers, as a table, as a trace, and as a plan of preloads."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn, TextIO

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from qworker.errors import QworkerError
from qworker.policy.backtest import backtest
from qworker.policy.forecast import BadPlan, Forecast, Plan, dump_plan, is_refused, make_plan, parse_plan, renewed
from qworker.policy.history import Minute, Request, as_trace, parse_history, parse_journal

group = typer.Typer(name="history", help="What was asked for and what loads cost.", no_args_is_help=True)

_MOST_A_MINUTE = 2
"""More requests of one model in a minute say no more about who is asked for when."""
_MINUTES = 28 * 24 * 60
_MOST_REQUESTS = 500_000
"""The latest ones: a minute or two of a core."""

Journals = Annotated[list[Path], typer.Argument(metavar="JOURNAL...", help="Journals of one or several workers.")]


def register(app: typer.Typer) -> None:
    """Add the group ``history`` to the command line."""
    app.add_typer(group)


@group.command("show")
def show(
    history: Annotated[Path, typer.Argument(metavar="HISTORY", help="The history file of a worker.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a worker knows of each model, the most used first."""
    try:
        stored = parse_history(history.read_text(encoding="utf-8"))
    except (QworkerError, OSError, UnicodeDecodeError) as error:
        _refuse(f"{history}: {error}")
    usages = sorted(stored.at(time.time()).items(), key=lambda pair: -pair[1].count)
    if as_json:
        rows = {
            model: {"uses": u.count, "age_s": u.age, "load_seconds": u.load_seconds, "size_bytes": int(u.nbytes)}
            for model, u in usages
        }
        typer.echo(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    for name in ("uses (7 d)", "last used", "load s", "MiB"):
        table.add_column(name, justify="right")
    for model, u in usages:
        table.add_row(
            model, f"{u.count:.1f}", f"{u.age / 3_600:.1f} h ago", f"{u.load_seconds:.2f}", f"{u.nbytes / 2**20:,.0f}"
        )
    Console().print(table)


@group.command("export")
def export(
    journals: Journals,
    out: Annotated[Path | None, typer.Option(help="File to write; the terminal when left out.")] = None,
) -> None:
    """The trace of your own traffic, for ``qworker simulate``: timestamp_s,model_id,size_bytes,load_seconds."""
    requests = as_trace(_read(journals))
    try:
        if out is None:
            _write(sys.stdout, requests)
        else:
            with out.open("w", encoding="utf-8") as file:
                count = _write(file, requests)
            typer.echo(f"{count:,} requests written to {out}", err=True)
    except OSError as error:
        _refuse(f"the trace cannot be written: {error}")


@group.command("plan")
def plan(
    journals: Journals,
    memory: Annotated[str, typer.Option(help="Budget of a worker, e.g. 24GiB.")],
    out: Annotated[Path | None, typer.Option(help="File to write; the terminal when left out.")] = None,
) -> None:
    """Test on the history whether preloading into free bytes would have paid, and plan tomorrow's preloads if so.

    A plan that was refused by hand (act = false) stays refused when it is written anew.
    """
    try:
        budget = int(TypeAdapter(ByteSize).validate_python(memory))
    except ValidationError:
        _refuse(f"expected a size like 24GiB for --memory, found {memory!r}")
    made = renewed(_plan(_read(journals), budget), None if out is None else _before(out))
    text = dump_plan(made)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        aside = out.with_name(f"{out.name}.new")  # a worker that reads it meanwhile must not find half a plan
        aside.write_text(text, encoding="utf-8")
        aside.replace(out)
    except OSError as error:
        _refuse(f"the plan cannot be written: {error}")
    acts = "was refused, and stays off" if is_refused(made) else "acts" if made.act else "stays off"
    typer.echo(f"preloading {acts}: {made.verdict}", err=True)


def _plan(rows: list[Minute], budget: int) -> Plan:
    newest = max((row.minute for row in rows), default=0)
    rows = [replace(row, requests=min(row.requests, _MOST_A_MINUTE)) for row in rows if row.minute > newest - _MINUTES]
    requests = deque(as_trace(rows), maxlen=_MOST_REQUESTS)
    costs = {r.model: (r.nbytes, r.load_seconds) for r in requests if r.nbytes}
    measured = [(r.at, r.model) for r in requests if r.model in costs]
    verdict = backtest(measured, costs, budget, allowed=("free",))
    forecast = Forecast()
    for at, model in measured:
        forecast.observe(model, at)
    return make_plan(forecast, verdict.tier, verdict.why, time.time(), least_probability=verdict.least_probability)


def _before(out: Path) -> Plan | None:
    try:
        return parse_plan(out.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (BadPlan, OSError, UnicodeDecodeError) as error:
        typer.echo(f"{out} is replaced: it cannot be read: {error}", err=True)
        return None


def _read(journals: Iterable[Path]) -> list[Minute]:
    rows: list[Minute] = []
    for path in journals:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                journal = parse_journal(file)
        except (QworkerError, OSError, UnicodeDecodeError) as error:
            _refuse(f"{path}: {error}")
        if journal.skipped:
            typer.echo(f"{path}: {journal.skipped} lines could not be read and were left out", err=True)
        rows += journal.rows
    return rows


def _write(file: TextIO, requests: Iterable[Request]) -> int:
    file.write("timestamp_s,model_id,size_bytes,load_seconds\n")
    count = 0
    for request in requests:
        cost = f"{request.nbytes},{request.load_seconds:.6g}" if request.nbytes else ","
        file.write(f"{request.at:.3f},{request.model},{cost}\n")
        count += 1
    return count


def _refuse(why: str) -> NoReturn:
    typer.echo(f"qworker history: {why}", err=True)
    raise typer.Exit(1)
