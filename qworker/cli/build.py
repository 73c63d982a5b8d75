"""``qworker build`` and ``qworker build-all``: TensorRT plans, ahead of time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar, cast

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from qworker.config import load_settings
from qworker.errors import QworkerError
from qworker.store.local import LocalStore
from qworker.telemetry.log import configure_logging

_T = TypeVar("_T")

LEFT: Final = 3
"""Exit code: converted and checked, but the plan itself has to be built on another machine."""
CANCELLED: Final = 130

Store = Annotated[str | None, typer.Option(help="Folder of the cold store [QWORKER_STORE]")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings [QWORKER_CONFIG]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LogLevel = Annotated[str, typer.Option(help="Of TensorRT's own words: debug, info, warning or error.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("build")(build_plan)
    app.command("build-all")(build_all)


def build_plan(
    path: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An .onnx file, or a folder with model.onnx.")],
    model_id: Annotated[
        str | None, typer.Option("--id", help="The model's id; made of the name when left out.")
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="The next number when left out.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, fp16 or int8.")] = "fp16",
    target: Annotated[
        str, typer.Option(help="trt: TensorRT, needs a GPU. rtx: TensorRT-RTX, builds on a CPU, plans for tests only.")
    ] = "trt",
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT=MIN,OPT,MAX",
            help="Shapes to build for, as in x=1x3x224x224,4x3x224x224,8x3x224x224. Give an input again for a "
            "second profile. A batch axis is found by itself.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="ROWS", help="Examples of the inputs: .npz, .parquet, or a folder of .npy or .npz."),
    ] = None,
    calibration_method: Annotated[str, typer.Option(help="percentile, entropy or minmax.")] = "percentile",
    int8_rest: Annotated[str, typer.Option(help="What INT8 leaves as it is: fp32 or fp16.")] = "fp32",
    max_top1_drop: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Fail when more top-1 answers change; 0.01 for INT8 when left out."),
    ] = None,
    sample: Annotated[Path | None, typer.Option(metavar="FILE.npz", help="Inputs to register the model with.")] = None,
    workspace: Annotated[str | None, typer.Option(metavar="SIZE", help="Most that the builder may take.")] = None,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="Runs on newer TensorRT too; brings host code, slower.")
    ] = False,
    hardware_compatible: Annotated[
        bool, typer.Option("--hardware-compatible", help="Runs on all GPUs from compute capability 8.0 on; slower.")
    ] = False,
    timing_cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Kept from build to build, makes the next one faster.")
    ] = None,
    level: Annotated[int, typer.Option(min=0, max=5, help="How hard the builder looks.")] = 3,
    tf32: Annotated[bool, typer.Option("--tf32/--no-tf32", help="FP32 products with 10 bits of mantissa.")] = True,
    device: Annotated[int, typer.Option(min=0, help="Number of the GPU.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Build also what is there already.")] = False,
    store: Store = None,
    config: Config = None,
    log_level: LogLevel = "warning",
    as_json: AsJson = False,
) -> None:
    """Build a TensorRT plan of an ONNX model, and put it into the store beside it.

    Registers the model first where it is not in the store. Exit codes: 0 the plan is in the store, 1 it
    failed, 2 wrong usage, 3 converted and checked but to be built on a machine with a GPU, 130 cancelled.
    """
    from qworker.build.plan import PlanRequest, build  # here: it imports onnx, which takes a while
    from qworker.build.plan_convert import PRECISIONS, Recipe
    from qworker.build.tensorrt_build import BuilderOptions, Cancelled

    request = PlanRequest(
        path=path,
        model=model_id,
        version=version,
        target=_one_of("--target", target, ("trt", "rtx")),
        recipe=Recipe(
            _one_of("--precision", precision, PRECISIONS),
            _one_of("--calibration-method", calibration_method, ("entropy", "percentile", "minmax")),
            _one_of("--int8-rest", int8_rest, ("fp32", "fp16")),
        ),
        profiles=tuple(profile or ()),
        calibration=calibration,
        sample=sample,
        max_top1_drop=max_top1_drop,
        builder=BuilderOptions(
            workspace=None if workspace is None else _size(workspace),
            version_compatible=version_compatible,
            hardware_compatible=hardware_compatible,
            timing_cache=timing_cache,
            level=level,
            tf32=tf32,
        ),
        device=device,
        again=again,
    )
    configure_logging(log_level, "auto")
    local = _store(store, config)
    try:
        with _Shown.open() as teller:
            outcome = build(local, request, teller)
    except QworkerError as exc:
        _fail(exc)
    except (KeyboardInterrupt, Cancelled):
        _say("cancelled: no plan was made")
        raise typer.Exit(CANCELLED) from None
    if as_json:
        card = None if outcome.card is None else outcome.card.model_dump(mode="json")
        _print_json({"model": outcome.model, "version": outcome.version, "card": card, "left": outcome.left})
    elif outcome.card is not None:
        _print_card(outcome.card)
    if outcome.left is not None:
        _say(outcome.left)
        raise typer.Exit(LEFT)


def build_all(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that the models lie below.")],
    matrix: Annotated[Path, typer.Option(metavar="matrix.toml", help="What to build of them; see docs/build.md.")],
    store: Store = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Build every model of a folder in every precision of a matrix. Run it again to go on where it stopped.

    One failure stops nothing else. Exit codes: 0 all are built, 1 some failed, 2 wrong usage, 3 none
    failed and some are to be built on a machine with a GPU, 130 cancelled.
    """
    from qworker.build.build_all import Built, read_matrix, run_all, run_child

    local = _store(store, config)
    requests = _or_fail(lambda: read_matrix(folder, matrix))
    table: list[Built] = []

    def told(number: int, built: Built) -> None:
        table.append(built)
        _say(f"[{number}/{len(requests)}] {built.model} {built.precision}: {built.state}, {built.words}")

    cancelled = False
    try:
        run_all(requests, lambda request: run_child(local.root, request), told)
    except KeyboardInterrupt:
        cancelled = True
        _say(f"cancelled after {len(table)} of {len(requests)} builds: run it again to go on")
    if as_json:
        names = ("model", "version", "precision", "state", "words", "seconds", "top1")
        _print_json([{name: getattr(built, name) for name in names} for built in table])
    else:
        _print_table(table)
    states = {built.state for built in table}
    raise typer.Exit(CANCELLED if cancelled else 1 if "failed" in states else LEFT if "left" in states else 0)


# --- progress -----------------------------------------------------------------------------------


class _Shown:
    """Progress on a terminal: our own stages, and the builder's phases below each other; lines elsewhere."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stages: dict[str, TaskID] = {}
        self._phases: dict[str, TaskID] = {}
        self._depth: dict[str, int] = {}

    @classmethod
    @contextmanager
    def open(cls) -> Generator[_Shown]:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        with progress:
            yield cls(progress)

    def say(self, line: str) -> None:
        if self._progress.disable:
            _say(line)
        else:
            self._progress.console.print(Text(line))

    def stage(self, name: str, done: int, total: int) -> None:
        if name not in self._stages:
            self._stages[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._stages[name], completed=done, total=total)
        if done >= total:
            self._progress.remove_task(self._stages.pop(name))

    @property
    def watch(self) -> _Shown:
        return self

    # Called from the builder's threads; a Progress has a lock of its own.

    def phase(self, name: str, parent: str | None, steps: int) -> None:
        self._depth[name] = 0 if parent is None else self._depth.get(parent, 0) + 1
        self._phases[name] = self._progress.add_task("  " * self._depth[name] + name, total=steps)

    def step(self, name: str, step: int) -> None:
        if name in self._phases:
            self._progress.update(self._phases[name], completed=step + 1)

    def finished(self, name: str) -> None:
        if name in self._phases:
            self._progress.remove_task(self._phases.pop(name))


# --- inside -------------------------------------------------------------------------------------


def _print_card(card: Any) -> None:
    plan = card.plan
    table = Table(show_header=False, box=None)
    rows: list[tuple[str, str]] = [
        ("plan", card.files[0].name),
        ("model", f"{card.model}, version {card.version}"),
        ("built with", f"{card.runtime}, {plan.build_seconds:.1f} s" + (f", on {plan.device}" if plan.device else "")),
        ("size", f"{card.files[0].nbytes / (1 << 20):,.1f} MiB, sha256 {card.digest[:16]}"),
    ]
    for number, profile in enumerate(plan.profiles):
        shapes = "; ".join(
            f"{name} " + ", ".join("x".join(map(str, shape)) for shape in (each.min, each.opt, each.max))
            for name, each in profile.items()
        )
        rows.append((f"profile {number}", shapes))
    rows += [
        (f"ms, profile {time.profile}", f"{time.ms:.3f} at {'its best' if time.at == 'opt' else 'the largest'} shapes")
        for time in plan.batch_ms
    ]
    if not plan.measured:
        rows.append(("note", "built without a device: sizes are estimates, and no TensorRT worker loads it"))
    for name, value in rows:
        table.add_row(f"[bold]{name}[/bold]", Text(value))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _print_table(builds: Sequence[Any]) -> None:
    table = Table()
    for name in ("model", "version", "precision", "state", "top-1", "seconds", "plan, or reason"):
        table.add_column(name, overflow="fold")
    for built in builds:
        top1 = "" if built.top1 is None else f"{built.top1:.2%}"
        cells = (
            built.model,
            built.version or "",
            built.precision,
            built.state,
            top1,
            f"{built.seconds:.1f}",
            built.words,
        )
        table.add_row(*(Text(cell) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _store(store: str | None, config: Path | None) -> LocalStore:
    return LocalStore(_or_fail(lambda: load_settings({"store": store}, config)).store)


def _one_of(option: str, value: str, choices: Sequence[_T]) -> _T:
    if value not in choices:
        raise typer.BadParameter(f"{option} is one of {', '.join(map(str, choices))}, not {value!r}")
    return cast("_T", value)


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"--workspace is a size like 4GiB, not {text!r}") from None


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _or_fail(work: Callable[[], _T]) -> _T:
    try:
        return work()
    except QworkerError as exc:
        _fail(exc)


def _fail(error: QworkerError) -> NoReturn:
    sys.stderr.write(f"error: {error}\n")
    raise typer.Exit(1)
