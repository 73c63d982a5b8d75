"""Page-locked host memory, which the device copies from and to without a detour; kept, since it is slow to get."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qworker.engine.tensorrt.gpu import Gpu

SMALLEST: Final = 64 << 10


class Pinned:
    """One piece of page-locked memory."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.nbytes = int(buffer.size)
        self.address = int(buffer.handle)

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """A view of the memory, valid until it goes back to the pool."""
        count = int(np.prod(shape, dtype=np.int64))
        raw = memoryview((ctypes.c_byte * self.nbytes).from_address(self.address))
        return np.frombuffer(raw, dtype, count, offset).reshape(shape)


class PinnedPool:
    """Pieces of powers of two, at most ``keep`` idle bytes of them. Any thread may take and give.

    Owned here, under the lock: ``_idle`` and the sums.
    """

    def __init__(self, gpu: Gpu, keep: int) -> None:
        self._gpu = gpu
        self._keep = keep
        self._lock = threading.Lock()
        self._idle: dict[int, list[Pinned]] = {}
        self._idle_bytes = 0
        self._all_bytes = 0

    @property
    def nbytes(self) -> int:
        """All that is page-locked now, idle or not."""
        return self._all_bytes

    def take(self, nbytes: int, stream: Any) -> Pinned:
        """At least ``nbytes``. Raises DeviceMemoryFull when the host cannot lock that much."""
        size = max(SMALLEST, 1 << max(0, nbytes - 1).bit_length())
        with self._lock:
            ready = self._idle.get(size)
            if ready:
                self._idle_bytes -= size
                return ready.pop()
        with self._gpu.errors():
            made = Pinned(self._gpu.pinned.allocate(size, stream=stream))
        with self._lock:
            self._all_bytes += size
        return made

    def give(self, piece: Pinned, stream: Any) -> None:
        """``piece`` may be used by others: nothing on the device reads or writes it any more."""
        with self._lock:
            if self._idle_bytes + piece.nbytes <= self._keep or self._gpu.lost is not None:
                self._idle.setdefault(piece.nbytes, []).append(piece)
                self._idle_bytes += piece.nbytes
                return
            self._all_bytes -= piece.nbytes
        with self._gpu.errors():
            piece.buffer.close(stream)

    def clear(self, stream: Any) -> None:
        """Unlock what is idle."""
        with self._lock:
            pieces = [piece for ready in self._idle.values() for piece in ready]
            self._idle.clear()
            self._idle_bytes = 0
            self._all_bytes -= sum(piece.nbytes for piece in pieces)
        for piece in pieces:
            with self._gpu.errors():
                piece.buffer.close(stream)
