"""Whether this worker takes part: an operator may drain it without ending its process, and resume it."""

from __future__ import annotations

import asyncio


class Duty:
    """Owned here: ``drained``. One waits for it at a time."""

    def __init__(self) -> None:
        self.drained = False
        self._turned = asyncio.Event()

    def turn(self, *, drained: bool) -> bool:
        """False when it was so already."""
        changed, self.drained = drained is not self.drained, drained
        self._turned.set()
        return changed

    async def until(self, *, drained: bool) -> None:
        while self.drained is not drained:
            self._turned.clear()
            await self._turned.wait()
