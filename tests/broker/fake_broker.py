"""A scripted AMQP server on loopback: shakes hands like RabbitMQ, then does what a test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pamqp import frame
from pamqp.base import Frame
from pamqp.commands import Channel, Connection
from pamqp.heartbeat import Heartbeat

from qworker.broker.fast.link import Link, open_link
from qworker.broker.fast.url import parse_address

T = TypeVar("T", bound=Frame)


class Peer:
    """The server's end of one connection. Ignores heartbeats, but counts them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.heartbeats = 0
        self.start_ok: Connection.StartOk

    async def read(self) -> tuple[int, Any]:
        while True:
            head = await self.reader.readexactly(7)
            rest = await self.reader.readexactly(int.from_bytes(head[3:7], "big") + 1)
            _, channel, value = frame.unmarshal(head + rest)
            if not isinstance(value, Heartbeat):
                return channel, value
            self.heartbeats += 1

    async def expect(self, kind: type[T]) -> T:
        _, value = await self.read()
        assert isinstance(value, kind), f"expected {kind.name}, found {value}"
        return value

    def send(self, channel: int, *calls: Frame) -> None:
        for call in calls:
            self.writer.write(frame.marshal(call, channel))

    async def shake_hands(self, *, heartbeat: int = 0, frame_max: int = 131_072, channel_max: int = 2047) -> None:
        assert await self.reader.readexactly(8) == b"AMQP\x00\x00\x09\x01"
        self.send(0, Connection.Start(mechanisms="PLAIN AMQPLAIN EXTERNAL"))
        self.start_ok = await self.expect(Connection.StartOk)
        self.send(0, Connection.Tune(channel_max, frame_max, heartbeat))
        self.tune_ok = await self.expect(Connection.TuneOk)
        self.open = await self.expect(Connection.Open)
        self.send(0, Connection.OpenOk())

    async def open_channel(self) -> None:
        await self.expect(Channel.Open)
        self.send(1, Channel.OpenOk())


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def broker(script: Script) -> AsyncGenerator[int]:
    """Serve ``script`` to each connection; yields the port. What a script raises fails the test."""
    failures: list[BaseException] = []
    running: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await script(Peer(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except AssertionError as error:
            failures.append(error)
        finally:
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(running):
            task.cancel()
        if running:
            await asyncio.wait(running)
        await server.wait_closed()
    if failures:
        raise failures[0]


async def connect(
    port: int, *, heartbeat: int = 0, options: str = "", user: str = "", connect_timeout: float = 5.0
) -> Link:
    address = parse_address(f"amqp://{user}127.0.0.1:{port}/{options}")
    return await open_link(address, name="test", heartbeat=heartbeat, connect_timeout=connect_timeout, max_tick=0.25)


@asynccontextmanager
async def linked(script: Script, **settings: Any) -> AsyncGenerator[Link]:
    """A link to a broker that runs ``script``; ended at the end."""
    async with broker(script) as port:
        link = await connect(port, **settings)
        try:
            yield link
        finally:
            link.end(None)


async def forever(peer: Peer) -> None:
    """Answer a goodbye, ignore the rest."""
    while True:
        channel, value = await peer.read()
        if isinstance(value, Connection.Close):
            peer.send(channel, Connection.CloseOk())
        elif isinstance(value, Channel.Close):
            peer.send(channel, Channel.CloseOk())
