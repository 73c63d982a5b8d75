"""A proxy that counts what clients ask of the broker: AMQP methods, by a parse of the frames that pass."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import TracebackType
from urllib.parse import urlsplit


class CountingProxy:
    """Listens while entered; ``url`` leads through it. ``methods`` counts by (class, method)."""

    def __init__(self, url: str) -> None:
        self._target = url
        self.methods: Counter[tuple[int, int]] = Counter()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> CountingProxy:
        self._thread.start()
        self._ready.wait()
        parts = urlsplit(self._target)
        self.url = self._target.replace(f":{parts.port}", f":{self._port}", 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def total(self) -> int:
        return sum(self.methods.values())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        parts = urlsplit(self._target)
        broker_reader, broker_writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, broker_writer, _Frames(self.methods)))
                pumps.create_task(self._pump(broker_reader, writer, None))
        except* OSError:
            pass  # one side is gone, and with it the other
        finally:
            broker_writer.close()
            writer.close()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: _Frames | None) -> None:
        while received := await reader.read(1 << 16):
            if frames is not None:
                frames.feed(received)
            writer.write(received)
            await writer.drain()
        writer.close()
        raise ConnectionResetError("the other side has closed")


class _Frames:
    """Counts the methods in a stream of frames."""

    def __init__(self, methods: Counter[tuple[int, int]]) -> None:
        self._methods = methods
        self._buffer = bytearray()
        self._greeted = False

    def feed(self, received: bytes) -> None:
        self._buffer += received
        if not self._greeted:
            if len(self._buffer) < 8:
                return
            del self._buffer[:8]  # the protocol header
            self._greeted = True
        at = 0
        while len(self._buffer) - at >= 8:
            size = int.from_bytes(self._buffer[at + 3 : at + 7], "big")
            if len(self._buffer) - at < size + 8:
                break
            if self._buffer[at] == 1:
                class_id = int.from_bytes(self._buffer[at + 7 : at + 9], "big")
                method_id = int.from_bytes(self._buffer[at + 9 : at + 11], "big")
                self._methods[class_id, method_id] += 1
            at += size + 8
        del self._buffer[:at]
