"""A flash crowd on three workers: it is spread within seconds, every job is answered rightly, and it recedes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.e2e.caller import Caller
from tests.e2e.fleet import Fleet
from tests.e2e.models import answer_of, inputs_of
from tests.support.waiting import wait_until_sync

JOB_SECONDS, WAITING = 0.2, 120


def hot_on(fleet: Fleet) -> int:
    return sum(worker.is_hot("roll") for worker in fleet.live())


class Crowd:
    """Callers that come as fast as they are served: however fast that is, so many jobs wait."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.sent: dict[str, dict[str, NDArray[Any]]] = {}

    def press(self) -> None:
        self._caller.listen(0.05)
        while len(self.sent) - len(self._caller.replies.by_id.keys() & self.sent.keys()) < WAITING:
            inputs = inputs_of("roll", len(self.sent) % 8, JOB_SECONDS)
            self.sent[self._caller.job("roll", inputs)] = inputs

    def until(self, true: Callable[[], bool], what: str) -> None:
        def pressed() -> bool:
            self.press()
            return true()

        wait_until_sync(pressed, 60, what=what)


def test_a_flash_crowd_is_spread_and_recedes(fleet: Fleet, caller: Caller) -> None:
    """One worker has the model; its backlog brings the others, whose replicas leave when it is done."""
    fleet.start(3, max_replicas=3, replica_backlog=1, replica_linger=2, threads=1, prefetch=2)
    caller.call("roll", inputs_of("roll", 0))
    assert hot_on(fleet) == 1
    crowd = Crowd(caller)
    crowd.until(lambda: hot_on(fleet) == 3, "all three serve it")
    crowd.until(
        lambda: min(w.state()["counters"]["jobs_answered"] for w in fleet.live()) >= 3, "each does a part of them"
    )
    replies = caller.wait(crowd.sent, 120)
    for job_id, inputs in crowd.sent.items():
        np.testing.assert_array_equal(replies[job_id].y, answer_of("roll", inputs))
    wait_until_sync(lambda: hot_on(fleet) == 1, 40, what="the replicas have left")
    assert caller.replies.doubles() == 0
    assert len([e for w in fleet.workers for e in w.events("model.replica_leaves")]) >= 2
    fleet.finish()
