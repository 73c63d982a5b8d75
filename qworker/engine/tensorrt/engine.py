"""One loaded plan: executions for each lane and profile, and an end that gives every byte back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from qworker.engine.tensorrt.execution import Arrays, Execution
from qworker.engine.tensorrt.gpu import Gpu
from qworker.engine.tensorrt.lanes import Lanes, Room
from qworker.engine.tensorrt.layout import Ports, choose_profile, out_of_range
from qworker.engine.tensorrt.library import Library
from qworker.engine.tensorrt.pinned import PinnedPool
from qworker.engine.tensorrt.plan import ports_of, sizes_of, value_ranges
from qworker.engine.tensorrt.poison import PoisonBook
from qworker.errors import DeviceLost, DeviceMemoryFull, InferenceFailed, InvalidInput, OutOfMemory
from qworker.wire.datatypes import dtype_of
from qworker.wire.messages import Tensor
from qworker.wire.signature import Signature, check_outputs

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Shop:
    """What all engines of a device share."""

    gpu: Gpu
    library: Library
    lanes: Lanes
    pinned: PinnedPool
    poison: PoisonBook
    graphs: bool


class TensorRtEngine:
    """Threads may call ``run`` at once: each run has a lane to itself.

    Owned here, under the lock: ``_runs`` and ``_closed``. What is closed while it runs is freed by the last run.
    """

    def __init__(self, model: str, shop: Shop, freed: Callable[[TensorRtEngine], None]) -> None:
        self.model = model
        self._shop = shop
        self._freed = freed
        self._lock = threading.Lock()
        self._runs = 0
        self._closed = False
        self._engine: Any = None
        self._executions: dict[tuple[int, int], Execution] = {}
        self._room: Room | None = None
        self._ports = Ports((), (), ())
        self._signature = Signature((), ())
        self.weights = 0

    # --- loading ---------------------------------------------------------------------------------

    def open(self, take: Callable[[], Any]) -> None:
        """Have what ``take`` deserializes, and an execution for each lane and profile. After a failure: close it."""
        shop = self._shop
        self._engine = take()
        self._ports = ports_of(self._engine, shop.library)
        self._signature = self._ports.signature()
        sizes = sizes_of(self._engine, shop.library, self._ports)
        self.weights = sizes.weights
        for lane in shop.lanes.all:
            for number in range(len(self._ports.profiles)):
                execution = Execution(shop.gpu, shop.library, shop.pinned, self._ports, number, graphs=shop.graphs)
                self._executions[lane.number, number] = execution
                execution.open(self._engine, lane, shop.lanes.aside, sizes.scratch)
        self._room = shop.lanes.room(self.need)

    @property
    def need(self) -> int:
        """Bytes of a lane's block."""
        return max((execution.need for execution in self._executions.values()), default=1)

    @property
    def shared(self) -> bool:
        """Whether it runs in the arena."""
        return self._room is not None and self._room.shared

    @property
    def graphs_in_use(self) -> int:
        return sum(execution.graphs_in_use for execution in self._executions.values())

    def warm_up(self) -> None:
        """Run each profile at its least, best and largest shapes on each lane: kernels load when they first run.

        The largest come first: what does not fit is known at once. Raises like :meth:`run`.
        """
        with self._running():
            for lane in self._shop.lanes.all:
                for number, ranges in enumerate(self._ports.profiles):
                    for at in ("max", "opt", "min"):
                        shapes = {name: getattr(bounds, at) for name, bounds in ranges.items()}
                        self._execute(number, self._made_up(number, at, shapes), (), lane.number)

    def _made_up(self, number: int, at: str, shapes: dict[str, tuple[int, ...]]) -> Arrays:
        """Ones, which suit as an index too; values that the profile names for an input that is a shape."""
        feeds: dict[str, NDArray[Any]] = {}
        for port in self._ports.inputs:
            values = value_ranges(self._engine, port.name, number) if port.on_host else None
            if values is None:
                feeds[port.name] = np.ones(shapes[port.name], dtype_of(port.datatype))
            else:
                chosen = values[("min", "opt", "max").index(at)]
                feeds[port.name] = np.array(chosen, dtype_of(port.datatype)).reshape(shapes[port.name])
        return feeds

    # --- the contract ----------------------------------------------------------------------------

    @property
    def signature(self) -> Signature:
        return self._signature

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[str] = ()) -> list[Tensor]:
        """Run once; the named outputs, or all, in the model's order.

        Raises InvalidInput, InferenceFailed, OutOfMemory (no memory for it now), DeviceLost.
        """
        with self._running():
            if outputs:
                check_outputs(self._signature, outputs)
            feeds = self._feeds(inputs)
            shapes = {name: array.shape for name, array in feeds.items()}
            number = choose_profile(self._ports.profiles, shapes)
            if number is None:
                raise InvalidInput(
                    f"{out_of_range(self._ports.profiles, shapes)}: send such shapes, or build another profile"
                )
            self._shop.poison.check(self.model, inputs)
            try:
                arrays = self._execute(number, feeds, outputs)
            except DeviceMemoryFull as exc:
                raise OutOfMemory(f"{self.model} did not run for want of device memory: {exc}") from exc
            except DeviceLost as lost:
                mark = self._shop.poison.add(self.model, inputs, str(lost))
                log.critical("device.lost", model=self.model, fingerprint=mark, reason=str(lost))
                raise
            return [
                Tensor(port.name, port.datatype, arrays[port.name])
                for port in self._ports.outputs
                if port.name in arrays
            ]

    def close(self) -> None:
        """Free everything, now or when the last run in progress has ended. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._runs == 0
        if idle:
            self._free()

    @property
    def closed(self) -> bool:
        """Whether it takes no more runs; its memory is back when ``freed`` was called."""
        return self._closed

    # --- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Generator[None]:
        with self._lock:
            if self._closed:
                raise InferenceFailed("the model was unloaded before this job ran: send it again")
            self._runs += 1
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                last = self._closed and self._runs == 0
            if last:
                self._free()

    def _execute(
        self, number: int, feeds: Arrays, outputs: Sequence[str], lane_number: int | None = None
    ) -> dict[str, NDArray[Any]]:
        shop = self._shop
        room = self._room
        assert room is not None, "open() has made it"
        shop.gpu.enter()
        wanted = outputs or [port.name for port in self._ports.outputs]
        with shop.lanes.take(lane_number) as lane:
            return self._executions[lane.number, number].run(lane, room.of(lane), feeds, wanted)

    def _feeds(self, inputs: Sequence[Tensor]) -> Arrays:
        given = {each.name: each for each in inputs}
        ports = self._ports.inputs
        wrong = [port for port in ports if port.name not in given or given[port.name].datatype != port.datatype]
        if wrong or len(given) != len(ports):
            expected = ", ".join(f"{port.name} {port.datatype}" for port in ports)
            found = ", ".join(f"{each.name} {each.datatype}" for each in inputs) or "nothing"
            raise InvalidInput(f"expected the inputs {expected}; found {found}: send all of them, as these types")
        return {port.name: given[port.name].array for port in ports}

    def _free(self) -> None:
        """Nothing runs: the lanes' streams are drained when a run ends. Contexts go before their engine.

        On a lost device nothing can be freed, and the process's end does it.
        """
        shop = self._shop
        try:
            shop.gpu.enter()
            for execution in self._executions.values():
                execution.close()
            self._executions.clear()
            self._engine = None
            if self._room is not None:
                self._room.close()
                self._room = None
        except DeviceLost:
            log.exception("engine.not_freed", model=self.model)
            raise
        finally:
            self._freed(self)
