"""The topology as RabbitMQ carries it out: routing, hints, leases, dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from qworker.broker.base import Session
from qworker.broker.reference.session import AioPikaConnector
from qworker.wire.topology import (
    ACTIVATION,
    BATCH,
    DEAD,
    DELIVERY_LIMIT,
    EXPIRED,
    JOBS,
    RESULTS,
    UNROUTABLE,
    Lane,
    QueueType,
    announcement,
    lane_queue,
    lane_topology,
    lease_queue,
    static_topology,
)
from tests.support import leaks
from tests.support.broker import PLAIN, Inbox, classic, ready
from tests.support.waiting import wait_until

EXCHANGES: dict[Lane, str] = {"jobs": JOBS, "batch": BATCH}


@pytest.fixture(params=["quorum", "classic"])
def queue_type(request: pytest.FixtureRequest) -> QueueType:
    """Both kinds of lane queues."""
    return request.param


@pytest.fixture
async def session(amqp_url: str, queue_type: QueueType) -> AsyncIterator[Session]:
    """A session whose virtual host has the static topology and one model, "m", in both lanes."""
    session = leaks.register_session(await AioPikaConnector(amqp_url).connect())
    await session.declare(*static_topology(queue_type))
    await session.declare(*lane_topology("jobs", "m", queue_type), *lane_topology("batch", "m", queue_type))
    yield session
    await session.__aexit__(None, None, None)


async def _counts(session: Session) -> tuple[int, int, int, int]:
    """Ready messages in the model's two lanes, in the hints, and in the unroutable queue."""
    jobs, batch = await ready(session, lane_queue("jobs", "m")), await ready(session, lane_queue("batch", "m"))
    return jobs, batch, await ready(session, ACTIVATION), await ready(session, UNROUTABLE)


async def test_declaring_again_changes_nothing(session: Session, queue_type: QueueType) -> None:
    """All of the topology can be declared again, and messages stay."""
    await session.publish(JOBS, "m", b"x", PLAIN, mandatory=True)
    for _ in range(2):
        await session.declare(*static_topology(queue_type), *lane_topology("jobs", "m", queue_type))
    assert await _counts(session) == (1, 0, 1, 0)


@pytest.mark.parametrize("lane", ["jobs", "batch"])
async def test_unknown_model_is_kept(session: Session, lane: Lane) -> None:
    """A job for a model without a queue lands in the unroutable queue, with its routing key, and wakes nobody."""
    await session.publish(EXCHANGES[lane], "nobody", b"x", PLAIN, mandatory=True)
    assert await _counts(session) == (0, 0, 0, 1)
    inbox = Inbox()
    await session.consume(UNROUTABLE, inbox.take, prefetch=1)
    await wait_until(lambda: len(inbox) == 1)
    (stray,) = inbox.deliveries
    assert (stray.exchange, stray.routing_key) == (EXCHANGES[lane], "nobody")
    await stray.ack()


@pytest.mark.parametrize("lane", ["jobs", "batch"])
async def test_cold_job_makes_a_hint(session: Session, lane: Lane) -> None:
    """A job of a cold model is in its queue once, and its copy is a hint that names lane and model."""
    await session.publish(EXCHANGES[lane], "m", b"x", PLAIN, mandatory=True)
    assert await _counts(session) == ((1, 0, 1, 0) if lane == "jobs" else (0, 1, 1, 0))
    inbox = Inbox()
    await session.consume(ACTIVATION, inbox.take, prefetch=1)
    await wait_until(lambda: len(inbox) == 1)
    (hint,) = inbox.deliveries
    assert (hint.exchange, hint.routing_key, hint.body) == (EXCHANGES[lane], "m", b"x")
    await hint.ack()


async def test_announcement_stops_hints_and_its_end_resumes_them(session: Session) -> None:
    """While a lease with its announcement stands, jobs of both lanes make no hints; after the release they do.

    Exact on one node: not one hint too many or too few around the change.
    """
    lease = lease_queue("m", 0)
    for round_ in range(3):
        assert await session.lease(lease)
        await session.declare(*announcement("m", 0))
        for exchange in EXCHANGES.values():
            await session.publish(exchange, "m", b"hot", PLAIN, mandatory=True)
        jobs, batch, hints, _ = await _counts(session)
        assert (jobs, batch, hints) == (2 * round_ + 1, 2 * round_ + 1, 2 * round_)
        assert await ready(session, lease) == 0
        await session.release(lease)
        for exchange in EXCHANGES.values():
            await session.publish(exchange, "m", b"cold", PLAIN, mandatory=True)
        assert (await _counts(session))[2] == 2 * round_ + 2


async def test_hints_stop_until_the_last_replica_ends(session: Session) -> None:
    """With two slots announced, the end of one of them brings no hints yet."""
    for slot in (0, 1):
        assert await session.lease(lease_queue("m", slot))
        await session.declare(*announcement("m", slot))
    await session.release(lease_queue("m", 0))
    await session.publish(JOBS, "m", b"x", PLAIN, mandatory=True)
    assert await _counts(session) == (1, 0, 0, 0)
    await session.release(lease_queue("m", 1))
    await session.publish(JOBS, "m", b"x", PLAIN, mandatory=True)
    assert await _counts(session) == (2, 0, 1, 0)


async def test_hints_resume_when_the_holder_is_gone(session: Session, amqp_url: str) -> None:
    """The announcement ends with the holder's session, without anybody's doing."""
    holder = await AioPikaConnector(amqp_url).connect()
    assert await holder.lease(lease_queue("m", 0))
    await holder.declare(*announcement("m", 0))
    await session.publish(JOBS, "m", b"x", PLAIN, mandatory=True)
    assert (await _counts(session))[2] == 0
    await holder.__aexit__(None, None, None)

    async def hinted() -> bool:
        await session.publish(JOBS, "m", b"x", PLAIN, mandatory=True)
        return (await _counts(session))[2] > 0

    await wait_until(hinted, 2.0)


async def test_rejected_job_is_kept_dead(session: Session) -> None:
    """A job that is rejected for good moves to the dead queue, with its model as routing key."""
    await session.publish(JOBS, "m", b"bad", PLAIN, mandatory=True)
    inbox, dead = Inbox(), Inbox()
    await session.consume(lane_queue("jobs", "m"), inbox.take, prefetch=1)
    await wait_until(lambda: len(inbox) == 1)
    await inbox.deliveries[0].reject(requeue=False)
    await session.consume(DEAD, dead.take, prefetch=1)
    await wait_until(lambda: len(dead) == 1)
    assert (dead.deliveries[0].body, dead.deliveries[0].routing_key) == (b"bad", "m")


async def test_expired_job_is_kept_for_an_answer(session: Session) -> None:
    """A job that waited for too long leaves its queue, whether anybody consumes it or not, with its envelope."""
    envelope = replace(PLAIN, message_id="late", reply_to="somebody", expiration_ms=20, headers={"x-mine": 1})
    await session.publish(JOBS, "m", b"late", envelope, mandatory=True)
    await session.publish(JOBS, "unknown", b"stray", envelope)
    inbox = Inbox()
    await session.consume(EXPIRED, inbox.take, prefetch=10)
    await wait_until(lambda: len(inbox) == 2)
    found = {d.routing_key: d for d in inbox.deliveries}
    assert (found["m"].body, found["unknown"].body) == (b"late", b"stray")
    properties = found["m"].properties
    assert (properties.message_id, properties.reply_to, properties.expiration_ms) == ("late", "somebody", None)
    assert properties.headers["x-mine"] == 1
    assert properties.headers["x-first-death-reason"] == "expired"
    assert await ready(session, DEAD) == 0


@pytest.mark.parametrize("queue_type", ["quorum"], indirect=True)
async def test_a_job_that_is_always_given_up_ends_dead(session: Session) -> None:
    """The broker's own limit is the last resort: after it, a requeued job is dead-lettered."""
    await session.publish(JOBS, "m", b"x", PLAIN, mandatory=True)
    inbox = Inbox()
    await session.consume(lane_queue("jobs", "m"), inbox.take, prefetch=1)
    settled = 0

    async def is_dead() -> bool:
        nonlocal settled
        for delivery in inbox.deliveries[settled:]:
            settled += 1
            await delivery.reject(requeue=True)
        return await ready(session, DEAD) == 1

    await wait_until(is_dead)
    assert len(inbox) == DELIVERY_LIMIT + 1


async def test_results_go_to_whoever_binds(session: Session) -> None:
    """Results of jobs without a reply queue can be had by a binding, and vanish without one."""
    from qworker.wire.topology import Binding

    await session.publish(RESULTS, "m", b"unseen", PLAIN)
    await session.declare(classic("mine"), Binding(RESULTS, "mine", "m"))
    await session.publish(RESULTS, "m", b"seen", PLAIN)
    assert await ready(session, "mine") == 1
