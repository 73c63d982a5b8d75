"""``qworker models``: what the store has, and putting models into it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qworker.cli.builds import Builds
from qworker.config import Settings, load_settings
from qworker.errors import QworkerError
from qworker.store.card import Card, TensorEntry
from qworker.store.local import LocalStore

_T = TypeVar("_T")

group = typer.Typer(name="models", help="Put models into the store, list and remove them.", no_args_is_help=True)

Store = Annotated[str | None, typer.Option(help="Folder of the cold store [QWORKER_STORE]")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings [QWORKER_CONFIG]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's id.")]


def register(app: typer.Typer) -> None:
    """Add the group ``models`` to the command line."""
    app.add_typer(group)


@group.command("register")
def register_models(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="An .onnx file, or a folder with model.onnx in it.")
    ],
    model_id: Annotated[
        str | None, typer.Option("--id", help="The model's id; made of the name when left out.")
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="The next number when left out.")] = None,
    sample: Annotated[
        Path | None, typer.Option("--sample", metavar="FILE.npz", help="Inputs to warm up on, by their names.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that loading and running once may take.")] = 300.0,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="How far a row's floats may move among other rows.")
    ] = None,
    store: Store = None,
    broker: Annotated[
        str | None, typer.Option(help="Also declare the models' queues there, so that jobs are kept [QWORKER_BROKER]")
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Load each model once in a process of its own, measure it, and put it into the store.

    One that is refused does not stop the others. Exit codes: 0 all are in the store (and their queues are
    declared, where a broker is given), 1 some are not, 2 wrong usage.
    """
    if len(paths) > 1 and (model_id is not None or sample is not None):
        raise typer.BadParameter("--id and --sample are for one PATH: register the models one by one")
    settings = _or_fail(lambda: load_settings({"store": store, "broker": broker}, config))
    from qworker.build.register import register as put_in  # here: it imports onnx, which takes a while

    local = LocalStore(settings.store)
    cards: list[Card] = []
    outcomes: list[dict[str, Any]] = []
    for path in paths:
        try:
            card = put_in(local, path, model_id, version, sample, timeout=timeout, tolerance=tolerance, say=_say)
        except QworkerError as exc:
            _complain(str(exc) if str(path) in str(exc) else f"{path}: {exc}")
            outcomes.append({"path": str(path), "error": {"code": exc.code, "message": str(exc)}})
        else:
            cards.append(card)
            outcomes.append({"path": str(path), "model": card.model, "version": card.version})
    if as_json:
        _print_json(outcomes)
    elif cards:
        _print_cards(cards, Builds(local))
    declared = _declare(settings, cards)
    if len(cards) < len(paths) or not declared:
        raise typer.Exit(1)


@group.command("list")
def list_models(store: Store = None, config: Config = None, as_json: AsJson = False) -> None:
    """List the models of the store, with the version that jobs get."""
    local = _store(store, config)
    cards: list[Card] = []
    broken: list[str] = []
    for model in _or_fail(local.models):
        try:
            cards.append(local.card(model))
        except QworkerError as exc:
            _complain(f"{model}: {exc}")
            broken.append(model)
    builds = Builds(local)
    if as_json:
        _print_json([_summary(card, builds) for card in cards])
    elif cards:
        _print_cards(cards, builds)
    elif not broken:
        _say(f"the store {local.root} has no models: put some in with `qworker models register`")
    if broken:
        raise typer.Exit(1)


@group.command("show")
def show_model(
    model: Model,
    version: Annotated[str | None, typer.Option("--version", help="The default one when left out.")] = None,
    store: Store = None,
    broker: Annotated[
        str | None,
        typer.Option(help="Also ask there where it is hot, and whether its loads have ended workers [QWORKER_BROKER]"),
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show one model's card: what it takes and gives, and what was measured."""
    settings = _or_fail(lambda: load_settings({"store": store, "broker": broker}, config))
    local = LocalStore(settings.store)
    card = _or_fail(lambda: local.card(model, version))
    versions = _or_fail(lambda: local.versions(model))
    kept_back = _quarantine(settings, card)
    everywhere = _everywhere(settings, card.model)
    if as_json:
        found = [build.as_json() for build in Builds(local).of(card)]
        told: dict[str, Any] = {} if kept_back is None else {"quarantine": kept_back, "workers": everywhere}
        _print_json({**card.model_dump(mode="json"), "versions": versions, "builds": found, **told})
        return
    table = Table(show_header=False, box=None)
    for name, value in (
        ("model", f"{card.model}, version {card.version} (has {', '.join(versions)}; default {versions[-1]})"),
        ("files", "\n".join(f"{file.name}  {_size(file.nbytes)}  sha256 {file.sha256[:16]}" for file in card.files)),
        ("builds", "\n".join(build.line() for build in Builds(local).of(card))),
        ("inputs", "\n".join(map(_tensor, card.inputs)) or "none"),
        ("outputs", "\n".join(map(_tensor, card.outputs))),
        ("in memory", _size(card.resident_bytes)),
        ("while loading", "not measured" if card.peak_bytes is None else _size(card.peak_bytes)),
        ("load", f"{card.load_seconds:.3f} s"),
        ("optimised", "no: it would load no faster" if card.optimised is None else f"for {card.optimised.host}"),
        ("batched", _batched(card)),
        ("run", _run_times(card)),
        ("warm-up", card.sample or "none: no made-up input suits this model, give a --sample"),
        ("measured by", f"{card.runtime}, {card.created:%Y-%m-%d %H:%M:%S %Z}"),
    ):
        table.add_row(f"[bold]{name}[/bold]", _plain(value))
    if kept_back is not None:
        table.add_row("[bold]quarantine[/bold]", _plain(kept_back or "none"))
        lines = [f"{worker}: {state}" for worker, state in sorted((everywhere or {}).items())]
        table.add_row("[bold]workers[/bold]", _plain("\n".join(lines) or "none is connected"))
    _console().print(table)


@group.command("remove")
def remove_model(
    model: Model,
    version: Annotated[str | None, typer.Option("--version", help="Only this version.")] = None,
    store: Store = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Remove a model from the store. Workers that have it loaded keep it; its queue on the broker stays."""
    local = _store(store, config)
    removed = _or_fail(lambda: local.remove(model, version))
    if as_json:
        _print_json({"model": model, "removed": removed})
    else:
        _say(f"removed {model}, version {', '.join(removed)}")


# --- inside -------------------------------------------------------------------------------------


def _store(store: str | None, config: Path | None) -> LocalStore:
    return LocalStore(_or_fail(lambda: load_settings({"store": store}, config)).store)


def _quarantine(settings: Settings, card: Card) -> str | None:
    """Why workers do not load it now, "" where they may; None where no broker was named."""
    if "broker" not in settings.sources:
        return None
    from qworker.api import connector_for  # here: only this needs the AMQP library
    from qworker.worker.load_guard import held, load_mark
    from qworker.worker.strikes import StrikeBook

    async def ask() -> str:
        async with await connector_for(settings, "qworker-models").connect() as session:
            record = await StrikeBook("qworker models").read(session, load_mark(card))
        found = held(card, record, settings.max_load_crashes, time.time())
        return "" if found is None else found.reason

    return _or_fail(lambda: asyncio.run(ask()))


def _everywhere(settings: Settings, model: str) -> dict[str, str] | None:
    """Its state on each worker, or that the worker does not answer; None where no broker was named."""
    if "broker" not in settings.sources:
        return None
    from qworker.api import connector_for
    from qworker.watch.orders import Desk, NoWorker

    async def ask() -> dict[str, str]:
        async with await connector_for(settings, "qworker-models").connect() as session, Desk(session) as desk:
            answers = await desk.give("why", {"model": model})
        states = {worker: view["state"] for worker, view in answers.results().items()}
        return {**dict.fromkeys((*answers.silent, *answers.errors()), "does not answer"), **states}

    try:
        return asyncio.run(ask())
    except NoWorker:
        return {}
    except QworkerError as exc:
        _fail(exc)


def _declare(settings: Settings, cards: Sequence[Card]) -> bool:
    """Declare the models' queues where a broker was named; False when that failed."""
    if not cards or "broker" not in settings.sources:
        return True
    from qworker.app import declare_models  # here: only this needs the AMQP library

    models = sorted({card.model for card in cards})
    try:
        asyncio.run(
            declare_models(
                settings.broker_url,
                models,
                settings.queue_type,
                username_file=settings.broker_username_file,
                password_file=settings.broker_password_file,
            )
        )
    except QworkerError as exc:
        _complain(
            f"the models are in the store, but their queues could not be declared: {exc}. "
            "Run the same command again once the broker is there"
        )
        return False
    _say(f"declared the queues of {', '.join(models)}")
    return True


def _summary(card: Card, builds: Builds) -> dict[str, Any]:
    wanted = {"model", "version", "backend", "resident_bytes", "peak_bytes", "load_seconds", "warmed", "created"}
    return {
        **card.model_dump(mode="json", include=wanted),
        "file_bytes": sum(file.nbytes for file in card.files),
        "builds": [build.as_json() for build in builds.of(card)],
    }


def _print_cards(cards: Sequence[Card], builds: Builds) -> None:
    table = Table()
    table.add_column("model", overflow="fold")
    table.add_column("version", overflow="fold")
    for name in ("files", "in memory", "load"):
        table.add_column(name, justify="right", no_wrap=True)
    plans = {card.model: builds.of(card)[1:] for card in cards}
    if any(plans.values()):
        table.add_column("plans", overflow="fold")
    for card in cards:
        table.add_row(
            _plain(card.model),
            _plain(card.version),
            _size(sum(file.nbytes for file in card.files)),
            _size(card.resident_bytes),
            f"{card.load_seconds:.3f} s",
            *([_plain("\n".join(plan.line() for plan in plans[card.model]))] if any(plans.values()) else []),
        )
    _console().print(table)


def _batched(card: Card) -> str:
    """How the model's jobs run: several in one run, or each by itself, and why."""
    batching = card.batching
    if batching is None or batching.max_rows == 1:
        return f"no: {card.unbatched or 'registered before this was verified; register it again'}"
    axes = ", ".join(f"{name} {axis}" for name, axis in {**batching.inputs, **batching.outputs}.items())
    shared = [entry.name for entry in card.inputs if entry.name not in batching.inputs]
    equal = f"; only jobs with the same {', '.join(shared)}" if shared else ""
    return (
        f"up to {batching.max_rows} rows (axes: {axes}){equal}; "
        f"rows alone and together differ by {batching.max_error:.1g}, {batching.tolerance:.0e} is allowed"
    )


def _run_times(card: Card) -> str:
    times = ", ".join(f"{time.rows}: {time.seconds * 1e3:.3f} ms" for time in card.run_times)
    threads = f"; {card.intra_op_threads} threads within a run are clearly faster" if card.intra_op_threads else ""
    return f"by rows {times}{threads}" if times else "not measured"


def _tensor(entry: TensorEntry) -> str:
    if entry.shape is None:
        return f"{entry.name} {entry.datatype} of any rank"
    words = ("?" if dim is None else str(dim) for dim in entry.shape)
    dims = ",".join(word if len(word) <= 20 else f"{word[:17]}..." for word in words)
    return f"{entry.name} {entry.datatype}[{dims}]"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB" if nbytes >= 100 << 10 else f"{nbytes / (1 << 10):,.1f} KiB"


def _plain(text: str) -> Text:
    return Text(text)  # names of tensors may look like markup


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)  # into a file or a pipe: nothing is folded at 80


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _complain(line: str) -> None:
    sys.stderr.write(f"error: {line}\n")


def _or_fail(work: Callable[[], _T]) -> _T:
    try:
        return work()
    except QworkerError as exc:
        _fail(exc)


def _fail(error: QworkerError) -> NoReturn:
    _complain(str(error))
    raise typer.Exit(1)
