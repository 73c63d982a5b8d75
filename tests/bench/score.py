"""``score``: files scored offline, against the same models in process; the client's memory; loads; and online calls."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from ops.models import lay_out
from qworker import Client
from qworker.score.readers import as_column
from qworker.store.local import LocalStore
from tests.bench.batch import LANES, in_process, one_row
from tests.bench.drive import run as run_loop
from tests.bench.figures import Table, rounds
from tests.bench.interfere import SECONDS as ONLINE_SECONDS
from tests.bench.interfere import steadily
from tests.bench.room import ROOT, Room
from tests.e2e.fleet import COMMAND
from tests.support.models import identity

LIGHT, HEAVY = "ppocr4-det", "light-resnet50"
"""Some 4 and 90 milliseconds a row, of 150 and 600 KB."""
SECONDS = 8.0
FLAT_ROWS = 1_000_000
SHUFFLED_MODELS, SHUFFLED_ROWS, ROOM_FOR = 10, 1000, 3


def run(chosen: argparse.Namespace) -> Table:
    """In each round: each model in process and by a file, and calls with and without a file beside them."""
    table = Table(f"score: rows a second of files, {LANES} engine threads")
    with Room() as room:
        for entry in lay_out(only=(LIGHT, HEAVY)):
            card = room.register(entry.model.id, entry.folder)
            best = 1 if card.batching is None else card.batching.max_rows
            table.notes.append(f"{entry.model.id}: registration found {best} rows a run to be the best.")
        room.register_identity(1)
        (worker,) = room.workers(threads=LANES)
        for number in rounds(chosen):
            for model in (LIGHT, HEAVY):
                rate = in_process(room, model, 0)
                table.add(f"{model}: in process, best batch", {"rate": rate})
                source = _file_of(room, model, max(50, int(rate * SECONDS)))
                _score(room, source, f"warm-{model}-{number}", model, "--limit", 1)
                found = _score(room, source, f"{model}-{number}", model)
                table.add(f"{model}: scored", {"rate": found["rows"] / found["seconds"], "jobs": _jobs(found)})
            run_loop(_with_and_without(room, table, number), uvloop=True)
        table.spread("rss_growth", [_rss_growth(room, table)])
        worker.terminate()
        worker.wait_exit()
        table.spread("loads_shuffled", [_loads(room)])
    for name, model in (("light", LIGHT), ("heavy", HEAVY)):
        base = f"{model}: in process, best batch"
        table.ratio(f"rows_over_inprocess_{name}", f"{model}: scored", base, "rate")
    table.ratio("online_p99_ratio", "calls beside a file", "calls alone", "p99_ms")
    return table


def _file_of(room: Room, model: str, rows: int) -> Path:
    """The first row of the model's sample, so many times."""
    path = room.folder / f"{model}-{rows}.parquet"
    store = LocalStore(room.store)
    card = store.card(model)
    axes = {} if card.batching is None else card.batching.axes().inputs
    cells: dict[str, Any] = {}
    for tensor in one_row(store, model):
        axis = axes.get(tensor.name, 0)
        cells[tensor.name] = np.moveaxis(tensor.array, axis, 0)[0]
    group = max(1, min(rows, (16 << 20) // sum(cell.nbytes for cell in cells.values())))
    columns = {name: as_column(np.stack([cell] * group)) for name, cell in cells.items()}
    table = pa.table(columns)
    with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, rows, group):
            writer.write_table(table.slice(0, min(group, rows - first)))
    return path


def _start(room: Room, source: Path, output: str, model: str | None, *more: object) -> subprocess.Popen[str]:
    command = [*COMMAND, "score", "--json", "-i", str(source), "-o", str(room.folder / f"{output}.parquet")]
    command += ["--store", str(room.store), "--broker", room.url, *(["-m", model] if model else []), *map(str, more)]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )


def _score(room: Room, source: Path, output: str, model: str | None, *more: object) -> dict[str, Any]:
    return _ended(_start(room, source, output, model, *more))


def _ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=600)
    if process.returncode:
        raise RuntimeError(f"qworker score failed: {out}")
    return json.loads(out)


def _jobs(found: dict[str, Any]) -> int:
    return sum(model["jobs"] for model in found["models"].values())


async def _with_and_without(room: Room, table: Table, number: int) -> None:
    rate = table.rounds[f"{LIGHT}: scored"][-1]["rate"]
    source = _file_of(room, LIGHT, int(rate * ONLINE_SECONDS * 1.6))
    async with Client(room.url) as client:
        await steadily(client, 1.0)
        table.add("calls alone", await steadily(client, ONLINE_SECONDS))
        process = _start(room, source, f"beside-{number}", LIGHT)
        time_to_begin = room.folder / f"beside-{number}.parquet.score" / "journal.jsonl"
        while not time_to_begin.exists() or '"flushed"' not in time_to_begin.read_text():
            await steadily(client, 0.2)
        table.add("calls beside a file", await steadily(client, ONLINE_SECONDS))
        still = process.poll() is None
        if still:
            process.terminate()
        process.communicate()
        if not still:
            table.notes.append("a file was finished before the calls beside it were")


def _rss_growth(room: Room, table: Table) -> float:
    """The client's largest memory in the second half of a million rows over that of the first half."""
    path = room.folder / "flat.onnx"
    path.write_bytes(identity(shape=("n", 8)))
    room.register("flat", path)
    source = room.folder / "flat.parquet"
    x = np.random.default_rng(1).standard_normal((10_000, 8)).astype(np.float32)
    chunk = pa.table({"x": as_column(x)})
    with pq.ParquetWriter(source, chunk.schema) as writer:
        for _ in range(FLAT_ROWS // len(chunk)):
            writer.write_table(chunk)
    process = _start(room, source, "flat-out", "flat", "--batch-rows", 1000)
    watched = psutil.Process(process.pid)
    journal = room.folder / "flat-out.parquet.score" / "journal.jsonl"
    seen: list[tuple[float, int]] = []
    while process.poll() is None:
        try:
            seen.append((journal.stat().st_size if journal.exists() else 0, watched.memory_info().rss))
        except (psutil.Error, FileNotFoundError):
            break
        time.sleep(0.05)
    found = _ended(process)
    busy = [(done, rss) for done, rss in seen if done]
    most = max(done for done, _ in busy)
    early = max(rss for done, rss in busy if done < most / 2)
    late = max(rss for _, rss in busy)
    table.add("1,000,000 rows of 32 bytes", {"rate": found["rows"] / found["seconds"], "rss_mib": late / (1 << 20)})
    return late / early


def _loads(room: Room) -> float:
    """Loads for rows of ten models in any order, where three fit."""
    names = [f"shuffled-{number}" for number in range(SHUFFLED_MODELS)]
    path = room.folder / "shuffled.onnx"
    path.write_bytes(identity(shape=("n", 8)))
    widest = max(room.register(name, path).resident_bytes for name in names)
    (worker,) = room.workers(memory=str(ROOM_FOR * widest + widest // 2), threads=LANES)
    column = names * SHUFFLED_ROWS
    random.Random(1).shuffle(column)
    x = np.zeros((len(column), 8), np.float32)
    source = room.folder / "shuffled.parquet"
    pq.write_table(pa.table({"model": column, "x": as_column(x)}), source)
    _score(room, source, "shuffled-out", None)
    return float(worker.state()["counters"]["loads"])


if __name__ == "__main__":
    sys.exit("run it by ops/bench score")
