"""``fleet``: calls a second and CPU per call with more workers, over several hot models."""

from __future__ import annotations

import argparse

from tests.bench.figures import Table, rounds
from tests.bench.room import Room

SIZES = (1, 2, 4)
CALLS = 12000


def run(chosen: argparse.Namespace) -> Table:
    """Fresh workers each time; four models, so that each worker can have one; 64 calls in flight over them all."""
    table = Table("fleet: 1 KB echo over four models, 64 calls in flight, on one machine")
    with Room() as room:
        for number in range(4):
            room.register_identity(1, f"fleet-{number}")
        for _ in rounds(chosen):
            for count in SIZES:
                # Each worker has room for what it must have, so that the models spread.
                workers = room.workers(count, max_concurrent_loads=1)
                found = room.client(
                    "tests.bench.product_call",
                    [worker.process.pid for worker in workers],
                    kilobytes=1,
                    window=64,
                    count=CALLS,
                    uvloop=True,
                    models=",".join(f"fleet-{number}" for number in range(4)),
                )
                found["busy_workers"] = float(
                    sum(worker.state()["counters"]["jobs_answered"] > 0 for worker in workers)
                )
                table.add(f"{count} workers", found)
                for worker in workers:
                    worker.terminate()
                    worker.wait_exit()
    for count in SIZES[1:]:
        table.ratio(f"rate_{count}_workers", f"{count} workers", "1 workers", "rate")
        table.ratio(f"worker_cpu_{count}_workers", f"{count} workers", "1 workers", "worker_us")
    return table
