"""What this worker knows of which models exist, without asking the store for each job.

Owned here: the cached ids, and which models are known to have a batch lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from qworker.errors import ModelNotFound, StoreError
from qworker.store.base import Store

log = structlog.get_logger(__name__)


BATCH_ASK_SECONDS = 60.0


class Registry:
    """Ids of the store's models, re-read at most every ``refresh`` seconds."""

    def __init__(self, store: Store, clock: Callable[[], float], *, refresh: float = 10.0) -> None:
        self._store = store
        self._clock = clock
        self._refresh = refresh
        self._ids: frozenset[str] = frozenset()
        self._read_at: float | None = None
        self.trouble: str | None = None
        """Why the store could not be read the last time, or None."""
        self._seen: set[str] = set()
        self._batch: set[str] = set()
        self._batch_asked: dict[str, float] = {}

    async def models(self) -> list[str]:
        """All models that are, or were, registered as far as this worker knows, sorted.

        A store that cannot be read now does not make models vanish: the last list holds.
        """
        now = self._clock()
        if self._read_at is None or now - self._read_at >= self._refresh:
            try:
                self._ids = frozenset(await asyncio.to_thread(self._store.models))
                self.trouble = None
            except StoreError as error:
                self.trouble = str(error)
                log.warning("store.unreadable", reason=str(error))
            self._read_at = now
        return sorted(self._ids | self._seen)

    async def run(self) -> None:
        """Keep the list, and ``trouble``, up to date until cancelled."""
        while True:
            await self.models()
            await asyncio.sleep(self._refresh)

    async def knows(self, model: str) -> bool:
        """Whether the store has ``model`` right now. Raises StoreError when it cannot tell."""
        try:
            await asyncio.to_thread(self._store.versions, model)
        except ModelNotFound:
            return False
        self._seen.add(model)
        return True

    def saw(self, model: str) -> None:
        """A hint names ``model``, so its queue exists, whatever the store says."""
        self._seen.add(model)
        self._batch_asked.pop(model, None)

    def has_batch_lane(self, model: str) -> None:
        self._batch.add(model)

    def may_have_batch_lane(self, model: str) -> bool:
        """Whether to ask the broker for a batch queue that nobody has told us of; at most once a minute a model.

        Asking for a queue that is not there costs a channel, and the broker logs an error each time.
        """
        if model in self._batch:
            return True
        now = self._clock()
        if now - self._batch_asked.get(model, -BATCH_ASK_SECONDS) < BATCH_ASK_SECONDS:
            return False
        self._batch_asked[model] = now
        return True

    def batch_lanes(self) -> frozenset[str]:
        """Models whose batch queue is known to exist."""
        return frozenset(self._batch)
