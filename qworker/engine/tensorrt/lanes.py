"""Execution lanes: a stream each, and one block of device memory that all engines share, one at a time.

An execution needs scratch memory, and room for its inputs and outputs, only while it runs. With a block for
each lane instead of one for each engine, N engines cost N times their weights and one arena.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from qworker.engine.tensorrt.gpu import Gpu
from qworker.errors import DeviceMemoryFull


class Block:
    """Device memory of one lane that grows to what is asked for. Whoever has the lane may call it.

    ``moves`` counts how often it was somewhere else: an address is good for as long as it stays the same.
    """

    def __init__(self, gpu: Gpu, stream: Any) -> None:
        self._gpu = gpu
        self._stream = stream
        self._buffer: Any = None
        self.nbytes = 0
        self.address = 0
        self.moves = 0

    def reserve(self, nbytes: int) -> None:
        """Have at least ``nbytes``. Nothing may run on the lane. Raises DeviceMemoryFull, and has none then."""
        if nbytes > self.nbytes:
            self.resize(nbytes)

    def resize(self, nbytes: int) -> None:
        """Have ``nbytes`` exactly. What was there goes back first: the two need not fit side by side."""
        if nbytes == self.nbytes:
            return
        self.moves += 1
        if self._buffer is not None:
            buffer, self._buffer, self.nbytes, self.address = self._buffer, None, 0, 0
            with self._gpu.errors():
                buffer.close(self._stream)
            self._gpu.drain(self._stream)
        if nbytes:
            self._buffer = self._gpu.allocate(nbytes, self._stream)
            self.nbytes, self.address = nbytes, int(self._buffer.handle)


class Lane:
    """A stream, an event to wait for it, and its share of the arena. One run has it at a time."""

    def __init__(self, number: int, gpu: Gpu) -> None:
        self.number = number
        self.stream = gpu.stream()
        self.handle = int(self.stream.handle)
        self.event = gpu.event(self.stream)
        self.block = Block(gpu, self.stream)


@dataclass(slots=True, eq=False)
class _Asked:
    """Somebody who waits for a lane: any, or the one of that number."""

    number: int | None
    lane: Lane | None = None


class Room(Protocol):
    """Where an engine's executions have their scratch memory, inputs and outputs."""

    shared: bool

    def of(self, lane: Lane) -> Block: ...
    def close(self) -> None:
        """The engine is gone. Nothing of it may run."""
        ...


class Lanes:
    """The lanes of one device.

    Owned here, under the lock: which lanes are idle, who waits for one, and what the engines need. A lane's
    block belongs to whoever has the lane.
    """

    def __init__(self, gpu: Gpu, count: int, arena: int) -> None:
        """``arena``: bytes that the shared blocks may take together; 0 gives each engine blocks of its own."""
        self._gpu = gpu
        self._per_lane = arena // count
        self._changed = threading.Condition()
        self._lanes = tuple(Lane(number, gpu) for number in range(count))
        self.aside = gpu.stream()
        """For what loads do before they run: it keeps no lane from its work."""
        self._idle = list(self._lanes)
        self._asking: list[_Asked] = []
        self._needs: dict[int, int] = {}
        self._tickets = 0

    @property
    def all(self) -> Sequence[Lane]:
        return self._lanes

    @property
    def arena_bytes(self) -> int:
        """What the shared blocks take now."""
        return sum(lane.block.nbytes for lane in self._lanes)

    @property
    def need(self) -> int:
        """The largest need of those that share."""
        with self._changed:
            return max(self._needs.values(), default=0)

    @contextmanager
    def take(self, number: int | None = None) -> Generator[Lane]:
        """Wait for any lane, or for that one, and have it alone. First come, first served: a load that warms up
        one lane after the other must not wait for as long as traffic takes them again and again.
        """
        lane = self._wait(number)
        try:
            yield lane
        finally:
            self._put_back(lane)

    def room(self, need: int) -> Room:
        """Where an engine runs that needs ``need`` bytes on a lane: in the arena if it may grow to that."""
        if need > self._per_lane:
            return _PrivateRoom(self._gpu)
        with self._changed:
            self._tickets += 1
            self._needs[self._tickets] = need
            return _SharedRoom(self, self._tickets)

    def fit(self) -> None:
        """Shrink the arena to what those that are left need; busy lanes follow when their run ends."""
        with self._changed:
            spare, self._idle = self._idle, []
        for lane in spare:
            self._put_back(lane)

    def dismiss(self, ticket: int) -> None:
        with self._changed:
            del self._needs[ticket]

    def _wait(self, number: int | None) -> Lane:
        asked = _Asked(number)
        with self._changed:
            self._asking.append(asked)
            self._hand_out()
            try:
                while asked.lane is None:
                    self._changed.wait()
            except BaseException:
                self._withdraw(asked)
                raise
            return asked.lane

    def _hand_out(self) -> None:
        """Give idle lanes to those that have waited longest for them."""
        for asked in list(self._asking):
            lane = next((lane for lane in self._idle if asked.number in (None, lane.number)), None)
            if lane is not None:
                self._idle.remove(lane)
                self._asking.remove(asked)
                asked.lane = lane
                self._changed.notify_all()

    def _withdraw(self, asked: _Asked) -> None:
        if asked.lane is None:
            self._asking.remove(asked)
        else:
            self._idle.append(asked.lane)
            self._hand_out()

    def _put_back(self, lane: Lane) -> None:
        try:
            need = self.need
            if lane.block.nbytes > need and self._gpu.lost is None:
                with suppress(DeviceMemoryFull):  # somebody was faster: the next run asks again
                    lane.block.resize(need)
        finally:
            with self._changed:
                self._idle.append(lane)
                self._hand_out()


class _SharedRoom:
    shared = True

    def __init__(self, lanes: Lanes, ticket: int) -> None:
        self._lanes = lanes
        self._ticket = ticket

    def of(self, lane: Lane) -> Block:
        return lane.block

    def close(self) -> None:
        self._lanes.dismiss(self._ticket)


class _PrivateRoom:
    """Blocks of its own: the arena is off, or this engine needs more than its part of it."""

    shared = False

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._blocks: dict[int, Block] = {}  # whoever has the lane has its block

    def of(self, lane: Lane) -> Block:
        block = self._blocks.get(lane.number)
        if block is None:
            block = self._blocks[lane.number] = Block(self._gpu, lane.stream)
        return block

    def close(self) -> None:
        for block in self._blocks.values():
            if self._gpu.lost is None:
                block.resize(0)
        self._blocks.clear()
