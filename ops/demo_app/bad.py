"""Inputs that are wrong, each with the code of the failure that must come back.

Some are sent through the client, as a caller's mistake would be; the others as raw messages, since no
client of ours would make them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import aiormq
import msgpack
import numpy as np
from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic

from qworker import Client, QworkerError
from qworker.wire.topology import DIRECT_REPLY_TO, JOBS

MODEL = "magika"
"""One input, ``bytes``, INT32 [n, 2048]."""
ANSWER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class BadInput:
    """What is wrong, and the failure code that says so."""

    what: str
    code: str
    model: str = MODEL
    inputs: dict[str, Any] | None = None
    body: bytes | None = None


def bad_inputs() -> list[BadInput]:
    """All of them, in a fixed order."""
    good = np.zeros((1, 2048), np.int32)
    wrong = "invalid_input"

    def body(**changes: Any) -> bytes:
        fields = {"name": "bytes", "shape": [1, 2048], "datatype": "INT32", "data": good.tobytes()} | changes
        return msgpack.packb({"id": "bad", "model_name": MODEL, "inputs": [fields]})

    return [
        BadInput("unknown model", "unknown_model", model="no-such-model", inputs={"x": good}),
        BadInput("missing input", wrong, inputs={}),
        BadInput("extra input", wrong, inputs={"bytes": good, "more": good}),
        BadInput("misnamed input", wrong, inputs={"byts": good}),
        BadInput("wrong datatype", wrong, inputs={"bytes": good.astype(np.float32)}),
        BadInput("wrong rank", wrong, inputs={"bytes": good[0]}),
        BadInput("wrong size of a fixed axis", wrong, inputs={"bytes": good[:, :2000]}),
        BadInput("not MessagePack", wrong, body=b"\xc1 this is no message"),
        BadInput("not a map", wrong, body=msgpack.packb([1, 2, 3])),
        BadInput("truncated", wrong, body=body()[:500]),
        BadInput("length prefix of 1 GiB", wrong, body=b"\x81\xa6inputs\xc6\x40\x00\x00\x00"),
        BadInput("nested 10,000 deep", wrong, body=b"\x91" * 10_000 + b"\xc0"),
        BadInput("shape and data disagree", wrong, body=body(shape=[2, 2048])),
        BadInput("negative dimension", wrong, body=body(shape=[-1, 2048])),
        BadInput("huge dimensions", wrong, body=body(shape=[2**40, 2**40])),
    ]


class RawCaller:
    """Sends bodies as they are and returns the code of the failure that comes back."""

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel
        self._waiting: dict[str, asyncio.Future[DeliveredMessage]] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncGenerator[RawCaller]:
        connection = await aiormq.connect(url)
        try:
            caller = cls(await connection.channel(publisher_confirms=False))
            await caller._channel.basic_consume(DIRECT_REPLY_TO, caller._take, no_ack=True)
            yield caller
        finally:
            await connection.close()

    async def code_of(self, model: str, body: bytes) -> str:
        """The failure's code, ``"ok"`` when there was a result instead. Raises TimeoutError."""
        key = str(uuid4())
        waiter = self._waiting[key] = asyncio.get_running_loop().create_future()
        properties = Basic.Properties(correlation_id=key, message_id=key, reply_to=DIRECT_REPLY_TO)
        async with asyncio.timeout(ANSWER_SECONDS):
            await self._channel.basic_publish(body, exchange=JOBS, routing_key=model, properties=properties)
            message = await waiter
        reply: dict[str, Any] = msgpack.unpackb(message.body)
        return str(reply["error"]["code"]) if "error" in reply else "ok"

    async def _take(self, message: DeliveredMessage) -> None:
        waiter = self._waiting.pop(message.header.properties.correlation_id or "", None)
        if waiter is not None and not waiter.done():
            waiter.set_result(message)


async def answered_rightly(client: Client, raw: RawCaller, bad: BadInput, told: Callable[[str], None]) -> bool:
    """Send one and see whether its failure is the right one."""
    try:
        if bad.body is not None:
            code = await raw.code_of(bad.model, bad.body)
        else:
            await client.call(bad.model, bad.inputs or {}, timeout=ANSWER_SECONDS)
            code = "ok"
    except TimeoutError:
        code = "no answer"
    except QworkerError as error:
        code = error.code
    if code != bad.code:
        told(f"bad input '{bad.what}' should be answered with {bad.code} but got {code}")
    return code == bad.code
