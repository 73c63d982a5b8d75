"""A stand-in for a worker: answers jobs as each job asks to be answered, on pika and a thread of its own.

The parameter ``act`` says how: ``echo`` (the default), ``fail`` (with ``code``), ``twice``, ``stray`` (a
reply for somebody else first), ``garbage``, ``hold`` (until ``release``). With ``tell`` it tells its progress first,
and once more after the answer.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel

from qworker.wire.codec import decode_job, encode_failure, encode_result
from qworker.wire.messages import Failure, Job, Result
from qworker.wire.progress import PROGRESS_HEADER, Progress, encode_progress
from qworker.wire.topology import Binding, Exchange, lane_queue, lane_topology, static_topology

MODEL = "echo"


@dataclass(frozen=True)
class Seen:
    """A job as it arrived."""

    job: Job
    properties: pika.BasicProperties


class Responder:
    """Serves ``MODEL`` until its block ends."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.seen: queue.Queue[Seen] = queue.Queue()
        self._held: list[Seen] = []
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Responder:
        self._thread.start()
        assert self._ready.wait(20), "the responder did not reach the broker"
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(20)

    def release(self) -> None:
        """Answer all held jobs, on the responder's own thread."""
        self._connection.add_callback_threadsafe(self._answer_held)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._serve()
            except pika.exceptions.AMQPError:
                self._stop.wait(0.1)  # the broker is being restarted by the test

    def _serve(self) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(self._url))
        try:
            self._channel: BlockingChannel = self._connection.channel()
            declare(self._channel)
            self._channel.basic_consume(lane_queue("jobs", MODEL), self._take)
            self._ready.set()
            while not self._stop.is_set():
                self._connection.process_data_events(0.02)
        finally:
            if self._connection.is_open:
                self._connection.close()

    def _take(self, channel: BlockingChannel, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        job = decode_job(body, properties.content_type, model=MODEL, job_id=properties.message_id or "")
        seen = Seen(job, properties)
        if job.parameters.get("act") == "hold":
            self._held.append(seen)
            if job.parameters.get("tell"):
                self._tell(seen, Progress("loading", share=0.6, stage="load", worker="w"))
        else:
            self._answer(seen)
        channel.basic_ack(method.delivery_tag)
        self.seen.put(seen)

    def _answer_held(self) -> None:
        while self._held:
            self._answer(self._held.pop())

    def _answer(self, seen: Seen) -> None:
        job, kind = seen.job, seen.properties.content_type
        act = job.parameters.get("act", "echo")
        correlation_id = seen.properties.correlation_id
        body = encode_result(Result(job.id, job.model, "1", job.inputs, {"run": 0.001}), kind)
        tell = str(job.parameters.get("tell", ""))
        if tell:
            self._tell(seen, Progress("queued", ahead=1, worker="w"))
            self._tell(seen, Progress("loading", share=0.4, eta=3.2, stage="load", worker="w"))
            if tell == "badly":
                self._reply(seen, correlation_id, b"\xc1", "running")
            self._tell(seen, Progress("running", eta=0.1))
        if act == "fail":
            code = str(job.parameters["code"])
            body = encode_failure(Failure(job.id, job.model, code, f"no luck: {code}", code == "later"), kind)
        elif act == "garbage":
            body = b"\xc1 not a reply"
        elif act == "stray":
            self._reply(seen, "somebody-else", body)
        self._reply(seen, correlation_id, body)
        if act == "twice":
            self._reply(seen, correlation_id, body)
        if tell:
            self._tell(seen, Progress("running"))

    def _tell(self, seen: Seen, progress: Progress) -> None:
        body = encode_progress(seen.job.id, seen.job.model, progress, seen.properties.content_type)
        self._reply(seen, seen.properties.correlation_id, body, progress.state)

    def _reply(self, seen: Seen, correlation_id: str | None, body: bytes, state: str | None = None) -> None:
        if seen.properties.reply_to:
            properties = pika.BasicProperties(
                correlation_id=correlation_id,
                content_type=seen.properties.content_type,
                headers=None if state is None else {PROGRESS_HEADER: state},
            )
            self._channel.basic_publish("", seen.properties.reply_to, body, properties)


def declare(channel: BlockingChannel) -> None:
    """Declare the topology as another client library would."""
    for entity in (*static_topology("classic"), *lane_topology("jobs", MODEL, "classic")):
        if isinstance(entity, Exchange):
            channel.exchange_declare(
                entity.name,
                entity.type,
                durable=entity.durable,
                auto_delete=entity.auto_delete,
                internal=entity.internal,
                arguments=dict(entity.arguments),
            )
        elif isinstance(entity, Binding):
            bind = channel.exchange_bind if entity.to_exchange else channel.queue_bind
            bind(entity.destination, entity.source, entity.routing_key, arguments=dict(entity.arguments))
        else:
            channel.queue_declare(entity.name, durable=entity.durable, arguments=dict(entity.arguments))
