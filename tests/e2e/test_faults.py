"""Workers that are killed, stopped or cut off: no job is lost, and nothing is left behind."""

from __future__ import annotations

import pytest

from qworker.wire.topology import lane_queue
from tests.e2e.caller import Caller
from tests.e2e.fleet import Fleet, queue_depths
from tests.e2e.models import answer_of, inputs_of
from tests.support.waiting import wait_until_sync

pytestmark = pytest.mark.chaos


def publish(caller: Caller, model: str, count: int, seconds: float = 0.0) -> dict[str, int]:
    """Publish jobs; which inputs each id has."""
    return {caller.job(model, inputs_of(model, k, seconds)): k for k in range(count)}


def check(caller: Caller, model: str, jobs: dict[str, int], seconds: float = 0.0, timeout: float = 60.0) -> None:
    """Every job has its right answer."""
    for job_id, reply in caller.wait(jobs, timeout).items():
        inputs = inputs_of(model, jobs[job_id], seconds)
        assert (reply.y == answer_of(model, inputs)).all(), f"{model} gave a wrong answer"


def test_killed_while_loading(fleet: Fleet, caller: Caller) -> None:
    """The other worker takes the load over, and the jobs are answered once."""
    fleet.start(2)
    jobs = publish(caller, "table-a", 10)
    # From the announcement on it holds the lease and the hint; the load alone may be over between two looks at it.
    loading = fleet.claimer("table-a", "announce", "look", "load")
    loading.pause()
    loading.kill()
    assert not loading.events("model.loaded"), "it was killed too late for this test"
    check(caller, "table-a", jobs)
    assert caller.replies.doubles() == 0
    fleet.finish()


def test_killed_while_hot(fleet: Fleet, caller: Caller) -> None:
    """Jobs in hand go back to the queue, and the other worker serves them and those that wait."""
    fleet.start(2)
    jobs = publish(caller, "roll", 30, seconds=0.1)
    hot = fleet.holder("roll")
    wait_until_sync(lambda: (hot.row("roll") or {}).get("in_hand"), what="jobs are in hand")
    hot.kill()
    check(caller, "roll", jobs, seconds=0.1)
    assert caller.replies.doubles() <= 8, "only what was in hand can be answered twice"
    fleet.finish()


def test_killed_while_evicting(fleet: Fleet, caller: Caller) -> None:
    """Who dies between the cancel and the unload leaves its jobs and its newcomer to the others."""
    fleet.start(1, memory="52MiB", max_cold_wait=0.3)
    slow = publish(caller, "roll", 6, seconds=1.0)
    first = fleet.holder("roll")
    fast = publish(caller, "table-a", 5)
    wait_until_sync(lambda: first.step("roll") in ("cancel", "look_back"), what="roll is on its way out")
    assert (first.row("roll") or {})["state"] == "draining"
    fleet.start(1, memory="52MiB", max_cold_wait=0.3, wait=False)
    first.kill()
    fleet.workers[1].wait_ready()
    check(caller, "roll", slow, seconds=1.0)
    check(caller, "table-a", fast)
    fleet.finish()


def test_terminated_under_load(fleet: Fleet, caller: Caller) -> None:
    """SIGTERM: jobs in hand are finished, the rest goes to the other worker, and nothing is answered twice."""
    fleet.start(2)
    jobs = publish(caller, "roll", 40, seconds=0.1) | publish(caller, "echo", 20)
    leaving = fleet.holder("roll")
    leaving.terminate()
    assert leaving.wait_exit() == 0
    assert leaving.events("worker.drained", held=0)
    replies = caller.wait(jobs, 60)
    assert {reply.code for reply in replies.values()} == {"ok"}
    assert caller.replies.doubles() == 0
    fleet.finish()


def test_terminated_without_grace(fleet: Fleet, caller: Caller) -> None:
    """With no time to finish, what is in hand goes back at once and another worker runs it."""
    fleet.start(1, grace=0)
    jobs = publish(caller, "roll", 8, seconds=0.5)
    leaving = fleet.holder("roll")
    wait_until_sync(lambda: (leaving.row("roll") or {}).get("in_hand"), what="jobs are in hand")
    leaving.terminate()
    assert leaving.wait_exit(10) == 0
    assert leaving.events("model.abandoned", model="roll")
    fleet.workers.remove(leaving)  # it was not meant to give its bytes back
    fleet.start(1)
    check(caller, "roll", jobs, seconds=0.5)
    fleet.finish()


@pytest.mark.slow
def test_hung_longer_than_its_heartbeats(fleet: Fleet, caller: Caller) -> None:
    """A worker that hangs loses its jobs to the other one, and harms nobody when it comes back."""
    fleet.start(2, heartbeat=5)
    jobs = publish(caller, "roll", 12, seconds=0.1)
    hung = fleet.holder("roll")
    wait_until_sync(lambda: (hung.row("roll") or {}).get("in_hand"), what="jobs are in hand")
    hung.pause()
    other = next(worker for worker in fleet.workers if worker is not hung)
    wait_until_sync(lambda: other.is_hot("roll"), 40, what="the other worker has roll")
    check(caller, "roll", jobs, seconds=0.1)
    hung.resume()
    hung.wait_event("broker.lost")
    wait_until_sync(lambda: hung.page("/readyz")[0] == 200, 20, what="it is back")
    check(caller, "roll", publish(caller, "roll", 5))
    caller.listen(0.5)
    assert caller.replies.doubles() <= 8, "only what was in hand can be answered twice"
    wait_until_sync(lambda: sum(worker.is_hot("roll") for worker in fleet.workers) == 1, what="one of them serves roll")
    fleet.finish()


def test_job_that_is_given_back_often_is_no_poison(fleet: Fleet, caller: Caller) -> None:
    """Whatever the broker counts, only runs that ended their process are held against a job."""
    fleet.start(1)
    fleet.finish()
    (job_id,) = publish(caller, "echo", 1)
    for _ in range(30):  # as one that was merely in hand whenever a worker died of something else
        method, _, _ = caller.channel.basic_get(lane_queue("jobs", "echo"))
        caller.channel.basic_reject(method.delivery_tag, requeue=True)
    fleet.start(1, max_attempts=1)
    check(caller, "echo", {job_id: 0})
    assert fleet.counter("jobs_tried_alone") == 1
    fleet.finish()


def test_nothing_is_consumed_while_no_worker_runs(fleet: Fleet, caller: Caller) -> None:
    """Jobs that wait while the whole fleet is down are served by the next one, with nobody publishing again."""
    fleet.start(1)
    check(caller, "echo", publish(caller, "echo", 1))
    fleet.finish()
    jobs = publish(caller, "echo", 5)
    assert queue_depths(fleet.url, [lane_queue("jobs", "echo")]) == {lane_queue("jobs", "echo"): (5, 0)}
    fleet.start(1)
    check(caller, "echo", jobs)
    fleet.finish()
