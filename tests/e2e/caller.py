"""A publisher that owes nothing to us: plain pika, and bodies made with the msgpack and json packages."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from uuid import uuid4

import msgpack
import numpy as np
import pika
from numpy.typing import NDArray

MSGPACK = "application/msgpack"
JSON = "application/json"
logging.getLogger("pika").setLevel(logging.CRITICAL)  # it logs each refused connection with a traceback
_DATATYPES = {"f4": "FP32", "f8": "FP64", "f2": "FP16", "i8": "INT64", "i4": "INT32", "u1": "UINT8", "b1": "BOOL"}


@dataclass(slots=True)
class Reply:
    """An answer as it came."""

    body: bytes
    content_type: str
    correlation_id: str

    @property
    def fields(self) -> dict[str, Any]:
        return json.loads(self.body) if self.content_type == JSON else msgpack.unpackb(self.body)

    @property
    def code(self) -> str:
        """The failure's code; "ok" for a result."""
        return self.fields["error"]["code"] if "error" in self.fields else "ok"

    @property
    def message(self) -> str:
        return self.fields["error"]["message"]

    @property
    def y(self) -> NDArray[Any]:
        """The output ``y`` of a result."""
        assert self.code == "ok", f"expected a result, found {self.fields}"
        return array_of(next(output for output in self.fields["outputs"] if output["name"] == "y"))


@dataclass(slots=True)
class Replies:
    """What came so far, by correlation id. More than one for a job is a double."""

    by_id: dict[str, list[Reply]] = field(default_factory=dict[str, list[Reply]])

    def doubles(self) -> int:
        return sum(len(found) - 1 for found in self.by_id.values())


class Caller:
    """One pika connection with confirms, and a reply queue."""

    def __init__(self, url: str, reply_queue: str = "", *, durable: bool = False, listen: bool = True) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        self.channel = self._connection.channel()
        self.channel.confirm_delivery()
        arguments = {"x-queue-type": "quorum"} if durable else {}
        declared = self.channel.queue_declare(reply_queue, durable=durable, exclusive=not durable, arguments=arguments)
        self.reply_queue: str = declared.method.queue
        self.replies = Replies()
        self._acks = durable
        if listen:
            self.channel.basic_consume(self.reply_queue, self._take, auto_ack=not durable)

    def __enter__(self) -> Caller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._connection.is_open:
            self._connection.close()

    def send(
        self,
        model: str,
        body: bytes,
        *,
        exchange: str = "qworker.jobs",
        content_type: str | None = MSGPACK,
        reply_to: str | None = "",
        headers: Mapping[str, Any] | None = None,
        job_id: str | None = None,
    ) -> str:
        """Publish and wait for the confirm; the correlation id. ``reply_to`` None: nowhere."""
        job_id = job_id or str(uuid4())
        properties = pika.BasicProperties(
            message_id=job_id,
            correlation_id=job_id,
            content_type=content_type,
            reply_to=self.reply_queue if reply_to == "" else reply_to,
            headers=dict(headers or {}),
            delivery_mode=2,
        )
        self.channel.basic_publish(exchange, model, body, properties)
        return job_id

    def job(self, model: str, inputs: Mapping[str, NDArray[Any]], **more: Any) -> str:
        """Publish a good job in MessagePack."""
        return self.send(model, packed(model, inputs), **more)

    def wait(self, ids: Iterable[str], timeout: float = 30.0) -> dict[str, Reply]:
        """The first reply to each of these jobs."""
        wanted, deadline = set(ids), time.monotonic() + timeout
        while missing := wanted - self.replies.by_id.keys():
            left = deadline - time.monotonic()
            assert left > 0, f"{len(missing)} of {len(wanted)} jobs got no reply within {timeout:g} s"
            self._connection.process_data_events(time_limit=min(left, 0.2))
        return {job_id: self.replies.by_id[job_id][0] for job_id in wanted}

    def listen(self, seconds: float) -> None:
        """Take in what comes within ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._connection.process_data_events(time_limit=left)

    def call(self, model: str, inputs: Mapping[str, NDArray[Any]], timeout: float = 30.0, **more: Any) -> Reply:
        job_id = self.job(model, inputs, **more)
        return self.wait([job_id], timeout)[job_id]

    def call_raw(self, model: str, body: bytes, timeout: float = 30.0, **more: Any) -> Reply:
        job_id = self.send(model, body, **more)
        return self.wait([job_id], timeout)[job_id]

    def get(self, queue: str, timeout: float = 10.0) -> tuple[pika.BasicProperties, bytes, str]:
        """Take one message from a queue: its properties, body and routing key."""
        deadline = time.monotonic() + timeout
        while True:
            method, properties, body = self.channel.basic_get(queue, auto_ack=True)
            if method is not None:
                return properties, body, method.routing_key
            assert time.monotonic() < deadline, f"nothing came to {queue} within {timeout:g} s"
            self._connection.process_data_events(time_limit=0.05)

    def _take(self, channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        reply = Reply(body, properties.content_type or "", properties.correlation_id or "")
        self.replies.by_id.setdefault(reply.correlation_id, []).append(reply)
        if self._acks:
            channel.basic_ack(method.delivery_tag)


def packed(model: str, inputs: Mapping[str, NDArray[Any]], **more: Any) -> bytes:
    """A job's body in MessagePack, written by hand."""
    tensors = [
        {"name": name, "shape": list(a.shape), "datatype": _DATATYPES[a.dtype.str[1:]], "data": a.tobytes()}
        for name, a in inputs.items()
    ]
    return msgpack.packb({"model_name": model, "inputs": tensors, **more})


def as_json(inputs: Mapping[str, NDArray[Any]], **more: Any) -> bytes:
    """A job's body in JSON."""
    tensors = [
        {"name": name, "shape": list(a.shape), "datatype": _DATATYPES[a.dtype.str[1:]], "data": a.ravel().tolist()}
        for name, a in inputs.items()
    ]
    return json.dumps({"inputs": tensors, **more}).encode()


def array_of(tensor: Mapping[str, Any]) -> NDArray[Any]:
    """An output as an array."""
    kinds = {datatype: np.dtype("<" + kind) for kind, datatype in _DATATYPES.items()}
    dtype, payload = kinds[tensor["datatype"]], tensor["data"]
    flat = np.frombuffer(payload, dtype) if isinstance(payload, bytes) else np.array(payload, dtype)
    return flat.reshape(tensor["shape"])
