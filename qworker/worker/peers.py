"""Which other workers there are: those whose pulse was heard of late.

So whoever gives an order learns from those who answer whose answer is missing.
"""

from __future__ import annotations

from qworker.wire.topology import alive
from qworker.worker.hot_zone import Clock

KEPT_SECONDS = 600.0
MOST_PEERS = 10_000
_ALIVE = alive("")


def is_pulse(routing_key: str) -> bool:
    return routing_key.startswith(_ALIVE)


class Peers:
    """Owned here, by the event loop: when each of the others was heard last."""

    def __init__(self, worker: str, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock
        self._heard: dict[str, float] = {}

    def heard(self, routing_key: str) -> None:
        """A pulse came."""
        worker = routing_key.removeprefix(_ALIVE)
        if worker != self._worker and (worker in self._heard or len(self._heard) < MOST_PEERS):
            self._heard[worker] = self._clock()

    def known(self) -> dict[str, float]:
        """Each of them, and the seconds since it was heard."""
        now = self._clock()
        self._heard = {worker: at for worker, at in self._heard.items() if now - at < KEPT_SECONDS}
        return {worker: round(now - at, 1) for worker, at in self._heard.items()}
