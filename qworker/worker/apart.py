"""Tensors of jobs and results that travel beside their messages: a worker's part in it."""

from __future__ import annotations

import structlog
from msgspec.structs import replace

from qworker.broker.base import Properties
from qworker.errors import StoreError
from qworker.store.base import BlobStore
from qworker.wire.codec import Blobs
from qworker.wire.messages import JSON, Result
from qworker.wire.reference import Referenced, blob_bytes
from qworker.wire.topology import BLOBS_HEADER

log = structlog.get_logger(__name__)

_JSON_GROWTH = 8
"""JSON takes up to so many times the bytes that a tensor has."""


class Apart:
    """Fetches inputs from ``store``, and puts there what more than ``limit`` bytes of a result have to leave it."""

    def __init__(self, store: BlobStore, limit: int) -> None:
        self._store = store
        self._limit = limit

    async def inputs(self, found: Referenced) -> Blobs:
        """What a job refers to. Raises InvalidInput, BlobUnavailable."""
        return await self._store.fetch(found.refs)

    def wants(self, asked: Properties, result: Result) -> bool:
        """Whether ``result`` is to leave some of itself behind: only where who asked can read it there."""
        return asked.headers.get(BLOBS_HEADER) == self._store.prefix and (
            sum(map(blob_bytes, result.outputs)) > self._most(asked)
        )

    async def lighten(self, asked: Properties, result: Result) -> Result:
        """``result`` with its largest outputs in the store; as it was where that takes no more."""
        try:
            return replace(result, outputs=await self._store.send(result.outputs, self._most(asked)))
        except StoreError as error:  # it may fit into a message all the same; if not, settling says so
            log.warning("blobs.not_sent", model=result.model, job_id=result.id, reason=str(error))
            return result

    def _most(self, asked: Properties) -> int:
        return self._limit // _JSON_GROWTH if asked.content_type == JSON else self._limit
