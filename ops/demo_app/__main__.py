"""The demo: ``ops/demo`` runs it. See ``ops/demo --help``."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ops.demo_app import bad, kept, report
from ops.demo_app.platform import DemoError, Platform
from ops.demo_app.traffic import Call, Traffic, plan
from ops.demo_app.watch import Watch
from ops.models import LaidOut, LayOutError, difference, lay_out
from qworker import BrokerUnavailable, CallTimeout, Client, QworkerError
from qworker.store.card import Card

IN_FLIGHT = 16
CALL_SECONDS = 120.0
BUDGET_SHARE = 0.25
LARGEST_FITS = 1.1
LOG_WIDTH = 120


class Demo:
    """One run, from nothing to the figures."""

    def __init__(self, options: argparse.Namespace, platform: Platform, console: Console) -> None:
        self._options = options
        self._platform = platform
        self._console = console
        self._answers = report.Answers()
        self._bad: list[bool] = []
        self._models: dict[str, LaidOut] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )

    async def run(self) -> report.Figures:
        started = time.monotonic()
        models = await asyncio.to_thread(lay_out, told=lambda line: self._console.print(f"Models: {line}"))
        self._models = {entry.model.id: entry for entry in models}
        with self._progress:
            await self._register(models)
            cards = self._platform.cards()
            memory = self._budget(cards)
            await self._platform.start_broker()
            await self._platform.start_workers(self._options.workers, memory)
            traffic = plan(sorted(cards), self._options.jobs)
            watch = Watch(self._platform.broker_url, self._platform.workers, sorted(cards))
            await self._call_all(traffic, watch)
        seen = await watch.last_look()
        logs = [worker.log for worker in self._platform.workers]
        nbytes = {model: card.resident_bytes for model, card in cards.items()}
        self._console.print(report.table(self._answers, report.loads_by_model(logs), nbytes, traffic.ranking))
        if seen.consumers_of_cold_models:
            self._console.print(f"Consumers of models that were not hot: {seen.consumers_of_cold_models}")
        hot, cold = self._answers.seconds(cold=False), self._answers.seconds(cold=True)
        return report.Figures(
            models=len(cards),
            jobs=self._options.jobs,
            answered=self._answers.count("right") + self._answers.count("wrong"),
            wrong=self._answers.count("wrong"),
            lost=self._answers.count("lost"),
            failed=self._answers.count("failed"),
            bad_inputs=len(self._bad),
            bad_inputs_answered=sum(self._bad),
            loads=seen.loads,
            evictions=seen.evictions,
            budget_bytes=seen.budget,
            peak_ledger_bytes=seen.peak_ledger,
            peak_rss_bytes=seen.peak_rss,
            hot_p50_ms=report.percentile_ms(hot, 50),
            hot_p99_ms=report.percentile_ms(hot, 99),
            cold_p50_ms=report.percentile_ms(cold, 50),
            cold_p99_ms=report.percentile_ms(cold, 99),
            max_consumers_of_cold_models=seen.max_consumers_of_cold_models,
            seconds=round(time.monotonic() - started, 2),
        )

    async def _register(self, models: Sequence[LaidOut]) -> None:
        row = self._progress.add_task("registering models", total=len(models))
        await self._platform.register(models, lambda: self._progress.advance(row))

    def _budget(self, cards: dict[str, Card]) -> int:
        sizes = [card.resident_bytes for card in cards.values()]
        largest_fits = kept.FITS if self._options.keep else LARGEST_FITS
        memory = self._options.memory or int(max(BUDGET_SHARE * sum(sizes), largest_fits * max(sizes)))
        self._console.print(
            f"{len(sizes)} models take {sum(sizes) / 2**20:.0f} MiB together, the largest {max(sizes) / 2**20:.0f}; "
            f"each of the {self._options.workers} workers may use {memory / 2**20:.0f} MiB."
        )
        return memory

    async def go_on(self) -> None:
        """Keep models pushing each other out, until cancelled."""
        cards = self._platform.cards()
        largest = self._models[max(cards, key=lambda model: cards[model].resident_bytes)]
        rivals = [largest, *kept.twins(largest)]
        for rival in rivals[1:]:
            await self._platform.register_as(rival)
        _tell_how_to_go_on(self._platform, largest.model.id, self._console)
        with self._console.status("") as status:
            async with Client(self._platform.broker_url) as client:
                await kept.go_on(
                    self._models,
                    cards,
                    rivals,
                    self._platform.workers,
                    lambda entry, k: self._call(client, entry, k, kept.CALL_SECONDS),
                    lambda line: status.update(f"{line}. Ctrl-C stops and removes everything"),
                )

    # --- traffic ---

    async def _call_all(self, traffic: Traffic, watch: Watch) -> None:
        row = self._progress.add_task("calling", total=self._options.jobs)
        async with (
            Client(self._platform.broker_url) as client,
            bad.RawCaller.open(self._platform.broker_url) as raw,
            asyncio.TaskGroup() as tasks,
        ):
            watching = tasks.create_task(watch.run())

            async def call(wanted: Call) -> None:
                self._answers.all.append(await self._call(client, self._models[wanted.model], wanted.k))
                self._progress.advance(row)

            async def stream(calls: Sequence[Call]) -> None:
                waiting = iter(calls)

                async def caller() -> None:
                    for wanted in waiting:
                        await call(wanted)

                async with asyncio.TaskGroup() as callers:
                    for _ in range(IN_FLIGHT):
                        callers.create_task(caller())

            misuse = tasks.create_task(self._misuse(client, raw))
            await stream(traffic.before)
            async with asyncio.TaskGroup() as rest:
                rest.create_task(stream(traffic.after))
                held = await watch.held()
                cold = next((m for m in reversed(traffic.ranking) if m not in held), traffic.ranking[-1])
                for k in range(traffic.burst):
                    rest.create_task(call(Call(cold, k)))
            await misuse
            watching.cancel()

    async def _call(self, client: Client, entry: LaidOut, k: int, seconds: float = CALL_SECONDS) -> report.Answer:
        model, cold = entry.model, False
        ending: report.Ending
        inputs = entry.inputs(k)
        started = time.perf_counter()
        try:
            result = await client.call(model.id, inputs, timeout=seconds)
        except (CallTimeout, BrokerUnavailable) as error:
            ending, wrong = "lost", str(error)
        except QworkerError as error:
            ending, wrong = "failed", f"{error.code}: {error}"
        else:
            wrong = difference(entry.outputs(k), result.arrays(), model.tolerance)
            ending = "wrong" if wrong else "right"
            cold = result.timing.get("load", 0.0) > 0
        if wrong:
            self._console.print(f"[red]{model.id}, input {k}, {ending}:[/red] {wrong}")
        return report.Answer(model.id, ending, time.perf_counter() - started, cold)

    async def _misuse(self, client: Client, raw: bad.RawCaller) -> None:
        for wrong in bad.bad_inputs():
            self._bad.append(await bad.answered_rightly(client, raw, wrong, self._console.print))


# --- command line -----------------------------------------------------------------------------------------


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(f"expected a size such as 512MiB, found {text!r}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ops/demo",
        description="Runs real models through a private RabbitMQ broker and workers whose memory budget holds only "
        "some of them, and checks every answer.",
    )
    parser.add_argument("--json", action="store_true", help="make the last line of the output one JSON object")
    parser.add_argument("--jobs", type=_count, default=2000, metavar="N", help="good calls (default: %(default)s)")
    parser.add_argument("--workers", type=_count, default=2, metavar="N", help="workers (default: %(default)s)")
    parser.add_argument("--memory", type=_size, metavar="SIZE", help="budget of a worker (default: a quarter of all)")
    parser.add_argument("--keep", action="store_true", help="go on afterwards, for you to look at, until Ctrl-C")
    return parser.parse_args()


async def _main(options: argparse.Namespace, console: Console) -> int:
    task = asyncio.current_task()
    assert task is not None
    # Both by hand: a shell starts what runs in its background with interrupts ignored. The first one ends
    # the demo, and everything is stopped and removed on the way out.
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    folder = Path(tempfile.mkdtemp(prefix="qworker-demo-"))
    platform = Platform(folder)
    try:
        demo = Demo(options, platform, console)
        figures = await demo.run()
        report.summary(figures, console)
        complaints = figures.complaints()
        _complain(complaints, console)
        if options.keep:
            await _until_interrupted(demo, task)
            console.print("Stopping ...")
    finally:
        ended_badly = platform.stop()
        shutil.rmtree(folder)
    _complain(ended_badly, console)
    if options.json:
        print(figures.line(), flush=True)
    return 1 if complaints or ended_badly else 0


async def _until_interrupted(demo: Demo, task: asyncio.Task[object]) -> None:
    """What was asked to be kept ends with the first interrupt, and well."""
    try:
        await demo.go_on()
    except asyncio.CancelledError:
        task.uncancel()


def _complain(complaints: Sequence[str], console: Console) -> None:
    for complaint in complaints:
        console.print(f"[red]Not as it should be:[/red] {complaint}")


def _tell_how_to_go_on(platform: Platform, rival: str, console: Console) -> None:
    names = " and ".join(worker.name for worker in platform.workers)
    last = platform.workers[-1].name
    console.print(
        f"""
It goes on: {rival} and {kept.MORE_RIVALS} more of its size are called in turn, and a worker holds one of them;
a few small models are called beside them. To look at it, in another terminal:

  export QWORKER_BROKER={platform.broker_url}
  .venv/bin/qworker top                          which models are loaded again and again
  .venv/bin/qworker dashboard                    the same, and more, on http://127.0.0.1:8686/
  .venv/bin/qworker models pin {rival:<18}unpin, preload, evict: qworker models --help
  .venv/bin/qworker why {rival}-2          why a model is hot or not
  .venv/bin/qworker workers drain {last:<15}then: workers resume {last}
  .venv/bin/qworker call onnx-words -i 'x=["monday", "may", "june", "july"]'

What to do about what you see: ops/runbook.md, Thrash, and docs/operating.md. Workers are {names};""",
        soft_wrap=True,
    )
    for worker in platform.workers:
        console.print(f"  {worker.name}: {worker.state_url}, log {worker.log}", soft_wrap=True)


def main() -> int:
    options = _options()
    console = Console(stderr=options.json, highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    try:
        return asyncio.run(_main(options, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("Interrupted: everything was stopped and removed.")
        return 130
    except (DemoError, LayOutError, ExceptionGroup) as error:
        known, others = _split(error)
        for each in known:
            console.print(f"[red]error:[/red] {each}", soft_wrap=True)
        if others is not None:
            raise others from None
        return 1


def _split(error: Exception) -> tuple[list[Exception], Exception | None]:
    """The errors that explain themselves, and the rest."""
    if not isinstance(error, ExceptionGroup):
        return [error], None
    known, others = error.split((DemoError, LayOutError))
    return ([] if known is None else _leaves(known)), others


def _leaves(group: ExceptionGroup[Exception]) -> list[Exception]:
    found: list[Exception] = []
    for each in group.exceptions:
        found += _leaves(each) if isinstance(each, ExceptionGroup) else [each]
    return found


if __name__ == "__main__":
    sys.exit(main())
