"""Device memory: every byte is accounted for, and every byte comes back.

On the real cuda-core, over a driver that counts. ``gpu.used`` is what that driver says, past all of our code.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from qworker.engine.tensorrt.backend import Options, TensorRtBackend
from qworker.engine.tensorrt.engine import TensorRtEngine
from qworker.engine.tensorrt.ledger import TOLERANCE
from qworker.errors import DeviceMemoryFull, LoadFailed, OutOfMemory
from tests.contract.engines import tensorrt_backend
from tests.engine.conftest import ARENA, MIB, Make, load, numbers, plan, source, total, unload
from tests.support.fakegpu import OUT_OF_MEMORY, FakeGpu
from tests.support.waiting import wait_until

CYCLES = 200


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory comes back by itself, and not because the garbage collector came by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("arena", [ARENA, 0], ids=["shared", "private"])
def test_every_byte_comes_back_over_many_evictions(make: Make, gpu: FakeGpu, arena: int) -> None:
    """200 loads, runs and unloads, with another model hot all the time."""
    backend = make(arena=arena, lanes=1)
    content = plan(weights=20 * MIB, scratch=4 * MIB)
    stays = load(backend, model="stays")
    before = gpu.used
    for cycle in range(CYCLES):
        loaded = load(backend, content)
        assert gpu.used - before >= 20 * MIB
        assert total(loaded, cycle) == 2 * cycle
        unload(backend, loaded)
        assert gpu.used == before, f"cycle {cycle}"
    assert total(stays, 1) == 2
    assert backend.statement().drift == 0


def test_the_bytes_that_are_gone_are_gone_for_the_driver_too(make: Make, gpu: FakeGpu) -> None:
    """The default pool, which TensorRT uses, keeps nothing: nobody has told it to."""
    backend = make()
    loaded = load(backend, weights=50 * MIB)
    assert gpu.default_pool >= 50 * MIB
    unload(backend, loaded)
    assert (gpu.default_pool, gpu.default_threshold, gpu.used) == (0, 0, 0)


# --- loads that fail ----------------------------------------------------------------------------

STAGES: dict[str, tuple[Callable[[], bytes], type[Exception]]] = {
    "no plan": (lambda: b"<!DOCTYPE html>" * 9, LoadFailed),
    "cut off": (lambda: plan()[:40], LoadFailed),
    "another version": (lambda: plan(version=(10, 3, 0, 26)), LoadFailed),
    "deserialize": (lambda: plan(fault="deserialize"), LoadFailed),
    "context": (lambda: plan(fault="context"), LoadFailed),
    "profile": (lambda: plan(fault="profile"), LoadFailed),
    "weights do not fit": (lambda: plan(weights=2 << 30), DeviceMemoryFull),
    "contexts do not fit": (lambda: plan(persistent=700 * MIB), DeviceMemoryFull),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("stage", STAGES)
def test_a_load_that_fails_leaves_nothing(backend: TensorRtBackend, gpu: FakeGpu, stage: str) -> None:
    """At each stage; also while somebody keeps the exception, and the variables of the calls in it."""
    content, expected = STAGES[stage]
    stays = load(backend)
    before = gpu.used
    with pytest.raises(expected) as caught:
        backend.load(source(content()))
    assert gpu.used == before
    assert "\n" not in str(caught.value)
    assert total(stays, 3) == 6
    assert backend.statement().drift == 0
    unload(backend, stays)
    assert gpu.used == 0


def test_it_says_which_version_the_plan_wants(backend: TensorRtBackend) -> None:
    """TensorRT's own words, since its calls answer None."""
    with pytest.raises(LoadFailed, match=r"expecting library version 11\.4\.0\.106 got 10\.3\.0\.26"):
        backend.load(source(plan(version=(10, 3, 0, 26))))


def test_a_plan_that_does_not_run_leaves_nothing(backend: TensorRtBackend, gpu: FakeGpu) -> None:
    """It loads, and fails in its warm-up."""
    with pytest.raises(Exception, match="enqueueV3 failed: injected"):
        load(backend, fault="enqueue")
    assert gpu.used == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("call", ["cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAllocHost"])
def test_no_memory_at_any_moment_of_a_load(make: Make, gpu: FakeGpu, call: str) -> None:
    """The first allocation fails, then the second, and so on until a load goes through."""
    backend = make(pinned_keep=0)
    kept: list[BaseException] = []  # as a log or a future might
    for after in range(100):
        gpu.fail(call, OUT_OF_MEMORY, after=after)
        try:
            loaded = load(backend, weights=3 * MIB)
        except DeviceMemoryFull as full:
            kept.append(full)
            gpu.mend()
            assert gpu.used == 0, f"{call}, after {after}"
            assert gpu.pinned == 0
            continue
        break
    gpu.mend()
    assert len(kept) >= 2, "the test reaches several allocations"
    assert total(loaded, 4) == 8
    unload(backend, loaded)


# --- no memory ----------------------------------------------------------------------------------


def test_what_does_not_fit_now_may_fit_later(backend: TensorRtBackend, gpu: FakeGpu) -> None:
    """A full device says nothing of the model: the load is not a failed one."""
    gpu.memory(100 * MIB)
    first = load(backend, weights=60 * MIB)
    with pytest.raises(DeviceMemoryFull) as caught:
        load(backend, weights=60 * MIB)
    assert caught.value.retryable
    assert total(first, 1) == 2
    unload(backend, first)
    second = load(backend, weights=60 * MIB)
    assert total(second, 2) == 4
    unload(backend, second)


def test_a_run_without_memory_fails_alone(make: Make, gpu: FakeGpu) -> None:
    """Its requester may try again; the engine, and those beside it, go on."""
    backend = make(arena=0, lanes=1)
    loaded, other = backend.load(source(plan(scratch=8 * MIB))), load(backend)
    gpu.fail("cuMemAllocFromPoolAsync", OUT_OF_MEMORY)
    with pytest.raises(OutOfMemory, match="memory") as caught:
        loaded.run(numbers(1))
    assert caught.value.retryable
    assert total(other, 1) == 2
    assert total(loaded, 1) == 2
    unload(backend, loaded, other)


# --- the arena ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3])
def test_many_engines_cost_their_weights_and_one_arena(gpu: FakeGpu, lanes: int) -> None:
    """Private memory costs as many times as there are engines."""
    content, count, scratch = plan(weights=2 * MIB, scratch=10 * MIB, persistent=0), 5, 10 * MIB

    def cost(arena: int) -> int:
        with tensorrt_backend(Options(arena=arena, lanes=lanes)) as backend:
            return used_by(backend)

    def used_by(backend: TensorRtBackend) -> int:
        engines = [load(backend, content, f"m{number}") for number in range(count)]
        for each in engines:
            assert total(each, 2) == 4
        statement = backend.statement()
        assert abs(statement.drift) <= TOLERANCE
        used = gpu.used
        unload(backend, *engines)
        return used

    shared, private = cost(ARENA), cost(0)
    assert shared < count * 2 * MIB + lanes * scratch + 6 * MIB
    assert private > count * (2 * MIB + lanes * scratch)


def test_the_account_says_which_part_is_shared(backend: TensorRtBackend) -> None:
    """An engine's own bytes come back with it; its claim on the arena does not."""
    small, large = load(backend, model="small", scratch=MIB), load(backend, model="large", scratch=8 * MIB)
    statement = backend.statement()
    by_model = {entry.model: entry for entry in statement.engines}
    assert by_model["large"].shared > 2 * 8 * MIB
    assert by_model["small"].shared < 3 * MIB
    assert statement.arena == by_model["large"].shared
    assert all(entry.measured and entry.own < 8 * MIB for entry in statement.engines)
    unload(backend, large)
    assert backend.statement().arena == by_model["small"].shared, "it shrinks to what those that are left need"
    assert total(small, 2) == 4
    unload(backend, small)


def test_what_is_too_large_for_the_arena_has_memory_of_its_own(make: Make) -> None:
    """The arena never grows beyond what is reserved for it."""
    backend = make(arena=8 * MIB, lanes=2)
    loaded = load(backend, scratch=6 * MIB)
    (entry,) = backend.statement().engines
    assert (entry.shared, backend.statement().arena) == (0, 0)
    assert entry.own >= 2 * 6 * MIB
    assert total(loaded, 1) == 2
    unload(backend, loaded)


def test_memory_that_somebody_else_takes_is_told(backend: TensorRtBackend) -> None:
    """The account names what it cannot explain, and the baseline takes it in once nothing else is there."""
    driver = pytest.importorskip("cuda.bindings.driver")
    loaded = load(backend)
    status, foreign = driver.cuMemAlloc(40 * MIB)
    assert status == driver.CUresult.CUDA_SUCCESS
    statement = backend.statement()
    assert statement.drift == 40 * MIB
    assert not statement.in_order
    assert backend.report()["memory"]["drift"] == 40 * MIB
    unload(backend, loaded)
    assert (backend.statement().drift, backend.statement().baseline) == (0, 40 * MIB)
    driver.cuMemFree(foreign)


# --- closing while it runs ----------------------------------------------------------------------


def test_an_engine_closed_while_it_runs_is_freed_after_the_run(backend: TensorRtBackend, gpu: FakeGpu) -> None:
    """The bytes count as free when the run has ended, and not before; ``trim`` waits for that."""
    content = plan(weights=30 * MIB, ms=300)
    loaded = backend.load(source(content))
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(total, loaded, 5)
        deadline = threading.Event()
        while not gpu.calls("cuLaunchHostFunc"):
            assert not deadline.wait(0.002)
        loaded.close()
        assert gpu.used >= 30 * MIB
        backend.trim()
        assert gpu.used == 0
        assert running.result(10) == 10


def test_a_run_without_an_end_is_a_lost_device(make: Make, gpu: FakeGpu) -> None:
    """Nobody may count its bytes as free, and nobody can free them."""
    from qworker.errors import DeviceLost

    backend = make(drain_timeout=0.05)
    loaded = backend.load(source(plan(ms=400)))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(total, loaded, 5)
        while not gpu.calls("cuLaunchHostFunc"):
            pass
        loaded.close()
        with pytest.raises(DeviceLost, match="a run goes on"):
            backend.trim()
        assert backend.report()["lost"]
        assert running.result(10) == 10
    backend._gpu.lost = None  # it came back after all; so that the fixture sees an empty device


async def test_the_loop_is_free_while_the_device_works(backend: TensorRtBackend) -> None:
    """Waiting happens in the thread, with the GIL released."""
    import asyncio

    loaded = backend.load(source(plan(ms=250)))
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as threads:
        running = loop.run_in_executor(threads, total, loaded, 1)
        gaps: list[float] = []
        last = loop.time()
        while not running.done():
            await asyncio.sleep(0.005)
            gaps.append(loop.time() - last)
            last = loop.time()
        assert await running == 2
    assert len(gaps) >= 20
    unload(backend, loaded)


async def test_a_cancelled_job_does_not_free_what_still_runs(backend: TensorRtBackend, gpu: FakeGpu) -> None:
    """Its await ends at once; the device goes on, and the engine's bytes with it."""
    import asyncio

    loaded = backend.load(source(plan(weights=10 * MIB, ms=300)))
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as threads:
        job = loop.run_in_executor(threads, total, loaded, 1)
        await wait_until(lambda: gpu.calls("cuLaunchHostFunc") > 0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        loaded.close()
        assert gpu.used >= 10 * MIB
        await loop.run_in_executor(threads, backend.trim)
        assert gpu.used == 0


# --- loads during traffic -----------------------------------------------------------------------


def test_two_loads_during_traffic(make: Make, gpu: FakeGpu) -> None:
    """Answers stay right, nobody runs in another's scratch memory, and the account is right in the end."""
    backend = make(lanes=2)
    stays = load(backend, model="stays", ms=1)
    stop = threading.Event()

    def traffic() -> int:
        runs = 0
        while not stop.is_set():
            assert total(stays, runs, rows=1 + runs % 4) == 2 * runs
            runs += 1
        return runs

    def loads(number: int) -> None:
        for _ in range(6):
            loaded: TensorRtEngine = load(
                backend, model=f"m{number}", weights=(5 + number) * MIB, scratch=(2 + number) * MIB
            )
            assert total(loaded, number) == 2 * number
            unload(backend, loaded)

    with ThreadPoolExecutor(4) as threads:
        serving = [threads.submit(traffic) for _ in range(2)]
        loading = [threads.submit(loads, number) for number in range(2)]
        try:
            for each in loading:
                each.result(60)
        finally:
            stop.set()
        assert sum(each.result(10) for each in serving) > 50
    backend.trim()
    assert backend.statement().in_order
    unload(backend, stays)
    assert gpu.used == 0
