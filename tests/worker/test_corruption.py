"""Damage at every stage of a load, and loads that are cut short: an error that has a name, and every byte back."""

from __future__ import annotations

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend, OnnxEngine
from qworker.errors import QworkerError
from qworker.policy.eviction import Lru
from qworker.policy.residency import Residency
from qworker.store.local import LocalStore
from qworker.telemetry.counters import Counters
from qworker.wire.datatypes import tensor
from qworker.worker.headroom import Headroom
from qworker.worker.hot_zone import HotZone
from qworker.worker.loader import Loader
from tests.e2e.models import copy_store, replace
from tests.worker.doubles import MIB

X = np.ones((2, 3), np.float32)
STAGES = ["engine", "signature", "warm up", "trim", "memory"]


class Faulty(OnnxBackend):
    """onnxruntime, with a fault at one stage of the load."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def load(self, source: ModelSource) -> OnnxEngine:
        if self.stage == "engine":
            source = ModelSource(source.model, source.version, source.path, b"\x08\x07" + b"\xff" * 64)
        if self.stage == "signature":
            raise_(self.stage, "an output of a type that is not ours")
        if self.stage == "memory":
            raise MemoryError("no memory for it")
        return super().load(source)

    def warm_up(self, engine: object, sample: object) -> bool:
        if self.stage == "warm up":
            raise_(self.stage, "the sample breaks it")
        return super().warm_up(engine, sample)  # type: ignore[arg-type]

    def trim(self) -> None:
        if self.stage == "trim":
            self.stage = ""  # once: giving the memory back calls it again
            raise_("trim", "the system does not take it")
        super().trim()


def raise_(stage: str, why: str) -> None:
    raise {"warm up": ValueError, "trim": OSError}.get(stage, RuntimeError)(why)


class Shop:
    """A loader on a store, with all that a load can take."""

    def __init__(self, store: Path, backend: OnnxBackend, threads: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        self.store, self.slots = LocalStore(store), asyncio.Semaphore(1)
        self.zone = HotZone(Residency(64 * MIB, Lru(), min_residency=0), loop.time, Counters())
        self.loader = Loader(
            self.store,
            backend,
            self.zone,
            self.slots,
            Headroom(MIB),
            threads,
            Counters(),
            loop.time,
            claim_timeout=2.0,
            load_timeout=20.0,
        )

    async def serves(self, model: str) -> bool:
        """Load, run once, unload. False when the model cannot be had, with an error that has a name."""
        try:
            loaded = await self.loader.load(await self.loader.card(model))
        except QworkerError:
            return False
        (y,) = loaded.engine.run([tensor("x", X)])
        assert (y.array == X).all(), "a damaged model ran, and gave a wrong answer"
        await self.loader.unload(loaded.card, loaded.engine)
        return True

    def check(self) -> None:
        """All is back."""
        assert self.zone.held == 0
        assert self.zone.blocked() == []
        assert not self.slots.locked()


def files_of(store: Path, model: str) -> list[Path]:
    return sorted(path for path in LocalStore(store).version_folder(model, "1").rglob("*") if path.is_file())


@settings(max_examples=60, deadline=None)
@given(
    which=st.floats(0, 0.999), at=st.floats(0, 0.999), kind=st.sampled_from(["flip", "cut", "grow", "empty", "delete"])
)
def test_any_damage_to_any_file_returns_every_byte(identities: Path, which: float, at: float, kind: str) -> None:
    """One byte flipped, the rest cut off, something behind it, nothing in it, or no file: typed, and no byte held."""

    async def scenario(store: Path) -> None:
        with ThreadPoolExecutor(2) as threads:
            shop = Shop(store, OnnxBackend(), threads)
            files = files_of(store, "a")
            damage(files[int(which * len(files))], at, kind)
            await shop.serves("a")
            shop.check()
            assert await shop.serves("b"), "the next model has all that it needs"
            shop.check()

    with TemporaryDirectory() as folder:
        asyncio.run(scenario(copy_store(identities, Path(folder) / "store")))


def damage(path: Path, at: float, kind: str) -> None:
    content = path.read_bytes()
    where = int(at * len(content))
    if kind == "delete":
        path.unlink()
        return
    changed = {
        "flip": content[:where] + bytes([content[where] ^ 0x40]) + content[where + 1 :] if content else b"x",
        "cut": content[:where],
        "grow": content + b"\x00" * 7,
        "empty": b"",
    }[kind]
    replace(path, changed)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_fault_at_each_stage_returns_every_byte(identities: Path, tmp_path: Path, stage: str) -> None:
    """Also one of a kind that nobody foresaw, which ends the worker: its ledger is right until then."""
    with ThreadPoolExecutor(2) as threads:
        shop = Shop(copy_store(identities, tmp_path / "store"), Faulty(stage), threads)
        with pytest.raises((QworkerError, ValueError, OSError, RuntimeError, MemoryError)):
            await shop.loader.load(shop.store.card("a"))
        shop.check()


async def test_files_that_change_under_the_load(identities: Path, tmp_path: Path) -> None:
    """Between the card and the bytes the folder is replaced by another model's: found by the digest."""
    store = copy_store(identities, tmp_path / "store")
    with ThreadPoolExecutor(2) as threads:
        shop = Shop(store, OnnxBackend(), threads)
        card = shop.store.card("a")
        for path in files_of(store, "a"):
            if path.name == "model.onnx":
                os.truncate(shutil.copy(path, path.with_suffix(".tmp")), 10)
                path.with_suffix(".tmp").replace(path)
        with pytest.raises(QworkerError):
            await shop.loader.load(card)
        shop.check()
        assert shop.zone.peak == 0, "nothing was booked for bytes that are not there"
