"""``hot``: an echo by the whole product, against the same echo on plain aio-pika and on other libraries."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from tests.bench.figures import Table, rounds
from tests.bench.peers.table import PYTHON, Peer, installed
from tests.bench.room import Room

SIZES = {"1k": 1, "64k": 64, "600k": 600}
WINDOWS = (1, 64, 512)


@dataclass(frozen=True, slots=True)
class Case:
    size: str
    window: int

    def __str__(self) -> str:
        return f"{self.size} window {self.window}"

    @property
    def kilobytes(self) -> int:
        return SIZES[self.size]

    def count(self, calls: int, share: int = 1) -> int:
        """Calls that take about as long in each case; a ``share``-th of them for who is slower."""
        cost = {"1k": 1, "64k": 3, "600k": 24}[self.size] * (5 if self.window == 1 else 1)
        return max(self.window, 150, calls // cost // share)


HEADLINE, ALONE, LARGE = Case("1k", 64), Case("1k", 1), Case("600k", 64)


def run(chosen: argparse.Namespace) -> Table:
    """Throughput and worker CPU at 1 KB and window 64, p50 with one call in flight, worker CPU at 600 KB."""
    cases = [Case(size, window) for size in chosen.sizes for window in chosen.windows]
    loop = "asyncio" if chosen.no_uvloop else "auto"
    table = Table(f"hot: echo RPC on a quorum queue, one worker process, event loop {loop}")
    with Room() as room:
        for size in chosen.sizes:
            room.register_identity(SIZES[size])
        (worker,) = room.workers(event_loop=loop)
        ours = [worker.process.pid]
        raw = [room.spawn([sys.executable, "-m", "tests.bench.raw_echo", "--serve", "--url", room.url], ready="ready")]
        peers = [
            (peer, room.spawn(peer.worker(room.url), environment=peer.environment(room.url)))
            for peer in (installed() if chosen.peers else [])
        ]
        for _ in rounds(chosen):
            for case in cases:
                table.add(
                    f"raw aio-pika, {case}",
                    room.client(
                        "tests.bench.raw_echo",
                        raw,
                        kilobytes=case.kilobytes,
                        window=case.window,
                        count=case.count(chosen.calls, 4),
                    ),
                )
                table.add(
                    f"qworker, {case}",
                    room.client(
                        "tests.bench.product_call",
                        ours,
                        kilobytes=case.kilobytes,
                        window=case.window,
                        count=case.count(chosen.calls),
                        uvloop=loop == "auto",
                    ),
                )
            for peer, pid in peers:
                table.add(f"{peer.name}, {HEADLINE}", _of_peer(room, peer, pid, chosen))
    _ratios(table, cases, [peer for peer, _ in peers])
    return table


def _of_peer(room: Room, peer: Peer, pid: int, chosen: argparse.Namespace) -> dict[str, float]:
    return room.client(
        peer.module,
        [pid],
        python=str(PYTHON),
        environment=peer.environment(room.url),
        kilobytes=HEADLINE.kilobytes,
        window=HEADLINE.window,
        count=HEADLINE.count(chosen.calls, 4),
    )


def _ratios(table: Table, cases: list[Case], peers: list[Peer]) -> None:
    def against_raw(name: str, case: Case, figure: str) -> None:
        if case in cases:
            table.ratio(name, f"qworker, {case}", f"raw aio-pika, {case}", figure)

    against_raw("throughput_ratio", HEADLINE, "rate")
    against_raw("worker_cpu_ratio", HEADLINE, "worker_us")
    against_raw("p50_ratio_window1", ALONE, "p50_ms")
    against_raw("cpu_ratio_600k", LARGE, "worker_us")
    for peer in peers:
        table.ratio(f"vs_{peer.name}", f"qworker, {HEADLINE}", f"{peer.name}, {HEADLINE}", "rate")
