"""Room for what loads take beyond what stays: a load's peak is often two to three times the resident bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Headroom:
    """Bounds the bytes that loads in progress may take on top of the ledger.

    A load that needs more than all of it runs alone: refusing it would make the model unservable, and
    booking its peak in the ledger would evict others for bytes that are free again a second later.
    Owned here: ``_taken`` and ``_loads``.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._loads = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncGenerator[None]:
        """Wait until ``nbytes`` more are within the limit, or nobody else loads; hold them while entered."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._loads == 0 or self._taken + nbytes <= self._limit)
            self._taken += nbytes
            self._loads += 1
        try:
            yield
        finally:
            self._taken -= nbytes
            self._loads -= 1
            async with self._changed:
                self._changed.notify_all()
