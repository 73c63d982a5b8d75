"""A job that was answered and comes again, since the ack was lost, is not run again: not here, and not elsewhere."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from qworker.broker.base import Properties
from qworker.wire.topology import COLD, REASON_HEADER
from qworker.worker import answered
from qworker.worker.answered import DIGEST_BYTES, KEPT_SECONDS, MOST_KEPT, RING, TOLD, Answered
from tests.support.broker import ready
from tests.support.waiting import wait_until
from tests.worker.answers import requester
from tests.worker.conftest import SIZE
from tests.worker.doubles import MIB, BackendDouble, Cable, Running, is_hot

CONSUMES = 0
"""The connection on which acks leave."""


def asked(job_id: str | None = "j", **changed: object) -> Properties:
    fields: dict[str, object] = {"correlation_id": "c", "reply_to": "r", "headers": {"x-published": 5}, **changed}
    return Properties(message_id=job_id, **fields)  # pyright: ignore[reportArgumentType]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- the record --------------------------------------------------------------------------------------


def test_what_was_answered_on_a_lost_session_is_known() -> None:
    """From when it is lost, for ten minutes; by all of the envelope that tells jobs apart."""
    clock = Clock()
    record = Answered(clock)
    record.add("m", asked())
    assert record.session_lost()
    assert record.knows("m", asked())
    others = [asked("k"), asked(correlation_id="d"), asked(reply_to=None), asked(headers={"x-published": 6})]
    assert not any(record.knows("m", other) for other in others)
    assert not record.knows("another model", asked())
    clock.now += KEPT_SECONDS - 1
    assert record.knows("m", asked())
    clock.now += 2
    assert not record.knows("m", asked())


def test_a_job_without_an_id_is_never_known() -> None:
    """Two of them may look alike."""
    record = Answered(Clock())
    record.add("m", asked(None))
    assert record.session_lost() == b""
    assert not record.knows("m", asked(None))


def test_another_worker_hears_of_it() -> None:
    """The last ones, in few bytes; the record has a bound however much is told."""
    mine, yours = Answered(Clock()), Answered(Clock())
    for number in range(RING + 10):
        mine.add("m", asked(str(number)))
    news = mine.session_lost()
    assert len(news) == TOLD * DIGEST_BYTES
    yours.hear(news)
    assert yours.knows("m", asked(str(RING + 9)))
    assert not yours.knows("m", asked("0"))
    assert not mine.knows("m", asked("0"))
    assert mine.knows("m", asked("10"))
    for number in range(MOST_KEPT // TOLD + 2):
        yours.hear(bytes([number]) * 8 + b"".join(n.to_bytes(16, "big") for n in range(TOLD)))
    assert len(yours._known) <= MOST_KEPT


async def test_news_are_waited_for_not_longer_than_they_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job waits until it is heard of; else until the time is over, counted from when it came."""
    mine, yours = Answered(time.monotonic), Answered(time.monotonic)
    mine.add("m", asked())
    monkeypatch.setattr(answered, "HEARSAY_SECONDS", 30.0)
    async with asyncio.TaskGroup() as tasks:
        heard = tasks.create_task(yours.hears_of("m", asked(), since=time.monotonic()))
        await asyncio.sleep(0)
        yours.hear(Answered(time.monotonic).session_lost())  # of something else
        yours.hear(mine.session_lost())
        assert await heard
    assert not await yours.hears_of("m", asked("k"), since=time.monotonic() - 31.0)


# --- workers -----------------------------------------------------------------------------------------


async def test_the_ack_is_lost(
    running: Running, cable: Cable, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """The answer was confirmed and the connection broke before the ack left: the job comes again, and is only acked."""
    async with running(cable.url, identities, backend) as worker, requester(amqp_url) as asks:
        await asks.publish("a", "first")
        await wait_until(lambda: "first" in asks.told and is_hot(worker, "a"))
        cable.choke(CONSUMES)
        await asks.publish("a", "second")
        await wait_until(lambda: "second" in asks.told and worker.state()["models"][0]["in_hand"] == 0)
        cable.cut()
        await wait_until(lambda: worker.counters.jobs_repeated >= 1, 20)  # the first ack may be lost, too
        await asks.publish("a", "third")
        await wait_until(lambda: "third" in asks.told)
        assert asks.told == {"first": ["result"], "second": ["result"], "third": ["result"]}
        assert worker.counters.runs == 3
    assert await _left(amqp_url) == 0


async def test_another_worker_has_it_then(
    running: Running,
    cable: Cable,
    amqp_url: str,
    identities: Path,
    backend: BackendDouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job goes to a replica at once; the first worker comes back and tells, and the replica does not run it."""
    monkeypatch.setattr(answered, "HEARSAY_SECONDS", 20.0)  # so that it does not depend on how fast this machine is
    other = BackendDouble()
    settings = {"max_replicas": 2, "prefetch": 1, "memory": SIZE + MIB}
    async with running(cable.url, identities, backend, **settings) as one, requester(amqp_url) as asks:
        await asks.publish("a", "first")
        await wait_until(lambda: "first" in asks.told and is_hot(one, "a"))
        cable.choke(CONSUMES)
        await asks.publish("a", "second")
        await wait_until(lambda: "second" in asks.told and one.state()["models"][0]["in_hand"] == 0)
        async with running(amqp_url, identities, other, **settings) as two:
            cable.unplug()

            async def came_again() -> bool:  # a hint by hand: no need to wait for the sweep
                await asks.session.publish(COLD, "a", b"", Properties(headers={REASON_HEADER: "sweep"}))
                return two.counters.redeliveries >= 1

            await wait_until(came_again, 30, every=0.1)
            assert two.counters.runs == 0
            cable.plug()
            await wait_until(lambda: two.counters.jobs_repeated >= 1, 30)
            assert two.counters.runs == 0
        assert asks.told == {"first": ["result"], "second": ["result"]}
    assert await _left(amqp_url) == 0


async def test_the_confirm_is_lost(
    running: Running, cable: Cable, amqp_url: str, identities: Path, backend: BackendDouble
) -> None:
    """Then nobody can tell whether the answer arrived: the job runs again. At least once, not at most."""
    async with running(cable.url, identities, backend) as worker, requester(amqp_url) as asks:
        await asks.publish("a", "first")
        await wait_until(lambda: "first" in asks.told and is_hot(worker, "a"))
        cable.mute(1)
        await asks.publish("a", "second")
        await wait_until(lambda: "second" in asks.told)
        cable.cut()
        await wait_until(lambda: asks.told["second"] == ["result", "result"], 20)
        assert worker.counters.jobs_repeated == 0
    assert await _left(amqp_url) == 0


async def _left(url: str) -> int:
    async with requester(url) as asks:
        return await ready(asks.session, "qworker.jobs.a")
