"""Taskiq's client."""

from __future__ import annotations

import argparse
import asyncio
import base64

import aio_pika
import msgpack

from tests.bench import drive
from tests.bench.peers.taskiq_app import ANSWERS, broker, echo


async def request(chosen: argparse.Namespace) -> None:
    async with await aio_pika.connect(chosen.url) as connection:
        channel = await connection.channel()
        answers = await channel.declare_queue(ANSWERS, exclusive=True, auto_delete=True)
        waiting: dict[str, asyncio.Future[bytes]] = {}
        early: dict[str, bytes] = {}
        loop = asyncio.get_running_loop()

        async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            waiter = waiting.pop(message.correlation_id or "", None)
            if waiter is None:
                early[message.correlation_id or ""] = message.body
            elif not waiter.done():
                waiter.set_result(message.body)

        await answers.consume(take, no_ack=True)
        await broker.startup()

        async def call(body: bytes) -> None:
            task = await echo.kiq(base64.b64encode(body).decode())
            answer = early.pop(task.task_id, None)
            if answer is None:
                waiter = waiting[task.task_id] = loop.create_future()
                answer = await waiter
            if base64.b64decode(msgpack.unpackb(answer)) != body:
                raise SystemExit("a reply is not the request")

        await drive.measure(call, chosen)
        await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(request(drive.options()))
