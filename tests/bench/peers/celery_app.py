"""Celery: results over RabbitMQ (rpc://), a solo pool, acks after the task, MessagePack so that bytes stay bytes."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

app: Any = Celery("bench", broker=os.environ["BENCH_URL"].replace("amqp://", "pyamqp://"), backend="rpc://")
app.conf.update(
    task_default_queue="bench.celery",
    task_serializer="msgpack",
    result_serializer="msgpack",
    accept_content=["msgpack"],
    task_acks_late=True,
    worker_prefetch_multiplier=128,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="echo")
def echo(body: bytes) -> bytes:
    return body
