"""Runs of TensorRT plans: profiles, sizes that only the run tells, CUDA graphs, and a device that breaks."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from qworker.engine.tensorrt import graphs
from qworker.engine.tensorrt.backend import TensorRtBackend
from qworker.engine.tensorrt.poison import PoisonBook, fingerprint
from qworker.errors import DeviceLost, InferenceFailed, InvalidInput, OutOfMemory
from qworker.wire.datatypes import tensor
from tests.engine.conftest import MIB, Make, load, numbers, plan, source, total, unload
from tests.support import models
from tests.support.fakegpu import ILLEGAL_ADDRESS, LAUNCH_FAILED, OUT_OF_MEMORY, FakeGpu, double

SMALL = {"in/a:0": [(1, 2), (1, 2), (2, 2)], "b": [(1, 2), (1, 2), (2, 2)]}
LARGE = {"in/a:0": [(2, 2), (16, 2), (32, 2)], "b": [(2, 2), (16, 2), (32, 2)]}


def nonzero() -> bytes:
    """Where x is not zero: as many columns as there are such places."""
    node = helper.make_node("NonZero", ["x"], ["places"])
    places = models.value("places", TensorProto.INT64, (1, None))
    return models.model([node], [models.value("x", TensorProto.FLOAT, ("n",))], [places])


def reshape() -> bytes:
    """x in the shape that the second input says."""
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    inputs = [models.value("x", TensorProto.FLOAT, ("n",)), models.value("shape", TensorProto.INT64, (2,))]
    return models.model([node], inputs, [models.value("y", TensorProto.FLOAT, ("p", "q"))])


# --- profiles -----------------------------------------------------------------------------------


def test_each_shape_runs_at_the_profile_made_for_it(backend: TensorRtBackend) -> None:
    """Also where two profiles would take it; and none is a clear refusal that names what there is."""
    loaded = load(backend, profiles=[SMALL, LARGE])
    for rows in (1, 2, 3, 16, 32):
        assert total(loaded, rows, rows) == 2 * rows
    with pytest.raises(InvalidInput, match=r"33x2; the plan was built for 1x2 to 2x2, or 2x2 to 32x2"):
        total(loaded, 1, 33)
    unload(backend, loaded)


def test_warm_up_runs_every_profile_on_every_lane_at_its_bounds(make: Make, gpu: FakeGpu) -> None:
    """Kernels load when they first run: two lanes, two profiles, least, best and largest shapes."""
    backend = make(lanes=2)
    loaded = backend.load(source(plan(profiles=[SMALL, LARGE])))
    assert gpu.calls("cuLaunchHostFunc") == 0
    backend.warm_up(loaded, None)
    assert gpu.calls("cuLaunchHostFunc") == 2 * 2 * 3
    unload(backend, loaded)


# --- sizes that only the run tells ----------------------------------------------------------------


def test_outputs_whose_size_depends_on_values(backend: TensorRtBackend, gpu: FakeGpu) -> None:
    """The plan asks for their memory while it runs, and it is free again after each run."""
    loaded = load(backend, plan(nonzero(), open_outputs=["places"]))
    held = gpu.used
    for array in ([0, 3, 0, 4], [1, 1, 1, 1, 1, 1], [0, 0]):
        (answer,) = loaded.run([tensor("x", np.array(array, np.float32))])
        np.testing.assert_array_equal(answer.array, np.nonzero(array))
        backend.trim()
        assert gpu.used == held
    unload(backend, loaded)


def test_no_memory_for_such_an_output(backend: TensorRtBackend, gpu: FakeGpu) -> None:
    """The run fails alone, as one that may be tried again."""
    loaded = load(backend, plan(nonzero(), open_outputs=["places"]))
    gpu.fail("cuMemAllocFromPoolAsync", OUT_OF_MEMORY)
    with pytest.raises(OutOfMemory, match="memory"):
        loaded.run([tensor("x", np.ones(3, np.float32))])
    (answer,) = loaded.run([tensor("x", np.ones(3, np.float32))])
    assert answer.array.shape == (1, 3)
    unload(backend, loaded)


def test_inputs_that_are_shapes_stay_on_the_host(backend: TensorRtBackend) -> None:
    """Their values choose the output's size; warm-up uses the values of the profile."""
    profile = {"x": [(6,), (6,), (6,)], "shape": [(2,), (2,), (2,)]}
    loaded = load(backend, plan(reshape(), profiles=[profile], host_inputs={"shape": [[1, 6], [2, 3], [6, 1]]}))
    x = np.arange(6, dtype=np.float32)
    for shape in ([2, 3], [3, 2], [6, 1]):
        (answer,) = loaded.run([tensor("x", x), tensor("shape", np.array(shape))])
        np.testing.assert_array_equal(answer.array, x.reshape(shape))
    unload(backend, loaded)


# --- memory for copies ----------------------------------------------------------------------------


def test_page_locked_memory_is_used_again(backend: TensorRtBackend, gpu: FakeGpu) -> None:
    """Getting some takes milliseconds: after the first runs nobody asks for any."""
    loaded = load(backend)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda n: total(loaded, n), range(20)))
        before = gpu.calls("cuMemAllocHost")
        list(threads.map(lambda n: total(loaded, n), range(100)))
    assert gpu.calls("cuMemAllocHost") == before
    unload(backend, loaded)


def test_runs_allocate_nothing_on_the_device(backend: TensorRtBackend, gpu: FakeGpu) -> None:
    """Everything lies in the lane's block."""
    loaded = load(backend)
    before = gpu.calls("cuMemAllocFromPoolAsync"), gpu.calls("cuMemAllocAsync")
    for number in range(20):
        assert total(loaded, number, 1 + number % 3) == 2 * number
    assert (gpu.calls("cuMemAllocFromPoolAsync"), gpu.calls("cuMemAllocAsync")) == before
    unload(backend, loaded)


def test_a_run_that_fails_waits_for_its_copies(make: Make, gpu: FakeGpu) -> None:
    """Their memory is somebody else's afterwards: nothing of the failed run may still read or write it."""
    backend = make(lanes=1)
    loaded = load(backend)
    gpu.copies_take(60)
    gpu.fail("cuLaunchHostFunc", OUT_OF_MEMORY)
    started = time.monotonic()
    with pytest.raises(InferenceFailed):
        total(loaded, 1)
    assert time.monotonic() - started >= 0.12, "two copies in"
    gpu.mend()
    assert total(loaded, 2) == 4
    unload(backend, loaded)


# --- CUDA graphs ----------------------------------------------------------------------------------


def runs(loaded: Any, count: int, rows: int = 1) -> None:
    for number in range(count):
        assert total(loaded, number, rows) == 2 * number


ENOUGH = graphs.PLAIN_RUNS + graphs.GRAPH_RUNS + 3


def test_graphs_are_off_unless_asked_for(backend: TensorRtBackend, gpu: FakeGpu) -> None:
    """A setting, since they take memory of their own."""
    loaded = load(backend)
    runs(loaded, ENOUGH)
    assert gpu.calls("cuGraphLaunch") == 0
    unload(backend, loaded)


def test_a_shape_that_comes_again_is_tried_as_a_graph(
    make: Make, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph gives the right answers, for each shape its own, and stays where it is faster."""
    monkeypatch.setattr(graphs, "CLEARLY", 1e9)  # whatever this machine's noise says
    backend = make(graphs=True, lanes=1)
    loaded = load(backend)
    runs(loaded, ENOUGH)
    runs(loaded, ENOUGH, rows=3)
    assert backend.report()["graphs"] == 2
    before = gpu.calls("cuGraphLaunch")
    runs(loaded, 5)
    runs(loaded, 5, rows=3)
    assert gpu.calls("cuGraphLaunch") == before + 10
    unload(backend, loaded)
    assert gpu.calls("cuGraphExecDestroy") == 2


def test_a_graph_that_is_not_faster_is_given_up(make: Make, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch is measured."""
    monkeypatch.setattr(graphs, "CLEARLY", 0.0)
    backend = make(graphs=True, lanes=1)
    loaded = load(backend)
    runs(loaded, ENOUGH)
    assert gpu.calls("cuGraphLaunch") == graphs.GRAPH_RUNS
    assert backend.report()["graphs"] == 0
    unload(backend, loaded)


def test_graphs_do_not_outlive_the_place_of_their_memory(
    make: Make, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger engine moves the arena; the graph of the smaller one is captured anew."""
    monkeypatch.setattr(graphs, "CLEARLY", 1e9)
    backend = make(graphs=True, lanes=1)
    small = load(backend, scratch=MIB)
    runs(small, ENOUGH)
    large = load(backend, scratch=16 * MIB, model="large")
    runs(small, ENOUGH)
    unload(backend, large)
    runs(small, ENOUGH)
    assert backend.report()["graphs"] == 1
    assert gpu.calls("cuGraphExecDestroy") == 2
    unload(backend, small)


def test_what_cannot_be_captured_runs_without(make: Make, gpu: FakeGpu) -> None:
    """It is tried once, does no harm, and is not tried again."""
    backend = make(graphs=True, lanes=1)
    loaded = load(backend, uncapturable=True)
    runs(loaded, 3 * ENOUGH)
    assert gpu.calls("cuStreamBeginCapture") == 1
    assert gpu.calls("cuGraphLaunch") == 0
    unload(backend, loaded)


# --- a device that breaks -------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize", "cuLaunchHostFunc"])
def test_an_error_that_breaks_the_context_is_no_job_error(make: Make, gpu: FakeGpu, tmp_path: Path, call: str) -> None:
    """Nobody who deals with failed jobs may live on with a device that answers nothing any more."""
    book = tmp_path / "poison.jsonl"
    backend = make(poison=book)
    loaded = load(backend)
    gpu.fail(call, ILLEGAL_ADDRESS)
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        total(loaded, 7)
    with pytest.raises(DeviceLost):
        total(loaded, 8)
    assert "ILLEGAL_ADDRESS" in backend._gpu.lost
    first = json.loads(book.read_text().splitlines()[0])
    assert first["model"] == "m"
    assert first["fingerprint"] == fingerprint("m", numbers(7))
    gpu.mend()
    backend._gpu.lost = None  # a new process would start like this
    unload(backend, loaded)


def test_a_kernel_that_breaks_the_context(make: Make, gpu: FakeGpu) -> None:
    """The fault comes out where the run is awaited."""
    backend = make()
    loaded = load(backend, ms=50)
    with ThreadPoolExecutor(1) as threads:
        before = gpu.calls("cuLaunchHostFunc")
        running = threads.submit(total, loaded, 7)
        while gpu.calls("cuLaunchHostFunc") == before and not running.done():
            pass
        gpu.break_context(LAUNCH_FAILED)
        with pytest.raises(DeviceLost, match="LAUNCH_FAILED"):
            running.result(10)
    with pytest.raises(DeviceLost):
        backend.load(source(plan()))
    backend.close()  # does nothing, and does not fail
    gpu.mend()
    backend._gpu.lost = None
    unload(backend, loaded)


def test_inputs_that_broke_the_device_twice_are_refused(make: Make, gpu: FakeGpu, tmp_path: Path) -> None:
    """The book outlives the process: two have written, and the third refuses; other inputs run."""
    book = tmp_path / "poison.jsonl"
    for _ in range(2):
        PoisonBook(book).add("m", numbers(7), "CUDA_ERROR_ILLEGAL_ADDRESS")
    backend = make(poison=book)
    loaded = load(backend)
    launches = gpu.calls("cuLaunchHostFunc")
    with pytest.raises(InferenceFailed, match="2 times"):
        total(loaded, 7)
    assert gpu.calls("cuLaunchHostFunc") == launches
    assert total(loaded, 8) == 16
    unload(backend, loaded)


def test_a_damaged_book_does_not_stop_a_worker(tmp_path: Path) -> None:
    """A line that a killed process left half, or that somebody wrote by hand, counts nothing."""
    book = tmp_path / "poison.jsonl"
    PoisonBook(book).add("m", numbers(1), "x")
    with book.open("ab") as file:
        file.write(b'{"fingerprint": \xff\n[]\n{"model": 1}\n{"finger')
    opened = PoisonBook(book)
    opened.check("m", numbers(1))
    opened.add("m", numbers(1), "x")
    with pytest.raises(InferenceFailed):
        opened.check("m", numbers(1))


def test_double_is_not_the_real_library() -> None:
    """So that nobody takes these tests for tests of TensorRT."""
    assert "tests" in double().__name__
