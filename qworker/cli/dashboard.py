"""``qworker dashboard``: the status page, over the broker alone."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from qworker.api import connector_for
from qworker.broker.base import Connector
from qworker.cli.asking import Broker, Config, complain, say
from qworker.cli.call import fail
from qworker.config import load_settings
from qworker.errors import BrokerUnavailable, ConfigError, QworkerError
from qworker.watch.feed import Feed
from qworker.watch.fleet import Fleet
from qworker.watch.orders import Answers, Desk
from qworker.watch.page import SHORTEST_TOKEN, StatusPage

PAUSE = 1.0


def register(app: typer.Typer) -> None:
    """Add ``dashboard`` to the command line."""
    app.command("dashboard")(dashboard)


def dashboard(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8686,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="QWORKER_DASHBOARD_TOKEN", help="Whoever opens the page with #token=... may give orders by it."
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The token, from a file.")] = None,
    broker: Broker = None,
    config: Config = None,
) -> None:
    """Serve the status page: workers, models, loads, evictions, memory over time. Read-only without a token.

    Shows what qworker top shows, over the broker alone. Who may give orders needs the broker permissions of an
    operator; who may open the page is for you to decide: it listens on this host only unless told otherwise.
    """
    try:
        secret = _token(token, token_file)
        settings = load_settings({"broker": broker}, config)
        asyncio.run(_serve(Source(connector_for(settings, "qworker-dashboard")), host, port, secret))
    except QworkerError as exc:
        fail(exc, as_json=False)
    except OSError as exc:
        fail(ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}; take another --port"), as_json=False)


class Source:
    """One feed after the other, as sessions with the broker come and go. Owner of ``_feed`` is ``run``."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._feed: Feed | None = None
        self._trouble = "connecting to the broker"

    async def run(self) -> None:
        """Until cancelled. Raises BrokerRefused where trying again is no use."""
        while True:
            try:
                async with await self._connector.connect() as session, Desk(session) as desk:
                    self._feed = Feed(session, desk)
                    await self._feed.run()
            except* BrokerUnavailable as lost:
                self._trouble = f"no connection to the broker: {lost.exceptions[0]}"
            self._feed = None
            await asyncio.sleep(PAUSE)

    def look(self) -> dict[str, Any]:
        if self._feed is None:
            return {"at": time.time(), **Fleet().view(0.0), "trouble": self._trouble}
        return {**self._feed.view(), "trouble": None}

    async def give(self, verb: str, model: str | None, worker: str | None) -> Answers:
        if self._feed is None:
            raise BrokerUnavailable(self._trouble)
        return await self._feed.order(verb, model, worker)


async def _serve(source: Source, host: str, port: int, token: str | None) -> None:
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    async with StatusPage(host, port, source.look, source.give, token=token) as page, asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(source.run())
        say(f"http://{host}:{page.port}/" + ("#token=..." if token else " (read only)"))
        if host not in ("127.0.0.1", "::1", "localhost"):
            complain(f"whoever reaches {host}:{page.port} sees the names of models and workers")
        await stopping.wait()
        listening.cancel()


def _token(token: str | None, token_file: Path | None) -> str | None:
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"cannot read the token from {token_file}: {exc}") from exc
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"a token has at least {SHORTEST_TOKEN} characters, this one has {len(token)}")
    return token or None
