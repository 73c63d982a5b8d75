"""What a job is made of, and what it travels with: ids, deadline, where its answer goes, what its caller wants."""

from __future__ import annotations

import math
import time
from typing import Any

from qworker.broker.base import Properties
from qworker.store.base import BlobStore
from qworker.telemetry.trace import ClientTraces
from qworker.wire.datatypes import tensor
from qworker.wire.messages import Tensor
from qworker.wire.progress import PROGRESS_HEADER
from qworker.wire.topology import BLOBS_HEADER, DEADLINE_HEADER, PUBLISHED_HEADER


def envelope(
    job_id: str,
    content_type: str,
    now: float,
    *,
    deadline: float | None,
    priority: int | None,
    progress: bool,
    blobs: BlobStore | None,
    traces: ClientTraces | None,
    reply_to: str | None = None,
    correlation_id: str | None = None,
) -> Properties:
    """The properties of a job that is published ``now``. ``now`` and ``deadline`` are unix seconds."""
    headers: dict[str, int | str | bool] = {PUBLISHED_HEADER: int(now * 1000)}
    if blobs is not None:
        headers[BLOBS_HEADER] = blobs.prefix
    if progress:
        headers[PROGRESS_HEADER] = True
    if traces is not None:
        traces.inject(headers)
    expiration: int | None = None
    if deadline is not None:
        headers[DEADLINE_HEADER] = int(deadline * 1000)
        left = math.ceil((deadline - time.time()) * 1000)
        # The broker answers for the time in which no worker has it. It takes no number of more than 32 bits.
        expiration = max(1, left) if left < 1 << 32 else None
    return Properties(
        message_id=job_id,
        correlation_id=correlation_id or job_id,
        reply_to=reply_to,
        content_type=content_type,
        expiration_ms=expiration,
        timestamp_ms=int(now * 1000),
        priority=priority,
        persistent=True,
        headers=headers,
    )


def named(name: str, value: Any) -> Tensor:
    """A Tensor as it is (under the mapping's name), anything else by its numpy dtype."""
    if isinstance(value, Tensor):
        return value if value.name == name else Tensor(name, value.datatype, value.array)
    return tensor(name, value)
