"""The private RabbitMQ node and ``qworker broker``: starts, keeps its data, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from qworker.broker.node import PrivateNode
from qworker.broker.reference.session import AioPikaConnector
from qworker.errors import BrokerUnavailable, ConfigError
from tests.support import leaks
from tests.support.broker import classic, fill, ready
from tests.support.waiting import wait_until_sync

_OWNER = """
import sys, threading, time
from pathlib import Path
from qworker.broker.node import PrivateNode
node = PrivateNode(Path(sys.argv[1]))
starter = threading.Thread(target=node.start)  # the node must survive the thread that started it
starter.start()
starter.join()
print(node.pid, flush=True)
time.sleep(600)
"""


_COMMAND = """
import typer
from qworker.cli.broker import register
app = typer.Typer()
register(app)
app.command("other")(lambda: None)
app()
"""


@contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "the process ended before it printed a line"
    return line


def _using(folder: Path) -> list[psutil.Process]:
    """Processes whose environment says that they belong to the node in ``folder``."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RABBITMQ_MNESIA_BASE") == f"{folder}/data" and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_a_node_does_not_outlive_its_owner(node: PrivateNode, tmp_path: Path) -> None:
    """SIGKILL of the process that owns a node ends the node and its port mapper, however it was started."""
    with _process("-c", _OWNER, str(tmp_path)) as owner:
        assert psutil.pid_exists(int(_first_line(owner)))
        assert len(_using(tmp_path)) >= 2
        owner.send_signal(signal.SIGKILL)
        wait_until_sync(lambda: not _using(tmp_path))


@pytest.mark.slow
def test_the_command_runs_until_told_to_stop(node: PrivateNode, tmp_path: Path) -> None:
    """``qworker broker`` prints its URL when ready, ends with 0 on SIGTERM, and leaves no process."""
    with _process("-c", _COMMAND, "broker", "--folder", str(tmp_path), "--port", "0") as command:
        assert _first_line(command).startswith("amqp://guest:guest@127.0.0.1:")
        command.terminate()
        assert command.wait(30) == 0
    assert not _using(tmp_path)


async def test_a_node_keeps_its_data(own_node: PrivateNode) -> None:
    """Stopped and started again it has the same address and the same durable messages."""
    url, pid = own_node.url, own_node.pid
    session = leaks.register_session(await AioPikaConnector(url).connect())
    await session.declare(classic("q"))
    await fill(session, "q", b"x")
    await session.__aexit__(None, None, None)
    own_node.stop()
    own_node.stop()
    assert not own_node.is_running
    own_node.start()
    own_node.start()
    assert own_node.url == url
    assert own_node.pid != pid
    async with await AioPikaConnector(url).connect() as again:
        assert await ready(again, "q") == 1


def test_a_node_listens_on_loopback_only(node: PrivateNode) -> None:
    """None of the node's ports is open to other machines."""
    process = psutil.Process(node.pid)
    listening = [link.laddr.ip for link in process.net_connections("tcp") if link.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) == {"127.0.0.1"}


def test_a_taken_port_is_named(node: PrivateNode, tmp_path: Path) -> None:
    """A port of another process is no start: that process would answer in the node's place."""
    with pytest.raises(BrokerUnavailable, match=rf"port {node.port} to be free"):
        PrivateNode(tmp_path, port=node.port).start()
    assert not _using(tmp_path)


def test_a_node_that_cannot_start_says_why(node: PrivateNode, tmp_path: Path) -> None:
    """A node that dies while it starts raises with what it said, and leaves no process."""
    with pytest.raises(BrokerUnavailable, match=r"ended with \d+ while it started"):
        PrivateNode(tmp_path, root=node.root, conf=["no_such_setting = 1"]).start()
    assert not _using(tmp_path)


def test_no_rabbitmq_in_the_root(tmp_path: Path) -> None:
    """A root without RabbitMQ is named before anything is started."""
    with pytest.raises(ConfigError, match=str(tmp_path / "empty")):
        PrivateNode(tmp_path / "node", root=tmp_path / "empty").start()


def test_not_started_yet(tmp_path: Path) -> None:
    """What needs a running node says so."""
    node = PrivateNode(tmp_path)
    assert not node.is_running
    node.stop()
    with pytest.raises(BrokerUnavailable, match="start"):
        _ = node.url
    assert os.listdir(tmp_path) == []
