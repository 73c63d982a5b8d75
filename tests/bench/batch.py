"""``batch``: rows a second of a real model when served, against the same model in process at its best batch."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ops.models import lay_out
from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend
from qworker.engine.warmup import read_sample, sample_tensors
from qworker.store.card import Card
from qworker.store.local import LocalStore
from qworker.wire.messages import Tensor
from tests.bench.figures import Table, rounds
from tests.bench.room import ROOT, Room

MODELS = ("ppocr4-det", "ppocr4-rec", "magika")
"""Those whose row takes milliseconds: a worker is there for them."""
LIGHT = ("ppocr2-cls",)
"""A row of 110 KB that takes a millisecond: on the broker's own cores its messages take longer than its runs."""
ALONE = "-alone"
"""Ends the id of the same model without batching."""
LANES = 2
SECONDS = 4.0


def run(chosen: argparse.Namespace) -> Table:
    """In each round: one row a run in process, the best batch in process, and rows of many callers served."""
    table = Table(f"batch: rows a second, {LANES} engine threads, 128 callers of one row each")
    with Room() as room:
        models: list[str] = []
        gains: list[str] = []
        for entry in lay_out(only=(*MODELS, *LIGHT)):
            card = room.register(entry.model.id, entry.folder)
            models.append(entry.model.id)
            best = 1 if card.batching is None else card.batching.max_rows
            table.notes.append(f"{entry.model.id}: registration found {best} rows a run to be the best.")
            if best > 1:
                _publish_alone(LocalStore(room.store), card)
                gains.append(entry.model.id)
        (worker,) = room.workers(threads=LANES)
        for _ in rounds(chosen):
            for model in models:
                for row, batch in (("one row a run, in process", 1), ("best batch, in process", 0)):
                    table.add(f"{model}: {row}", {"rate": in_process(room, model, batch)})
                rate = table.rounds[f"{model}: best batch, in process"][-1]["rate"]
                for served in (model, *([model + ALONE] if model in gains else [])):
                    found = room.client(
                        "tests.bench.sample_call",
                        [worker.process.pid],
                        environment={"BENCH_STORE": str(room.store), "BENCH_MODEL": served},
                        window=128,
                        count=max(256, int(rate * SECONDS)),
                        uvloop=True,
                    )
                    table.add(f"{served}: served", found)
    for model in models:
        table.ratio(f"served_over_inprocess_{model}", f"{model}: served", f"{model}: best batch, in process", "rate")
        one, best = f"{model}: one row a run, in process", f"{model}: best batch, in process"
        table.ratio(f"inprocess_gain_{model}", best, one, "rate")
        if model in gains:
            table.spread(f"served_gain_over_inprocess_{model}", _gains(table, model))
    return table


def _gains(table: Table, model: str) -> list[float]:
    """What batching gains when served, over what it gains in process, round by round."""

    def rates(row: str) -> list[float]:
        return [found["rate"] for found in table.rounds[row]]

    served = zip(rates(f"{model}: served"), rates(f"{model}{ALONE}: served"), strict=True)
    inside = zip(rates(f"{model}: best batch, in process"), rates(f"{model}: one row a run, in process"), strict=True)
    return [(a / b) / (c / d) for (a, b), (c, d) in zip(served, inside, strict=True)]


def _publish_alone(store: LocalStore, card: Card) -> None:
    """The same model once more, whose jobs run one by one."""
    folder = store.version_folder(card.model, card.version)
    with store.stage() as staging:
        for entry in card.files:
            staging.add(entry.name, folder / entry.name)
        alone = {"model": card.model + ALONE, "batching": None, "unbatched": "for comparison"}
        staging.publish(card.model_copy(update=alone))


def in_process(room: Room, model: str, batch: int) -> float:
    """Rows a second in a process of its own: see ``_rate``."""
    command = [sys.executable, "-m", "tests.bench.batch", str(room.store), model, str(batch)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def one_row(store: LocalStore, model: str) -> list[Tensor]:
    """A row that suits the model: the first one of its sample."""
    card = store.card(model)
    fetched = store.fetch(card)
    assert fetched.sample is not None, f"{model} has no sample"
    axes = {} if card.batching is None else card.batching.axes().inputs
    found: list[Tensor] = []
    for tensor in sample_tensors(card.signature(), read_sample(fetched.sample)):
        axis = axes.get(tensor.name)
        array = tensor.array if axis is None else np.ascontiguousarray(np.take(tensor.array, [0], axis))
        found.append(Tensor(tensor.name, tensor.datatype, array))
    return found


def _rate(store: LocalStore, model: str, batch: int) -> float:
    """Rows a second of ``batch`` rows a run (0: what the card says is worth it), on as many threads as a worker has."""
    card = store.card(model)
    axes = {} if card.batching is None else card.batching.axes().inputs
    batch = batch or (1 if card.batching is None else card.batching.max_rows)
    fetched = store.fetch(card)
    engine = OnnxBackend().load(ModelSource(model, card.version, fetched.path, fetched.content, card.intra_op_threads))
    rows = [
        Tensor(t.name, t.datatype, t.array if axes.get(t.name) is None else t.array.repeat(batch, axes[t.name]))
        for t in one_row(store, model)
    ]
    engine.run(rows)
    until = time.perf_counter() + SECONDS

    def lane(_: int) -> int:
        done = 0
        while time.perf_counter() < until:
            engine.run(rows)
            done += batch
        return done

    started = time.perf_counter()
    with ThreadPoolExecutor(LANES) as lanes:
        total = sum(lanes.map(lane, range(LANES)))
    return total / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_rate(LocalStore(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
