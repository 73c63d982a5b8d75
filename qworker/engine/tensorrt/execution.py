"""One execution context of a plan, on one lane, at one profile: from arrays to arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qworker.engine.tensorrt.gpu import Gpu
from qworker.engine.tensorrt.graphs import Graphs
from qworker.engine.tensorrt.lanes import Block, Lane
from qworker.engine.tensorrt.layout import Port, Ports, Shape, aligned, place
from qworker.engine.tensorrt.library import Library, output_allocator
from qworker.engine.tensorrt.pinned import Pinned, PinnedPool
from qworker.engine.tensorrt.plan import port_bytes
from qworker.errors import DeviceMemoryFull, InferenceFailed, InvalidInput
from qworker.wire.datatypes import dtype_of

_HOST_VALUES: Final = 64
"""Room for the values of an input that is a shape: no tensor has more dims."""

Arrays = Mapping[str, NDArray[Any]]


class Execution:
    """Whoever has the lane may run it. TensorRT's objects live in attributes alone, never in a local variable of
    a call that may fail: an exception keeps the variables of its calls, and a kept context keeps its memory.
    """

    def __init__(
        self, gpu: Gpu, library: Library, pinned: PinnedPool, ports: Ports, number: int, *, graphs: bool
    ) -> None:
        self._gpu = gpu
        self._library = library
        self._pinned = pinned
        self._ports = ports
        self._number = number
        self._context: Any = None
        self._allocator: Any = None
        self._grown: dict[str, Any] = {}  # outputs whose size only the run tells, and
        self._grown_shapes: dict[str, Shape] = {}
        self._on_host: dict[str, NDArray[Any]] = {}
        self._sizes: dict[str, int] = {}
        self._offsets: dict[str, int] = {}
        self._scratch = 0
        self._place = (-1, -1)  # of the block: which one, and its moves
        self._shapes: tuple[Shape, ...] = ()
        self._stream: Any = None
        self._graphs = Graphs(gpu) if graphs else None

    # --- life ------------------------------------------------------------------------------------

    def open(self, engine: Any, lane: Lane, aside: Any, scratch: int) -> None:
        """Make the context for ``lane``, which may be at work meanwhile.

        Raises DeviceMemoryFull or InferenceFailed with TensorRT's words.
        """
        self._stream = lane.stream
        strategy = self._library.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._library.complaints.clear()
        self._context = engine.create_execution_context(strategy)
        if self._context is None:
            raise self._refusal("no execution context can be made of the plan")
        if not self._context.set_optimization_profile_async(self._number, int(aside.handle)):
            raise self._refusal(f"profile {self._number} cannot be chosen")
        self._gpu.drain(aside)
        self._scratch = aligned(scratch)
        self._lay_out()

    @property
    def need(self) -> int:
        """Bytes of the lane's block: scratch, and all inputs and outputs at their largest."""
        return max(self._scratch + sum(aligned(max(size, 1)) for size in self._sizes.values()), 1)

    @property
    def graphs_in_use(self) -> int:
        return 0 if self._graphs is None else self._graphs.in_use

    def close(self) -> None:
        """Drop the context. Nothing may run on the lane."""
        if self._graphs is not None:
            self._graphs.clear()
        self._context = None
        self._allocator = None
        self._release_grown()

    def _lay_out(self) -> None:
        """Find out what goes where, at the profile's largest shapes."""
        ranges = self._ports.profiles[self._number]
        for port in self._ports.inputs:
            if port.on_host:
                self._keep_on_host(port)
                continue
            if not self._context.set_input_shape(port.name, ranges[port.name].max):
                raise self._refusal(f"input {port.name!r} does not take its profile's largest shape")
            self._sizes[port.name] = port_bytes(port, ranges[port.name].max)
        for port in self._ports.outputs:
            if port.on_host:
                self._keep_on_host(port)
                continue
            most = int(self._context.get_max_output_size(port.name))
            if most < 0 or self._is_open(port):
                self._let_grow(port.name)
            else:
                self._sizes[port.name] = most
        self._shapes = ()
        self._offsets = place(self._sizes)[0]

    def _is_open(self, port: Port) -> bool:
        """Whether the output's size depends on values, with all inputs' shapes known."""
        return not any(p.on_host for p in self._ports.inputs) and -1 in tuple(self._context.get_tensor_shape(port.name))

    def _keep_on_host(self, port: Port) -> None:
        values = self._on_host[port.name] = np.zeros(_HOST_VALUES, dtype_of(port.datatype))
        self._address(port.name, values.ctypes.data)

    def _let_grow(self, name: str) -> None:
        if self._allocator is None:
            self._allocator = output_allocator(self._library.trt, self._grow, self._grown_shapes.__setitem__)
        if not self._context.set_output_allocator(name, self._allocator):
            raise self._refusal(f"output {name!r} takes no allocator")
        self._grown[name] = None

    def _grow(self, name: str, nbytes: int) -> int:
        """Called by TensorRT while it enqueues; 0 tells it that there is no memory."""
        buffer = self._grown.get(name)
        if buffer is None or buffer.size < nbytes:
            self._release_grown(name)
            try:
                buffer = self._grown[name] = self._gpu.allocate(max(nbytes, 1), self._stream)
            except DeviceMemoryFull:
                return 0
        return int(buffer.handle)

    def _release_grown(self, name: str | None = None) -> None:
        for each in list(self._grown) if name is None else [name]:
            buffer, self._grown[each] = self._grown[each], None
            if buffer is not None and self._gpu.lost is None:
                with self._gpu.errors():
                    buffer.close(self._stream)

    # --- running ---------------------------------------------------------------------------------

    def run(self, lane: Lane, block: Block, inputs: Arrays, wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Run once, and wait. Raises InvalidInput, InferenceFailed, DeviceMemoryFull, DeviceLost."""
        staged: list[Pinned] = []
        try:
            self._library.complaints.clear()
            self._settle(block)
            self._feed(lane, block, inputs, staged)
            enqueue, collect = partial(self._enqueue, lane), partial(self._collect, lane, block, wanted, staged)
            if self._graphs is not None and not self._on_host and not self._grown:
                return self._graphs.run(self._shapes, lane.stream, enqueue, collect)
            enqueue()
            return collect()
        except BaseException:
            if self._gpu.lost is None:
                self._gpu.drain(lane.stream)  # before the memory that it may still read is anybody else's
            raise
        finally:
            self._release_grown()
            for piece in staged:
                self._pinned.give(piece, lane.stream)

    def _settle(self, block: Block) -> None:
        """Have the block, and tell the context where it is now."""
        block.reserve(self.need)
        place_now = (id(block), block.moves)
        if place_now == self._place:
            return
        if self._graphs is not None:
            self._graphs.clear()
        if self._scratch:
            self._context.set_device_memory(block.address, self._scratch)
        for name, offset in self._offsets.items():
            self._address(name, block.address + self._scratch + offset)
        self._place = place_now

    def _feed(self, lane: Lane, block: Block, inputs: Arrays, staged: list[Pinned]) -> None:
        on_device = [port for port in self._ports.inputs if not port.on_host]
        offsets, total = place({port.name: inputs[port.name].nbytes for port in on_device})
        piece = self._pinned.take(total, lane.stream)
        staged.append(piece)
        self._set_shapes(inputs)
        for port in on_device:
            array = inputs[port.name]
            if array.nbytes:
                offset = offsets[port.name]
                np.copyto(piece.array(offset, array.dtype, array.shape), array)
                target = block.address + self._scratch + self._offsets[port.name]
                self._gpu.copy_in(target, piece.address + offset, array.nbytes, lane.stream)

    def _set_shapes(self, inputs: Arrays) -> None:
        for name, values in self._on_host.items():
            if name in inputs:
                values[: inputs[name].size] = inputs[name].reshape(-1)
        shapes = tuple(inputs[port.name].shape for port in self._ports.inputs)
        if shapes == self._shapes and not self._on_host:
            return
        self._shapes = ()
        for port, shape in zip(self._ports.inputs, shapes, strict=True):
            if not self._context.set_input_shape(port.name, shape):
                raise InvalidInput(f"the plan does not take the shape {shape} for {port.name!r}: {self._words()}")
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as exc:  # what it raises when values, and not only shapes, do not fit
            raise InvalidInput(f"the plan cannot work with these inputs: {exc}: {self._words()}") from exc
        if missing:
            raise InvalidInput(f"the plan cannot work with these shapes, because of {', '.join(map(str, missing))}")
        self._shapes = shapes

    def _enqueue(self, lane: Lane) -> None:
        if not self._context.execute_async_v3(lane.handle):
            raise self._refusal("the plan failed on these inputs")

    def _collect(
        self, lane: Lane, block: Block, wanted: Sequence[str], staged: list[Pinned]
    ) -> dict[str, NDArray[Any]]:
        ports = [port for port in self._ports.outputs if port.name in wanted]
        shapes = {port.name: self._shape_of(port) for port in ports}
        sizes = {port.name: port_bytes(port, shapes[port.name]) for port in ports if not port.on_host}
        offsets, total = place(sizes)
        piece = self._pinned.take(total, lane.stream)
        staged.append(piece)
        for name, nbytes in sizes.items():
            if nbytes:
                grown = self._grown.get(name)
                source = int(grown.handle) if grown is not None else block.address + self._scratch + self._offsets[name]
                self._gpu.copy_out(piece.address + offsets[name], source, nbytes, lane.stream)
        self._gpu.wait(lane.stream, lane.event)
        return {port.name: self._result(port, shapes[port.name], piece, offsets) for port in ports}

    def _shape_of(self, port: Port) -> Shape:
        if port.name in self._grown:
            return self._grown_shapes[port.name]
        return tuple(int(dim) for dim in self._context.get_tensor_shape(port.name))

    def _result(self, port: Port, shape: Shape, piece: Pinned, offsets: Mapping[str, int]) -> NDArray[Any]:
        dtype = dtype_of(port.datatype)
        if port.on_host:
            values = self._on_host[port.name]
            return values[: int(np.prod(shape, dtype=np.int64))].reshape(shape).copy()
        return piece.array(offsets[port.name], dtype, shape).copy()

    def _address(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise self._refusal(f"tensor {name!r} takes no memory")

    def _refusal(self, what: str) -> InferenceFailed | DeviceMemoryFull:
        """TensorRT said no. Raises DeviceLost when the device is what failed."""
        self._gpu.check_alive()
        said = self._words()
        if "memory" in said.lower() and "out of" in said.lower():
            return DeviceMemoryFull(f"the device has no memory left for this: {said}")
        return InferenceFailed(f"{what}: {said}")

    def _words(self) -> str:
        return str(self._library.complaints)
