"""``qworker call``, ``publish`` and ``cancel``: one job from a shell."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from qworker.api import client_for
from qworker.cli.inputs import Asked, read_asked, save_npz
from qworker.config import load_settings
from qworker.errors import ConfigError, InvalidInput, QworkerError
from qworker.wire.codec import encode_result
from qworker.wire.messages import JSON, Result, Tensor
from qworker.wire.progress import Progress

_T = TypeVar("_T")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's id.")]
Literals = Annotated[
    list[str] | None,
    typer.Option(
        "-i",
        "--input",
        metavar="NAME[:DATATYPE]=VALUE",
        help="One input, as JSON or @FILE.npy: x=[[1,2]], x:FP16=0.5, x=@x.npy. "
        "Without a datatype, whole numbers are INT64 and others FP32.",
    ),
]
Npz = Annotated[Path | None, typer.Option("--inputs", metavar="FILE.npz", help="Inputs by their names.")]
Body = Annotated[
    str | None,
    typer.Option(
        "--from-json", metavar="FILE|-", help="An Open Inference body or {NAME: nested lists}; - is standard input."
    ),
]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="OUTPUT", help="Return this output only (repeat).")]
Version = Annotated[str | None, typer.Option("--version", help="The model's version; the newest when left out.")]
Parameters = Annotated[
    list[str] | None, typer.Option("--parameter", "-p", metavar="NAME=JSON", help="A parameter of the job (repeat).")
]
Priority = Annotated[int | None, typer.Option(min=0, max=9, help="Served earlier when larger.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds to wait.")]
Broker = Annotated[str | None, typer.Option(help="amqp(s)://user:password@host:port/vhost [QWORKER_BROKER]")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings [QWORKER_CONFIG]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add ``call``, ``publish`` and ``cancel`` to the command line."""
    app.command("call")(call)
    app.command("publish")(publish)
    app.command("cancel")(cancel)


def call(
    model: Model,
    literals: Literals = None,
    npz: Npz = None,
    body: Body = None,
    only: Only = None,
    version: Version = None,
    parameters: Parameters = None,
    priority: Priority = None,
    timeout: Timeout = 30.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Save the outputs.")] = None,
    progress: Annotated[bool, typer.Option("--progress", help="Show on standard error what it waits for.")] = False,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Run a model once and print its outputs.

    Exit codes: 0 a result, 1 a failure (printed with its code), 2 wrong usage.
    """
    asked = _asked(model, literals, npz, body, only, version, parameters)

    async def run() -> Result:
        async with client_for(load_settings({"broker": broker}, config)) as client:
            with _live(model) if progress else nullcontext(False) as tell:
                return await client.call(
                    model,
                    asked.inputs,
                    timeout=timeout,
                    version=asked.version,
                    outputs=asked.outputs,
                    parameters=asked.parameters,
                    priority=priority,
                    progress=tell,
                )

    result = _finish(run(), as_json)
    if output is not None:
        save_npz(output, result.outputs)
    if as_json:
        sys.stdout.write(_json_of(result) + "\n")
    else:
        _show(result)


@contextmanager
def _live(model: str) -> Generator[Callable[[Progress], None]]:
    """One line that changes on a terminal; elsewhere a line for each change."""
    console = Console(stderr=True, highlight=False, markup=False)
    if console.is_terminal:
        with console.status(f"{model}: published") as status:
            yield lambda progress: status.update(f"{model}: {progress}")
        return
    last = ""

    def tell(progress: Progress) -> None:
        nonlocal last
        if (line := f"{model}: {progress}") != last:
            last = line
            sys.stderr.write(f"{line}\n")

    yield tell


def publish(
    model: Model,
    literals: Literals = None,
    npz: Npz = None,
    body: Body = None,
    only: Only = None,
    version: Version = None,
    parameters: Parameters = None,
    priority: Priority = None,
    timeout: Timeout = 30.0,
    reply_to: Annotated[str | None, typer.Option(help="The queue for the result; qworker.results without.")] = None,
    correlation_id: Annotated[
        str | None, typer.Option(help="Comes back with the result; the job's id without.")
    ] = None,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Publish a job, do not wait for its result, and print the job's id."""
    asked = _asked(model, literals, npz, body, only, version, parameters)

    async def run() -> str:
        async with client_for(load_settings({"broker": broker}, config)) as client:
            return await client.publish(
                model,
                asked.inputs,
                reply_to=reply_to,
                correlation_id=correlation_id,
                timeout=timeout,
                version=asked.version,
                outputs=asked.outputs,
                parameters=asked.parameters,
                priority=priority,
            )

    job_id = _finish(run(), as_json)
    sys.stdout.write((json.dumps({"id": job_id}) if as_json else job_id) + "\n")


def cancel(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB_ID...", help="Ids of jobs, as publish prints them.")],
    model: Annotated[str | None, typer.Option(help="The model, where all of them are of one.")] = None,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Tell the workers not to run these jobs.

    A job that has not begun ends with the failure `cancelled`, one in its queue when it is its turn; one that runs
    goes on.
    """

    async def run() -> None:
        async with client_for(load_settings({"broker": broker}, config)) as client:
            for job_id in job_ids:
                await client.cancel(job_id, model=model)

    _finish(run(), as_json)
    told = f"told the workers to cancel {len(job_ids)} job{'s' if len(job_ids) > 1 else ''}"
    sys.stdout.write((json.dumps({"cancelled": job_ids}) if as_json else told) + "\n")


def _asked(
    model: str,
    literals: Sequence[str] | None,
    npz: Path | None,
    body: str | None,
    only: Sequence[str] | None,
    version: str | None,
    parameters: Sequence[str] | None,
) -> Asked:
    """What all options together ask for; an option wins over the same thing in a JSON body."""
    asked = read_asked(model, literals or (), npz, body)
    named: dict[str, Any] = {}
    for text in parameters or ():
        name, equals, value = text.partition("=")
        try:
            named[name] = json.loads(value)
        except ValueError as exc:
            raise typer.BadParameter(f"expected --parameter NAME=JSON; found {text[:80]!r}") from exc
        if not equals or not name:
            raise typer.BadParameter(f"expected --parameter NAME=JSON; found {text[:80]!r}")
    return Asked(
        asked.inputs, version or asked.version, tuple(only or ()) or asked.outputs, {**asked.parameters, **named}
    )


def _finish(work: Coroutine[Any, Any, _T], as_json: bool) -> _T:
    try:
        return asyncio.run(work)
    except QworkerError as exc:
        fail(exc, as_json)


def fail(error: QworkerError, as_json: bool) -> NoReturn:
    """Print the error, for a person or for a program, and end: code 2 for a wrong setting, else 1."""
    if as_json:
        told = {"error": {"code": error.code, "message": str(error), "retryable": error.retryable}}
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stderr.write(f"{error.code}: {error}\n")
    raise typer.Exit(2 if isinstance(error, ConfigError) else 1)


def _json_of(result: Result) -> str:
    try:
        return encode_result(result, JSON).decode()
    except InvalidInput as exc:  # BF16, or bytes that are no text
        fail(exc, as_json=True)


def _show(result: Result) -> None:
    table = Table(title=f"{result.model} {result.version}", title_justify="left")
    for heading in ("output", "datatype", "shape", "values"):
        table.add_column(heading, overflow="fold")
    for output in result.outputs:
        shape = "x".join(map(str, output.array.shape)) or "scalar"
        table.add_row(output.name, output.datatype, shape, _values(output))
    console = Console(highlight=False, markup=False)
    console.print(table)
    if result.timing:
        console.print("  ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in result.timing.items()))


def _values(output: Tensor) -> str:
    return np.array2string(output.array, threshold=24, edgeitems=3, precision=6, max_line_width=72)
