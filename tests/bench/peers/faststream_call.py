"""FastStream's client."""

from __future__ import annotations

import argparse
import asyncio

from faststream.rabbit import RabbitBroker

from tests.bench import drive


async def request(chosen: argparse.Namespace) -> None:
    async with RabbitBroker(chosen.url, logger=None) as broker:

        async def call(body: bytes) -> None:
            reply = await broker.request(body, queue="bench.faststream", timeout=60, persist=True)
            if reply.body != body:
                raise SystemExit("a reply is not the request")

        await drive.measure(call, chosen)


if __name__ == "__main__":
    asyncio.run(request(drive.options()))
