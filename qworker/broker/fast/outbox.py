"""What leaves a connection: collected over one turn of the event loop, written at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from qworker.broker.fast.frames import Buffer

_FLUSH_BYTES: Final = 256 << 10
"""Written at once when one turn of the loop collects this much, so that back-pressure is noticed."""
_WRITE_BYTES: Final = 128 << 10


class Outbox:
    """Collects buffers for ``transport`` and writes them together at the end of the turn."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.wrote = True
        """Set by each write; for whoever sends heartbeats."""
        self._loop = asyncio.get_running_loop()
        self._buffers: list[Buffer] = []
        self._nbytes = 0
        self._before_flush: list[Callable[[], None]] = []
        self._scheduled = False

    def write(self, buffers: list[Buffer], nbytes: int) -> None:
        """Queue ``buffers`` (of ``nbytes`` in all, roughly) for the end of this turn of the loop."""
        self._buffers += buffers
        self._nbytes += nbytes
        if self._nbytes >= _FLUSH_BYTES:
            self._write_out()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def before_flush(self, call: Callable[[], None]) -> None:
        """Have ``call`` write what it has collected at the end of this turn of the loop."""
        self._before_flush.append(call)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        calls, self._before_flush = self._before_flush, []
        for call in calls:
            call()
        self._scheduled = False
        self._write_out()

    def detach(self) -> None:
        """The connection has ended: what is queued goes nowhere."""
        self.transport = None
        self._buffers.clear()
        self._before_flush.clear()

    def _write_out(self) -> None:
        buffers, self._buffers = self._buffers, []
        nbytes, self._nbytes = self._nbytes, 0
        transport = self.transport
        if not buffers or transport is None:
            return
        self.wrote = True
        if nbytes <= _WRITE_BYTES:
            transport.writelines(buffers)
            return
        # asyncio joins what it is given before Python 3.12. Joined whole, a large body grows the heap so far that
        # the allocator gives the pages back each time, and faulting them in again costs more than all the rest.
        part: list[Buffer] = []
        size = 0
        for buffer in buffers:
            part.append(buffer)
            size += len(buffer)
            if size >= _WRITE_BYTES:
                transport.writelines(part)
                part, size = [], 0
        if part:
            transport.writelines(part)
