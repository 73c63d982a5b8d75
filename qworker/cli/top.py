"""``qworker top``: the fleet live, in a terminal, over the broker alone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from qworker.api import connector_for
from qworker.cli.asking import AsJson, Broker, Config, print_json
from qworker.cli.call import fail
from qworker.cli.top_screen import Screen, render
from qworker.config import load_settings
from qworker.errors import BrokerUnavailable, QworkerError
from qworker.watch.feed import PATIENCE, Feed
from qworker.watch.orders import Desk

REDRAW = 0.5
ONCE_SNAPSHOTS = 3
"""Of each worker: the first is the answer to the roll call; rates need two that follow each other."""
ONCE_PATIENCE = PATIENCE + 4.0
ONCE_LOOK = 0.05


def register(app: typer.Typer) -> None:
    """Add ``top`` to the command line."""
    app.command("top")(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="Look for some seconds, print what is there, and end.")] = False,
    broker: Broker = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show workers, hot models with rates and quantiles, loads in progress, cold models with jobs, and evictions.

    Keys: arrows or j/k select a model, s sorts, / filters, p pins, u unpins, e evicts, l preloads, q quits.
    Nothing has to be installed or opened beside the broker; workers tell their state only while somebody watches.
    --json implies --once.
    """

    async def run() -> None:
        settings = load_settings({"broker": broker}, config)
        async with (
            await connector_for(settings, "qworker-top").connect() as session,
            Desk(session) as desk,
        ):
            feed = Feed(session, desk)
            async with asyncio.TaskGroup() as tasks:
                listening = tasks.create_task(feed.run())
                if once or as_json:
                    await _enough(feed)
                    _print(feed.view(), as_json)
                else:
                    await _live(feed, tasks)
                listening.cancel()

    try:
        asyncio.run(run())
    except* QworkerError as group:
        fail(_first(group), as_json)


async def _enough(feed: Feed) -> None:
    """Wait until each worker that is heard has told its state a few times, or for as long as one may take."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ONCE_PATIENCE
    while loop.time() < deadline:
        if feed.heard and min(feed.heard.values()) >= ONCE_SNAPSHOTS:
            return
        await asyncio.sleep(ONCE_LOOK)


def _print(view: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(view)
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(render(view, Screen(), height=200))


async def _live(feed: Feed, tasks: asyncio.TaskGroup) -> None:
    """Draw and obey keys until ``q``."""
    screen, done, console = Screen(), asyncio.Event(), Console()

    def on_key(key: str) -> None:
        action = screen.press(key, feed.view())
        if action == "quit":
            done.set()
        elif action is not None and screen.selected is not None:
            tasks.create_task(_order(feed, screen, action, *screen.selected))
        live.update(render(feed.view(), screen, height=console.height), refresh=True)

    with Live(console=console, screen=True, auto_refresh=False) as live, _keys(on_key):
        while not done.is_set():
            live.update(render(feed.view(), screen, height=console.height), refresh=True)
            try:
                async with asyncio.timeout(REDRAW):
                    await done.wait()
            except TimeoutError:
                continue


async def _order(feed: Feed, screen: Screen, verb: str, model: str, worker: str | None) -> None:
    screen.message = f"{verb} {model} ..."
    try:
        answers = await feed.order(verb, model, worker)
    except BrokerUnavailable:
        raise
    except QworkerError as error:
        screen.message = f"{verb} {model}: {error}"
        return
    done = ", ".join(sorted(answers.results()))
    screen.message = "; ".join([f"{verb} {model}: {done}"] * bool(done) + answers.complaints())


@contextmanager
def _keys(on_key: Any) -> Generator[None]:
    """Tell each key, as long as standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # here: only this needs a terminal of the kind that Unix has
    import tty

    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)

    def read() -> None:
        text = os.read(terminal, 64).decode(errors="ignore")
        if text.startswith("\x1b["):
            on_key(text[:3])
            return
        for key in text:
            on_key(key)

    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _first(group: BaseExceptionGroup[QworkerError]) -> QworkerError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, QworkerError)
    return error
