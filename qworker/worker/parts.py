"""What all models of a worker share: their owners are named in each part."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from qworker.broker.base import Session
from qworker.policy.backoff import LoadHistory
from qworker.telemetry.counters import Counters
from qworker.wire.limits import Limits
from qworker.worker.brake import Brake
from qworker.worker.cancelled import Cancelled
from qworker.worker.hot_zone import Clock, HotZone
from qworker.worker.load_guard import LoadGuards
from qworker.worker.loader import Loader
from qworker.worker.offline import OfflineThreads
from qworker.worker.registry import Registry
from qworker.worker.replicas import Backlog
from qworker.worker.sessions import Sessions
from qworker.worker.settle import Settler
from qworker.worker.subscriptions import AckTimeout


@dataclass(frozen=True, slots=True)
class Parts:
    """What all models of a worker share."""

    zone: HotZone
    loader: Loader
    guards: LoadGuards
    sessions: Sessions
    settler: Settler
    history: LoadHistory
    registry: Registry
    engine_threads: ThreadPoolExecutor
    offline_threads: OfflineThreads
    counters: Counters
    clock: Clock
    limits: Limits
    cancelled: Cancelled
    ack_timeout: AckTimeout
    prefetch: int
    threads: int
    max_queue_delay: float
    max_replicas: int
    backlog_of: Callable[[str], Backlog]
    brake: Brake
    reclaim_until: Callable[[Session | None], float]
    """Until when the lease of a loaded model is asked for, after this session was lost: a connection that broke in
    silence holds it until the broker misses its heartbeats. After that, another worker has it."""
