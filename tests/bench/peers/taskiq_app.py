"""Taskiq on taskiq-aio-pika, which brings no results over RabbitMQ: a small back end sends them to the client's queue.

Its messages cannot hold bytes that are no text, so they travel as base64.
"""

from __future__ import annotations

import os
from typing import Any

import msgpack
from aio_pika import Message
from taskiq import AsyncResultBackend, TaskiqResult
from taskiq_aio_pika import AioPikaBroker

ANSWERS = "bench.taskiq-answers"


class AnswersToQueue(AsyncResultBackend[Any]):
    async def set_result(self, task_id: str, result: TaskiqResult[Any]) -> None:
        message = Message(msgpack.packb(result.return_value), correlation_id=task_id)
        await broker.write_channel.default_exchange.publish(message, ANSWERS)

    async def get_result(self, task_id: str, with_logs: bool = False) -> TaskiqResult[Any]:
        raise NotImplementedError

    async def is_result_ready(self, task_id: str) -> bool:
        return False


broker = AioPikaBroker(os.environ["BENCH_URL"], result_backend=AnswersToQueue(), qos=128)


@broker.task(task_name="echo")
async def echo(body: str) -> str:
    return body
