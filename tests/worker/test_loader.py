"""A load that ends at any of its stages gives back what the stages before took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qworker.engine.onnx import OnnxBackend
from qworker.errors import CorruptModel, InvalidInput, LoadFailed, ModelNotFound, ModelTooLarge
from qworker.policy.eviction import Lru
from qworker.policy.residency import Residency
from qworker.store.card import Card
from qworker.store.local import LocalStore
from qworker.telemetry.counters import Counters
from qworker.wire.datatypes import tensor
from qworker.worker.headroom import Headroom
from qworker.worker.hot_zone import HotZone
from qworker.worker.loader import Loader, NoRoom, Rehearse
from tests.e2e.models import copy_store, model_file, put, replace
from tests.support.models import missing_op
from tests.support.waiting import wait_until
from tests.worker.conftest import SIZE
from tests.worker.doubles import MIB, BackendDouble

BUDGET = 64 * MIB


class Workshop:
    """A loader with its zone, without a broker."""

    def __init__(self, store: Path, backend: Any, threads: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        self.store = LocalStore(store)
        self.counters = Counters()
        self.zone = HotZone(Residency(BUDGET, Lru(), min_residency=0), loop.time, self.counters)
        self.headroom = Headroom(MIB)
        self.slots = asyncio.Semaphore(1)
        self._backend, self._threads, self._clock = backend, threads, loop.time

    def loader(self, claim_timeout: float = 5.0, load_timeout: float = 5.0, rehearse: Rehearse | None = None) -> Loader:
        return Loader(
            self.store,
            self._backend,
            self.zone,
            self.slots,
            self.headroom,
            self._threads,
            self.counters,
            self._clock,
            claim_timeout=claim_timeout,
            load_timeout=load_timeout,
            rehearse=rehearse,
        )


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
async def shop(
    identities: Path, backend: BackendDouble, threads: ThreadPoolExecutor, tmp_path: Path
) -> AsyncIterator[Workshop]:
    """A workshop whose zone must be empty at the end."""
    shop = Workshop(copy_store(identities, tmp_path / "store"), backend, threads)
    yield shop
    backend.open_all()
    assert shop.zone.held == 0
    assert shop.zone.blocked() == []


async def test_a_load_holds_its_bytes_until_the_unload(shop: Workshop, backend: BackendDouble) -> None:
    """Booked before the engine is made, given back once it is closed."""
    loader, card = shop.loader(), shop.store.card("a")
    backend.loading.shut()
    load = asyncio.ensure_future(loader.load(card))  # noqa: TID251  # awaited below
    await wait_until(lambda: backend.loading.passing)
    assert shop.zone.held == SIZE
    backend.loading.open()
    loaded = await load
    assert (shop.zone.held, shop.counters.loads) == (SIZE, 1)
    await loader.unload(card, loaded.engine)
    assert backend.engines[0].closed


async def test_real_engine_from_a_real_store(identities: Path, threads: ThreadPoolExecutor) -> None:
    """The same with onnxruntime: what was loaded runs."""
    shop = Workshop(identities, OnnxBackend(), threads)
    loaded = await shop.loader().load(shop.store.card("b"))
    (y,) = loaded.engine.run([tensor("x", np.ones((2, 3), np.float32))])
    assert (y.array == 1).all()
    await shop.loader().unload(loaded.card, loaded.engine)
    assert shop.zone.held == 0


async def test_file_is_corrupt(shop: Workshop, backend: BackendDouble) -> None:
    """Found before a byte is booked: nobody is evicted for a model that cannot be read."""
    card = shop.store.card("a")
    path = model_file(shop.store.root, "a")
    replace(path, path.read_bytes()[:-1])
    with pytest.raises(CorruptModel, match=r"model\.onnx"):
        await shop.loader().load(card)
    assert shop.zone.peak == 0
    assert not backend.engines


async def test_model_was_removed(shop: Workshop) -> None:
    """Between its card and its bytes."""
    card = shop.store.card("a")
    shop.store.remove("a")
    with pytest.raises(ModelNotFound):
        await shop.loader().load(card)
    assert shop.zone.peak == 0


async def test_larger_than_the_budget(shop: Workshop, backend: BackendDouble) -> None:
    """Refused for good, before anything is made."""
    card = shop.store.card("a").model_copy(update={"resident_bytes": BUDGET + 1})
    with pytest.raises(ModelTooLarge):
        await shop.loader().load(card)
    assert not backend.engines


async def test_no_room_in_time(shop: Workshop, backend: BackendDouble) -> None:
    """The claim's time passes while a busy model keeps the bytes."""
    shop.zone.enter("busy", Stays())
    assert await shop.zone.room("busy", BUDGET, within=1)
    with pytest.raises(NoRoom, match=str(SIZE)):
        await shop.loader(claim_timeout=0.05).load(shop.store.card("a"))
    assert not backend.engines
    assert shop.zone.held == BUDGET
    shop.zone.gone("busy")


class Stays:
    """A tenant that does not go."""

    def evicted(self, *, forced: bool, reason: str) -> None:
        raise AssertionError("a model that loads is not evicted")


async def test_engine_is_refused(shop: Workshop, backend: BackendDouble) -> None:
    """The library does not take the bytes."""
    backend.load_error = LoadFailed("no such operator")
    with pytest.raises(LoadFailed, match="no such operator"):
        await shop.loader().load(shop.store.card("a"))


async def test_real_engine_is_refused(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """The same with onnxruntime and an operator that it does not have."""
    put(tmp_path / "store", "alien", missing_op(), loads=False)
    shop = Workshop(tmp_path / "store", OnnxBackend(), threads)
    with pytest.raises(LoadFailed, match="Levitate"):
        await shop.loader().load(shop.store.card("alien"))
    assert shop.zone.held == 0


async def test_warm_up_fails(shop: Workshop, backend: BackendDouble) -> None:
    """The engine that was made is closed."""
    backend.warm_up_error = InvalidInput("the sample does not suit")
    with pytest.raises(LoadFailed, match="the sample does not suit"):
        await shop.loader().load(shop.store.card("a"))
    assert [engine.closed for engine in backend.engines] == [True]


async def test_measured_larger_than_fits(shop: Workshop, backend: BackendDouble) -> None:
    """An engine that turns out to be too large now is closed, and the next load books what it takes."""
    backend.engine_bytes = BUDGET - MIB
    assert backend.engine_bytes > SIZE * 1.25 + 32 * MIB
    shop.zone.enter("other", Stays())
    assert await shop.zone.room("other", 2 * MIB, within=1)
    loader, card = shop.loader(claim_timeout=0.05), shop.store.card("a")
    with pytest.raises(NoRoom, match=str(BUDGET - MIB)):
        await loader.load(card)
    assert [engine.closed for engine in backend.engines] == [True]
    assert shop.zone.held == 2 * MIB
    with pytest.raises(NoRoom):
        await loader.load(card)
    assert len(backend.engines) == 1, "the second load did not wait for what it needs"
    shop.zone.gone("other")
    loaded = await loader.load(card)
    assert shop.zone.held == BUDGET - MIB
    await loader.unload(card, loaded.engine)


async def test_load_hangs(shop: Workshop, backend: BackendDouble) -> None:
    """A thread cannot be stopped: the bytes stay booked as long as it holds them, and the load has failed."""
    backend.loading.shut()
    load = asyncio.ensure_future(shop.loader(load_timeout=0.05).load(shop.store.card("a")))  # noqa: TID251
    await wait_until(lambda: backend.loading.passing)
    _, late = await asyncio.wait({load}, timeout=0.2)
    assert late
    assert shop.zone.held == SIZE
    backend.loading.open()
    with pytest.raises(LoadFailed, match=r"0\.05 s"):
        await load
    assert [engine.closed for engine in backend.engines] == [True]


@pytest.mark.parametrize("where", ["bytes", "slot", "headroom", "engine"])
async def test_cancelled(shop: Workshop, backend: BackendDouble, where: str) -> None:
    """Whatever it waits for when it is cancelled, the bytes are free again and an engine is not left open."""
    loader, card = shop.loader(), shop.store.card("a")
    async with asyncio.TaskGroup() as tasks:
        holding = asyncio.Event()
        held = tasks.create_task(hold(shop, where, holding))
        await asyncio.wait_for(holding.wait(), 5)
        if where == "engine":
            backend.loading.shut()
        if where == "headroom":
            card = card.model_copy(update={"peak_bytes": SIZE + 2 * MIB})
        load = tasks.create_task(loader.load(card))
        waits = {"bytes": shop.zone.blocked, "engine": lambda: backend.loading.passing}
        await wait_until(waits.get(where, lambda: shop.zone.held == SIZE))
        await asyncio.sleep(0.02)
        assert not load.done()
        load.cancel()
        await asyncio.wait({load})
        assert load.cancelled()
        held.cancel()
    assert shop.zone.held == 0
    backend.open_all()
    if where == "engine":
        await wait_until(lambda: backend.engines and backend.engines[0].closed, what="the engine was closed")
    else:
        assert not backend.engines
    loaded = await loader.load(shop.store.card("b"))  # nothing is left of it in slots and headroom
    await loader.unload(loaded.card, loaded.engine)


async def hold(shop: Workshop, what: str, holding: asyncio.Event) -> None:
    """Keep the load from getting what it waits for, until cancelled."""
    if what == "slot":
        async with shop.slots:
            holding.set()
            await asyncio.Event().wait()
    elif what == "headroom":
        async with shop.headroom.hold(MIB):
            holding.set()
            await asyncio.Event().wait()
    elif what == "bytes":
        shop.zone.enter("busy", Stays())
        assert await shop.zone.room("busy", BUDGET, within=1)
        holding.set()
        try:
            await asyncio.Event().wait()
        finally:
            shop.zone.gone("busy")
    holding.set()


async def test_a_build_is_rehearsed_once_before_it_is_loaded(shop: Workshop, backend: BackendDouble) -> None:
    """What fails there is not loaded here and holds no byte; what did well is not rehearsed again."""
    verdicts: list[LoadFailed | None] = [LoadFailed("it ended its process"), None]
    held: list[int] = []

    async def rehearse(card: Card) -> None:
        held.append(shop.zone.held)
        verdict = verdicts.pop(0)
        if verdict is not None:
            raise verdict

    loader, card = shop.loader(rehearse=rehearse), shop.store.card("a")
    with pytest.raises(LoadFailed, match="it ended its process"):
        await loader.load(card)
    assert (shop.zone.held, backend.engines) == (0, [])
    for _ in range(2):
        loaded = await loader.load(card)
        await loader.unload(card, loaded.engine)
    assert held == [SIZE, SIZE]
    assert len(backend.engines) == 2
