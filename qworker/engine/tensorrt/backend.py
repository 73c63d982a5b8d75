"""The backend: plans in, engines out, and an account of the device's memory."""

from __future__ import annotations

import mmap
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from numpy.typing import NDArray

from qworker.engine import warmup
from qworker.engine.base import Engine, ModelSource
from qworker.engine.tensorrt.engine import Shop, TensorRtEngine
from qworker.engine.tensorrt.gpu import Gpu
from qworker.engine.tensorrt.lanes import Lanes
from qworker.engine.tensorrt.ledger import Entry, Ledger, Statement
from qworker.engine.tensorrt.library import Library
from qworker.engine.tensorrt.pinned import PinnedPool
from qworker.engine.tensorrt.plan import HEADER_BYTES, check_header
from qworker.engine.tensorrt.poison import PoisonBook
from qworker.errors import DeviceLost, DeviceMemoryFull, DeviceUnavailable, InferenceFailed, InvalidInput, LoadFailed

log = structlog.get_logger(__name__)

_LOOKS: Final = 10
_LOOK_PAUSE: Final = 0.05
"""The driver may give memory back a little later than it says."""


@dataclass(frozen=True, slots=True)
class Options:
    """How engines run. Sizes in bytes."""

    lanes: int = 2
    """Executions at once on the device."""
    arena: int = 0
    """What the lanes' shared blocks may take together; 0: each engine has blocks of its own."""
    graphs: bool = False
    """Try CUDA graphs for shapes that come again, and keep those that are faster."""
    pinned_keep: int = 256 << 20
    """Idle page-locked host memory that is kept."""
    drain_timeout: float = 60.0
    """Seconds that a run may go on after its engine was closed, before the device counts as lost."""
    poison: Path | None = None
    """File that remembers the inputs which broke the device."""


class TensorRtBackend:
    """Makes engines on one GPU. Any thread may call it; everything here may block.

    Owned here, under the lock: the ledger, and which closed engines are not freed yet.
    """

    def __init__(self, gpu: Gpu, library: Library, options: Options | None = None) -> None:
        """Both come first: ``gpu`` from ``open_gpu``, then ``library``."""
        self._gpu = gpu
        self._library = library
        self._options = options or Options()
        self._changed = threading.Condition()
        self._living: dict[int, TensorRtEngine] = {}
        self._marks: dict[int, tuple[int, int]] = {}
        self._runtimes: dict[bool, Any] = {}
        self._last_drift = 0

    # --- life ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take streams, and look at what is used before the first engine. Raises DeviceUnavailable."""
        gpu, options = self._gpu, self._options
        gpu.enter()
        lanes = Lanes(gpu, options.lanes, options.arena)
        poison = PoisonBook(options.poison)
        self._shop = Shop(gpu, self._library, lanes, PinnedPool(gpu, options.pinned_keep), poison, options.graphs)
        self._runtime(host_code=False)
        memory = gpu.memory()
        self._ledger = Ledger(memory.used, memory.total)

    def close(self) -> None:
        """Give everything back, engines that nobody closed too."""
        if self._gpu.lost is not None:
            return  # the process's end does it
        for living in list(self._living.values()):
            living.close()
        self.trim()
        self._shop.pinned.clear(self._shop.lanes.aside)

    @property
    def name(self) -> str:
        return "tensorrt"

    # --- the contract ----------------------------------------------------------------------------

    def load(self, source: ModelSource) -> TensorRtEngine:
        """An engine of a plan, not warmed up yet.

        Raises LoadFailed with TensorRT's words, DeviceMemoryFull when it may fit later.
        """
        self._gpu.enter()
        with self._changed:
            mark, before = self._ledger.begin(), self.used_bytes()
        made = TensorRtEngine(source.model, self._shop, self._freed)
        ticket = id(made)
        with self._changed:
            self._living[ticket] = made
        try:
            made.open(lambda: self._deserialize(source))
        except BaseException as exc:
            with self._changed:
                self._ledger.end()
            self._abandon(made, exc)
            if isinstance(exc, InferenceFailed):
                raise LoadFailed(f"{self._library.name} does not load this plan: {exc}") from exc
            raise
        with self._changed:
            self._ledger.end()
            shared = made.need * self._options.lanes if made.shared else 0
            self._ledger.enter(ticket, Entry(source.model, made.weights, shared, measured=False))
            self._marks[ticket] = (mark, before)
        self._measure(ticket)
        return made

    def warm_up(self, engine: Engine, sample: Mapping[str, NDArray[Any]] | None) -> bool:
        """Run every profile at its least, best and largest shapes, and on ``sample`` where it suits."""
        warmed = engine
        assert isinstance(warmed, TensorRtEngine), "one of ours"
        warmed.warm_up()
        if sample is not None:
            try:
                warmed.run(warmup.sample_tensors(warmed.signature, sample))
            except InvalidInput as exc:
                log.info("warm_up.sample_unsuitable", model=warmed.model, reason=str(exc))
        self._measure(id(warmed))
        return True

    def used_bytes(self) -> int:
        """Used bytes of the device without the arena, which is booked apart."""
        self._gpu.enter()
        return self._gpu.memory().used - self._shop.lanes.arena_bytes

    def trim(self) -> None:
        """Give back what closed engines had, once their last runs have ended, and look whether all came."""
        self._gpu.enter()
        self._wait_for_freed()
        self._shop.lanes.fit()
        self._gpu.trim()
        self._look()

    # --- the operator's view ---------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The device and its account."""
        statement = self.statement()
        return {
            "device": self._gpu.name,
            "uuid": self._gpu.uuid,
            "compute_capability": self._gpu.compute_capability,
            "runtime": self._library.name,
            "lost": self._gpu.lost,
            "lanes": self._options.lanes,
            "arena": "shared" if self._options.arena else "private",
            "arena_reserved": self._options.arena,
            "pinned": self._shop.pinned.nbytes,
            "graphs": sum(living.graphs_in_use for living in list(self._living.values())),
            "memory": {**asdict(statement), "engines": [asdict(entry) for entry in statement.engines]},
        }

    def statement(self) -> Statement:
        """What is used, against what we believe to hold."""
        self._gpu.enter()
        with self._changed:
            return self._ledger.statement(self._gpu.memory().used, self._shop.lanes.arena_bytes)

    # --- inside ----------------------------------------------------------------------------------

    def _deserialize(self, source: ModelSource) -> Any:
        """Blocks for long, with the GIL released: other engines run meanwhile."""
        content = source.mapped if source.mapped is not None else source.content
        if content is None:
            content = _mapped(source.path)
        check_header(bytes(content[:HEADER_BYTES]))
        self._library.complaints.clear()
        made = self._runtime(host_code=source.host_code).deserialize_cuda_engine(content)
        if made is None:
            self._gpu.check_alive()
            said = str(self._library.complaints)
            if "out of memory" in said.lower():
                raise DeviceMemoryFull(f"the device has no memory left for the plan: {said}")
            raise LoadFailed(f"{self._library.name} does not load this plan: {said}")
        return made

    def _runtime(self, *, host_code: bool) -> Any:
        """One for all plans, and one for those that bring code of their own and are trusted with it."""
        with self._changed:
            if host_code not in self._runtimes:
                try:
                    runtime = self._library.trt.Runtime(self._library.logger)
                except TypeError as exc:  # what the bindings make of a null pointer
                    raise DeviceUnavailable(f"{self._library.name} does not start: {self._library.complaints}") from exc
                runtime.engine_host_code_allowed = host_code
                self._runtimes[host_code] = runtime
            return self._runtimes[host_code]

    def _abandon(self, made: TensorRtEngine, why: BaseException) -> None:
        """A load failed: nothing of it stays, not even in the variables of the calls that ``why`` came through."""
        traceback.clear_frames(why.__traceback__)
        if self._gpu.lost is not None:
            return
        made.close()
        self.trim()

    def _freed(self, made: TensorRtEngine) -> None:
        """The engine's objects are gone; its bytes are back after the next trim."""
        ticket = id(made)
        with self._changed:
            self._living.pop(ticket, None)
            self._marks.pop(ticket, None)
            self._ledger.gone(ticket)
            self._changed.notify_all()

    def _measure(self, ticket: int) -> None:
        """Correct what the ledger says of an engine, where only its load can have moved anything."""
        with self._changed:
            mark, before = self._marks.get(ticket, (-1, 0))
            self._ledger.measured(ticket, mark, self.used_bytes() - before)

    def _wait_for_freed(self) -> None:
        """Until no closed engine still runs. Raises DeviceLost when one does not come to an end."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: not any(living.closed for living in self._living.values()), self._options.drain_timeout
            )
        if not done:
            self._gpu.lost = self._gpu.lost or "a run without an end"
            raise DeviceLost(
                f"a run goes on {self._options.drain_timeout:g} s after its engine was closed: this process ends"
            )

    def _look(self) -> None:
        """Compare by level, not by change: bytes count as free when the driver says so."""
        statement = self.statement()
        for _ in range(_LOOKS):
            if statement.in_order or self._ledger.loading:
                return
            time.sleep(_LOOK_PAUSE)
            statement = self.statement()
        if abs(statement.drift - self._last_drift) > 1 << 20:  # told once, not at every unload
            self._last_drift = statement.drift
            log.warning(
                "device.drift",
                drift=statement.drift,
                used=statement.used,
                baseline=statement.baseline,
                arena=statement.arena,
                engines=len(statement.engines),
            )


def _mapped(path: Path) -> memoryview:
    """The file, mapped: TensorRT reads it where it lies, and it is unmapped with the last reference."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as exc:  # ValueError: an empty file cannot be mapped
        raise LoadFailed(f"{path} cannot be read: {exc}") from exc
