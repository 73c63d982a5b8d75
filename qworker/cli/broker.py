"""``qworker broker``: a private RabbitMQ node for development, in the foreground."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from qworker.broker.node import PrivateNode
from qworker.errors import BrokerUnavailable, QworkerError

_LOOK_SECONDS = 0.5


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("broker")(broker)


def broker(
    folder: Annotated[Path, typer.Option(help="Where the node keeps all of its files; queues survive a restart.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 5672,
    root: Annotated[
        Path | None,
        typer.Option(help="A laid out Debian whose RabbitMQ to run instead of this machine's (needs root)."),
    ] = None,
) -> None:
    """Run a private RabbitMQ node on loopback until interrupted; prints its URL when it is ready."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both signals end it in the same way
    node = PrivateNode(folder, port=port or None, root=root)
    try:
        node.start()
        print(node.url, flush=True)
        while node.is_running:
            time.sleep(_LOOK_SECONDS)
        raise BrokerUnavailable(f"the node ended by itself: see {node.log}")
    except KeyboardInterrupt:
        typer.echo("stopping", err=True)
    except QworkerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        node.stop()
