"""A flash crowd on three workers: it is spread within seconds, every job is answered rightly, and it recedes."""

from __future__ import annotations

import numpy as np

from tests.e2e.caller import Caller
from tests.e2e.fleet import Fleet
from tests.e2e.models import answer_of, inputs_of
from tests.support.waiting import wait_until_sync

JOBS, JOB_SECONDS = 80, 0.2


def hot_on(fleet: Fleet) -> int:
    return sum(worker.is_hot("roll") for worker in fleet.live())


def test_a_flash_crowd_is_spread_and_recedes(fleet: Fleet, caller: Caller) -> None:
    """One worker has the model; its backlog brings the others, whose replicas leave when it is done."""
    fleet.start(3, max_replicas=3, replica_backlog=1, replica_linger=2, threads=1, prefetch=2)
    caller.call("roll", inputs_of("roll", 0))
    assert hot_on(fleet) == 1
    inputs = [inputs_of("roll", k, JOB_SECONDS) for k in range(8)]
    sent = [caller.job("roll", inputs[k % 8]) for k in range(JOBS)]
    wait_until_sync(lambda: hot_on(fleet) == 3, 60, what="all three serve it")
    replies = caller.wait(sent, 120)
    for k, job_id in enumerate(sent):
        np.testing.assert_array_equal(replies[job_id].y, answer_of("roll", inputs[k % 8]))
    answered = [worker.state()["counters"]["jobs_answered"] for worker in fleet.live()]
    assert min(answered) >= 3, f"each does a part of them, found {answered}"
    wait_until_sync(lambda: hot_on(fleet) == 1, 40, what="the replicas have left")
    assert caller.replies.doubles() == 0
    assert len([e for w in fleet.workers for e in w.events("model.replica_leaves")]) >= 2
    fleet.finish()
