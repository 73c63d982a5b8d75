"""FastStream: a subscriber that replies, and ``broker.request`` on the other side."""

from __future__ import annotations

import asyncio
import os

from faststream import FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

QUEUE = RabbitQueue("bench.faststream", durable=True)
broker = RabbitBroker(os.environ["BENCH_URL"], default_channel=Channel(prefetch_count=128), logger=None)
app = FastStream(broker, logger=None)


@broker.subscriber(QUEUE)
async def echo(body: bytes) -> bytes:
    return body


if __name__ == "__main__":
    asyncio.run(app.run())
