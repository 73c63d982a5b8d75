"""Which peers there are, and how each one's worker is started."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / ".cache" / "peers"
PYTHON = FOLDER / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Peer:
    """``arguments`` start its worker, after the interpreter."""

    name: str
    imports: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def module(self) -> str:
        """Its client."""
        return f"tests.bench.peers.{self.name}_call"

    def worker(self, url: str) -> list[str]:
        return [str(PYTHON), "-W", "ignore", "-m", *(part.format(url=url) for part in self.arguments)]

    def environment(self, url: str) -> dict[str, str]:
        return {"BENCH_URL": url, "C_FORCE_ROOT": "1", "dramatiq_queue_prefetch": "128"}


_APPS = "tests.bench.peers"
_ONE = ("--pool", "solo", "--concurrency", "1", "--without-gossip", "--without-mingle", "--without-heartbeat")
PEERS = (
    Peer(
        "celery",
        ("celery", "msgpack"),
        ("celery", "-A", f"{_APPS}.celery_app", "worker", *_ONE, "--loglevel", "ERROR"),
    ),
    Peer("faststream", ("faststream.rabbit",), (f"{_APPS}.faststream_app",)),
    Peer(
        "taskiq",
        ("taskiq", "taskiq_aio_pika", "msgpack"),
        ("taskiq", "worker", f"{_APPS}.taskiq_app:broker", *("--workers", "1", "--max-async-tasks", "128")),
    ),
    Peer(
        "dramatiq",
        ("dramatiq.brokers.rabbitmq", "msgpack"),
        ("dramatiq", f"{_APPS}.dramatiq_app", *("--processes", "1", "--threads", "1", "--queues", "bench.dramatiq")),
    ),
)


def installed() -> list[Peer]:
    """The peers that the environment of ``ops/bench hot --peers`` has."""
    return [peer for peer in PEERS if PYTHON.exists() and _has(peer)]


def _has(peer: Peer) -> bool:
    imports = "; ".join(f"import {name}" for name in peer.imports)
    return subprocess.run([str(PYTHON), "-c", imports], check=False, capture_output=True).returncode == 0
