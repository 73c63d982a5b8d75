"""The reference: an echo on plain aio-pika, on both ends.

    python -m tests.bench.raw_echo --serve --url URL     the worker
    python -m tests.bench.raw_echo --url URL ...         the client, see ``drive``

As somebody would write it who wants speed: direct reply-to, ``mandatory=False``, no confirm of replies, an
ack after the reply. Requests are persistent and confirmed, on a quorum queue.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import aio_pika

from tests.bench import drive

QUEUE = "bench.raw-echo"
PREFETCH = 128


async def serve(url: str) -> None:
    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=False)
    await channel.set_qos(prefetch_count=PREFETCH)
    queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})

    async def echo(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        reply = aio_pika.Message(message.body, correlation_id=message.correlation_id)
        await channel.default_exchange.publish(reply, message.reply_to or "", mandatory=False)
        await message.ack()

    await queue.consume(echo)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def request(chosen: argparse.Namespace) -> None:
    async with await aio_pika.connect(chosen.url) as connection:
        channel = await connection.channel()
        replies = await channel.get_queue("amq.rabbitmq.reply-to", ensure=False)
        waiting: dict[str, asyncio.Future[bytes]] = {}
        loop = asyncio.get_running_loop()

        def on_reply(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            waiting.pop(message.correlation_id or "").set_result(message.body)

        await replies.consume(on_reply, no_ack=True)
        numbers = iter(range(1 << 60))

        async def call(body: bytes) -> None:
            name = str(next(numbers))
            reply = waiting[name] = loop.create_future()
            message = aio_pika.Message(
                body,
                correlation_id=name,
                reply_to="amq.rabbitmq.reply-to",
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            )
            await channel.default_exchange.publish(message, QUEUE, mandatory=False)
            if await reply != body:
                raise SystemExit("a reply is not the request")

        await drive.measure(call, chosen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    chosen = drive.options(parser)
    drive.run(serve(chosen.url) if chosen.serve else request(chosen), uvloop=chosen.uvloop)


if __name__ == "__main__":
    main()
