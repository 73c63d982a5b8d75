"""Batching through a real worker and a real broker, and on every real model that is batched."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ops.models import LayOutError, lay_out, table
from qworker import Client
from qworker.api import connector_for
from qworker.build.together import look
from qworker.build.verify import largest_error
from qworker.config import Settings
from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend
from qworker.engine.warmup import sample_tensors
from qworker.errors import DeadlineExceeded, InferenceFailed, InvalidInput
from qworker.store.card import BatchingEntry, Card, RunTime, TensorEntry
from qworker.store.local import LocalStore
from qworker.telemetry.counters import Counters
from qworker.wire.messages import Job
from qworker.worker.batcher import Batcher
from qworker.worker.worker import Worker
from tests.support.leaks import register_ledger
from tests.support.models import model, value
from tests.support.waiting import wait_until

IDS = 5000
LOOKUP = "lookup"


def lookup() -> bytes:
    """Looks ids up in a table, which is an exact answer that tells whose it is; an id beyond it fails the run."""
    rows = np.stack([np.arange(IDS), np.arange(IDS) ** 2 % 997], axis=1).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["found"]),
        helper.make_node("Mul", ["found", "factor"], ["y"]),
        helper.make_node("Transpose", ["found"], ["columns"], perm=[2, 0, 1]),
    ]
    inputs = [value("ids", TensorProto.INT64, ("n", "length")), value("factor", TensorProto.FLOAT, ())]
    outputs = [
        value("y", TensorProto.FLOAT, ("n", "length", 2)),
        value("columns", TensorProto.FLOAT, (2, "n", "length")),
    ]
    return model(nodes, inputs, outputs, [numpy_helper.from_array(rows, "table")])


def put(root: Path, batching: BatchingEntry | None) -> None:
    """A store with the model and a card that says that a run costs a lot, and a row nothing."""
    root.mkdir(parents=True)
    with LocalStore(root).stage() as staging:
        (staging.folder / "model.onnx").write_bytes(lookup())
        staging.publish(
            Card(
                model=LOOKUP,
                version="1",
                backend="onnx",
                files=(staging.adopt("model.onnx"),),
                inputs=(
                    TensorEntry(name="ids", datatype="INT64", shape=("n", "length")),
                    TensorEntry(name="factor", datatype="FP32", shape=()),
                ),
                outputs=(
                    TensorEntry(name="y", datatype="FP32", shape=("n", "length", 2)),
                    TensorEntry(name="columns", datatype="FP32", shape=(2, "n", "length")),
                ),
                resident_bytes=1 << 20,
                load_seconds=0.1,
                warmed=True,
                runtime="a test",
                created=datetime.now(UTC),
                batching=batching,
                run_times=(RunTime(rows=1, seconds=0.001), RunTime(rows=8, seconds=0.0011)),
            ),
            choose_version=False,
        )


@asynccontextmanager
async def serving(url: str, store: Path) -> AsyncIterator[Worker]:
    """A worker in this process, stopped at the end."""
    settings = Settings(store=str(store), broker=url, memory=256 << 20, name="batching", min_residency=0.0)  # pyright: ignore[reportArgumentType]
    worker = Worker(settings, connector_for(settings, settings.name), LocalStore(store), OnnxBackend())
    register_ledger(lambda: worker.zone.held)
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        await wait_until(lambda: worker.not_ready() is None)
        yield worker
        worker.stop()


VERIFIED = BatchingEntry(inputs={"ids": 0}, outputs={"y": 0, "columns": 1}, max_rows=8, tolerance=0.0, max_error=0.0)


@pytest.mark.parametrize(
    "batching", [VERIFIED, None, VERIFIED.model_copy(update={"max_rows": 1})], ids=["8", "no", "1"]
)
async def test_every_caller_gets_its_own_answer(amqp_url: str, tmp_path: Path, batching: BatchingEntry | None) -> None:
    """Shapes, sizes, parameters, outputs, bad rows and deadlines, mixed; the counters add up."""
    put(tmp_path / "store", batching)
    rng = random.Random(7)
    ids = iter(range(IDS))
    sent = {"good": 0, "bad": 0, "late": 0}

    async def one(client: Client) -> None:
        kind = rng.choices(["good", "bad", "late"], [90, 5, 5])[0]
        length = rng.choice([1, 1, 2])
        rows = np.array([[next(ids)] * length for _ in range(rng.choice([1, 1, 1, 3, 20]))], np.int64)
        if kind == "bad":
            rows[rng.randrange(len(rows))] = IDS
        factor = np.float32(rng.choice([1.0, 1.0, 2.0]))
        outputs = rng.choice([(), (), ("columns",)])
        sent[kind] += 1
        call = client.call(
            LOOKUP,
            {"ids": rows, "factor": factor},
            outputs=outputs,
            parameters=rng.choice([{}, {}, {"beam": 4}]),
            deadline=time.time() - 5 if kind == "late" else None,
        )
        if kind != "good":
            with pytest.raises(DeadlineExceeded if kind == "late" else (InvalidInput, InferenceFailed)):
                await call
            return
        found = (await call).arrays()
        right = np.stack([rows, rows**2 % 997], axis=-1).astype(np.float32)
        expected = {"y": right * factor, "columns": right.transpose(2, 0, 1)}
        assert set(found) == set(outputs or expected)
        for name, array in found.items():
            assert np.array_equal(array, expected[name])

    async with serving(amqp_url, tmp_path / "store") as worker, Client(amqp_url) as client:
        for _ in range(5):
            await asyncio.gather(*(one(client) for _ in range(60)))
        counters = worker.counters
        assert counters.jobs_answered == sent["good"]
        assert counters.jobs_failed == sent["bad"] + sent["late"]
        assert counters.jobs_dead_lettered == 0
        if batching is VERIFIED:
            assert counters.jobs_together > sent["good"] / 3
            assert counters.batches_split >= 1
        else:
            assert (counters.runs, counters.jobs_together) == (sent["good"], 0)


MODELS = [entry.id for entry in table()]


@pytest.mark.parametrize("name", MODELS)
async def test_real_models_answer_alike_alone_and_together(name: str) -> None:
    """Every real model that is batched, on inputs with known answers: within its card's tolerance."""
    try:
        (laid_out,) = lay_out(only=[name])
    except LayOutError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real models cannot be had: {error}")
    engine = OnnxBackend().load(ModelSource(name, "1", laid_out.path, laid_out.path.read_bytes()))
    sample = sample_tensors(engine.signature, laid_out.inputs(0))
    together = look(engine, sample, 8 << 20, seconds=3.0)
    if together.batching is None:
        assert together.unbatched
        engine.close()
        return
    batching = together.batching.model_copy(update={"max_rows": max(together.batching.max_rows, 32)})
    counters = Counters()
    jobs = [Job(str(k), name, tuple(sample_tensors(engine.signature, laid_out.inputs(k % 4)))) for k in range(8)]
    alone = [engine.run(job.inputs) for job in jobs]
    with ThreadPoolExecutor(1) as threads:
        batcher = Batcher(
            engine,
            Card.model_construct(model=name, batching=batching, run_times=(), job_bytes=None),
            threads,
            counters,
            lanes=1,
            max_delay=0.0,
            may_come=lambda: False,
        )
        among = await asyncio.gather(*(batcher.run(job) for job in jobs))
    engine.close()
    assert counters.batches_split == 0
    assert counters.jobs_together, "none of them shared a run"
    for expected, (found, _) in zip(alone, among, strict=True):
        for left, right in zip(expected, found, strict=True):
            largest_error(left, right, {left.datatype: batching.tolerance})
