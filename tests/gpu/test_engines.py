"""The backend on a real device, with real TensorRT: what the fake driver cannot show."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend
from qworker.engine.tensorrt.backend import TensorRtBackend
from qworker.engine.tensorrt.engine import TensorRtEngine
from qworker.engine.tensorrt.gpu import Gpu
from qworker.engine.tensorrt.library import Library
from qworker.errors import InvalidInput, LoadFailed
from qworker.wire.datatypes import tensor
from qworker.wire.messages import Tensor
from tests.engine.test_tensorrt_runs import nonzero, reshape
from tests.gpu.conftest import Make, Plan, load, unload
from tests.support import models

MIB = 1 << 20
HEAVY = models.heavy(64)
SIDE = int((64 * MIB / 4) ** 0.5)
PROFILE = f"x=1x{SIDE},8x{SIDE},32x{SIDE}"


def rows(count: int, seed: int = 0) -> list[Tensor]:
    noise = np.random.default_rng(seed).standard_normal((count, SIDE), np.float32)
    return [tensor("x", noise)]


def right(inputs: list[Tensor]) -> np.ndarray:
    """What onnxruntime says, on the CPU."""
    engine = OnnxBackend().load(ModelSource("m", "1", Path("-"), HEAVY))
    (answer,) = engine.run(inputs)
    engine.close()
    return answer.array


def check(loaded: TensorRtEngine, inputs: list[Tensor]) -> None:
    (answer,) = loaded.run(inputs)
    expected = right(inputs)
    np.testing.assert_allclose(answer.array, expected, atol=0.02 * float(np.abs(expected).max()))


@pytest.mark.parametrize("count", [1, 3, 8, 32])
def test_answers_are_those_of_the_cpu(make: Make, plan: Plan, count: int) -> None:
    """Within what TF32 loses."""
    backend = make()
    loaded = load(backend, plan(HEAVY, PROFILE))
    check(loaded, rows(count))
    with pytest.raises(InvalidInput):
        loaded.run(rows(33))
    unload(backend, loaded)


def test_many_threads_on_few_lanes(make: Make, plan: Plan) -> None:
    """Each gets its own answer."""
    backend = make(lanes=2)
    loaded = load(backend, plan(HEAVY, PROFILE))
    wanted = {seed: right(rows(2, seed)) for seed in range(8)}

    def ask(number: int) -> None:
        (answer,) = loaded.run(rows(2, number % 8))
        expected = wanted[number % 8]
        np.testing.assert_allclose(answer.array, expected, atol=0.02 * float(np.abs(expected).max()))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(200)))
    unload(backend, loaded)


@pytest.mark.parametrize("arena", [256 * MIB, 0], ids=["shared", "private"])
def test_bytes_come_back(device: tuple[Gpu, Library], make: Make, plan: Plan, arena: int) -> None:
    """By the driver's word, after the first cycle has loaded the kernels."""
    gpu, backend = device[0], make(arena=arena)
    path = plan(HEAVY, PROFILE)
    unload(backend, load(backend, path))
    before = gpu.memory().used
    for _ in range(15):
        loaded = load(backend, path)
        assert gpu.memory().used - before >= 60 * MIB
        unload(backend, loaded)
        assert abs(gpu.memory().used - before) <= 4 * MIB
    assert backend.statement().in_order


def test_loads_during_traffic(make: Make, plan: Plan) -> None:
    """One model answers while another comes and goes."""
    backend: TensorRtBackend = make(lanes=2)
    stays = load(backend, plan(HEAVY, PROFILE))
    other = plan(models.arithmetic(), "in/a:0=1x2,4x2,8x2", "b=1x2,4x2,8x2")
    with ThreadPoolExecutor(2) as threads:
        coming_and_going = threads.submit(lambda: [unload(backend, load(backend, other)) for _ in range(10)])
        while not coming_and_going.done():
            check(stays, rows(4))
        coming_and_going.result()
    unload(backend, stays)


def test_graphs_give_the_same_answers(make: Make, plan: Plan) -> None:
    """Captured on a real stream, for two shapes."""
    backend = make(graphs=True, lanes=1)
    loaded = load(backend, plan(HEAVY, PROFILE))
    for count in (1, 8):
        for seed in range(20):
            check(loaded, rows(count, seed))
    unload(backend, loaded)


def test_sizes_that_only_the_run_tells(make: Make, plan: Plan) -> None:
    """An output allocator, with TensorRT asking."""
    backend = make()
    loaded = load(backend, plan(nonzero(), "x=1,16,64"))
    for array in ([0, 3, 0, 4], [1] * 6, [0, 0]):
        (answer,) = loaded.run([tensor("x", np.array(array, np.float32))])
        np.testing.assert_array_equal(answer.array, np.nonzero(array))
    unload(backend, loaded)


def test_inputs_that_are_shapes(make: Make, plan: Plan) -> None:
    """Their values live on the host."""
    backend = make()
    loaded = load(backend, plan(reshape(), "x=6,6,6", "shape:=1x6,2x3,6x6"))
    x = np.arange(6, dtype=np.float32)
    for shape in ([2, 3], [3, 2], [6, 1]):
        (answer,) = loaded.run([tensor("x", x), tensor("shape", np.array(shape))])
        np.testing.assert_array_equal(answer.array, x.reshape(shape))
    unload(backend, loaded)


def test_what_is_no_plan_is_refused(make: Make, plan: Plan, tmp_path: Path) -> None:
    """In TensorRT's words, and the process lives."""
    content = plan(HEAVY, PROFILE).read_bytes()
    bad = tmp_path / "bad.engine"
    for damaged in (content[: len(content) // 2], b"ftrt" + content[4:24] + bytes([10, 0, 0, 0]) + content[28:]):
        bad.write_bytes(damaged)
        with pytest.raises(LoadFailed):
            make().load(ModelSource("m", "1", bad, None))
