"""``qworker simulate``: what another policy, budget or fleet would have made of a trace."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from qworker.policy.choice import POLICIES
from qworker.simulate.compare import Comparison, as_json, compare, size, suggestion
from qworker.simulate.fleet import Fleet
from qworker.simulate.report import html
from qworker.simulate.trace import BadTrace, Trace, read_trace

DEFAULT_SHARE = 0.25
_MOST_PROCESSES = 4


def register(app: typer.Typer) -> None:
    """Add ``simulate`` to the command line."""
    app.command("simulate")(simulate)


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE.csv", help="timestamp_s,model_id[,size_bytes,load_seconds,run_seconds]; .gz too."
        ),
    ],
    memory: Annotated[str | None, typer.Option(help="Budget of each worker, e.g. 24GiB.")] = None,
    budget_share: Annotated[
        float | None,
        typer.Option(help=f"Budget of the fleet as a share of all models' bytes; {DEFAULT_SHARE} when left out."),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"Of {', '.join(POLICIES)}; several with commas.")] = "gdsf,rate",
    sizes: Annotated[Path | None, typer.Option(help="CSV with model_id,size_bytes,load_seconds.")] = None,
    seed: Annotated[int, typer.Option(help="For sizes and load seconds that are not given.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Equal workers.")] = 1,
    max_concurrent_loads: Annotated[int, typer.Option(min=1, help="Loads at once on each worker.")] = 2,
    min_residency: Annotated[float, typer.Option(min=0, help="Seconds that a model just loaded stays.")] = 5.0,
    max_cold_wait: Annotated[float, typer.Option(min=0, help="Seconds after which a cold model outranks it.")] = 30.0,
    claim_timeout: Annotated[float, typer.Option(min=0, help="Seconds that a claim waits for bytes.")] = 120.0,
    group_window: Annotated[float, typer.Option(min=0, help="Seconds that jobs of a cold model are gathered.")] = 0.0,
    brake: Annotated[bool, typer.Option(help="Hold evicting claims while models push each other out.")] = True,
    offline: Annotated[bool, typer.Option(help="Also what knowing the future would give.")] = True,
    suggest: Annotated[bool, typer.Option(help="Also try other budgets.")] = True,
    report: Annotated[Path | None, typer.Option(help="Write a page with plots there.")] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one object keyed by policy.")] = False,
) -> None:
    """Replay a trace through the worker's own policy code, on a virtual clock.

    Sizes and load seconds come from --sizes, else from the trace, else they are drawn from --seed.
    """
    try:
        read = read_trace(trace, sizes=sizes, seed=seed)
        fleet = Fleet(
            budget=_budget(read, memory, budget_share, workers),
            workers=workers,
            load_slots=max_concurrent_loads,
            min_residency=min_residency,
            max_cold_wait=max_cold_wait,
            claim_timeout=claim_timeout,
            group_window=group_window,
            brake=brake,
        )
        names = [name.strip() for name in policy.split(",") if name.strip()]
        comparison = compare(read, fleet, names or ["gdsf"], offline=offline, curve=suggest, processes=_processes())
        if report is not None:
            report.write_text(html(comparison, f"qworker simulate {trace.name}"), encoding="utf-8")
    except (BadTrace, ValueError) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"the report cannot be written: {error}")
    if as_json_:
        typer.echo(json.dumps(as_json(comparison)))
        return
    _show(comparison)
    if report is not None:
        typer.echo(f"\nreport: {report}")


def _budget(trace: Trace, memory: str | None, share: float | None, workers: int) -> int:
    if memory is not None and share is not None:
        raise ValueError("expected --memory or --budget-share, found both")
    if memory is not None:
        try:
            budget = int(TypeAdapter(ByteSize).validate_python(memory))
        except ValidationError as error:
            raise ValueError(f"expected a size like 24GiB for --memory, found {memory!r}") from error
    else:
        share = DEFAULT_SHARE if share is None else share
        if not 0.0 < share < float("inf"):
            raise ValueError(f"expected --budget-share above 0, found {share}")
        budget = int(trace.total_bytes * share / workers)
    if budget <= 0:
        raise ValueError(f"expected a budget above 0, found {budget} bytes")
    return budget


def _show(comparison: Comparison) -> None:
    trace, fleet = comparison.trace, comparison.fleet
    typer.echo(
        f"{len(trace.times):,} requests for {len(trace.models)} models in {trace.seconds / 86_400:.3g} days; "
        f"{fleet.workers} worker(s) x {size(fleet.budget)}, all models take {size(trace.total_bytes)}"
    )
    if trace.drawn:
        typer.echo(f"sizes or load seconds of {len(trace.drawn)} models are not in the trace and were drawn")
    if trace.skipped:
        typer.echo(f"{trace.skipped} rows without a model id were left out")
    if comparison.first.refused:
        typer.echo(f"{comparison.first.refused:,} requests were for models larger than a worker's budget")
    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for name in ("load s", "of LRU", "regret", "loads", "misses", "p50 s", "p99 s", "cold p50 s", "max s", "churn/h"):
        table.add_column(name, justify="right")
    for outcome in comparison.outcomes.values():
        table.add_row(
            outcome.policy,
            f"{outcome.load_seconds:,.0f}",
            f"{comparison.relative(outcome):.1%}",
            f"{comparison.regret(outcome):.1%}",
            f"{outcome.loads:,}",
            f"{outcome.misses:,}",
            f"{outcome.wait_p50:.2f}",
            f"{outcome.wait_p99:.2f}",
            f"{outcome.cold_wait(0.5):.2f}",
            f"{outcome.longest_wait:.1f}",
            f"{outcome.churn:.2f}",
        )
    Console(width=None if os.isatty(1) else 120).print(table)
    for at, thrash in comparison.first.thrash[-3:]:
        typer.echo(f"at {at:,.0f} s: {thrash.reason}")
    if comparison.curve:
        typer.echo(suggestion(comparison))


def _processes() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return min(_MOST_PROCESSES, usable)


def _refuse(why: str) -> NoReturn:
    typer.echo(f"qworker simulate: {why}", err=True)
    raise typer.Exit(1)
