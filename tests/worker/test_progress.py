"""Callers who ask are told what their jobs wait for, by a whole worker on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qworker.broker.base import Properties, Session
from qworker.broker.reference.session import AioPikaConnector
from qworker.errors import LoadFailed
from qworker.wire.codec import decode_reply, encode_job
from qworker.wire.datatypes import tensor
from qworker.wire.messages import JSON, MSGPACK, Job, Result
from qworker.wire.progress import PROGRESS_HEADER, Progress, decode_progress
from qworker.wire.topology import BATCH, JOBS
from tests.support.broker import Inbox, classic
from tests.support.waiting import wait_until
from tests.worker.doubles import BackendDouble, Running, is_hot

X = np.ones((2, 3), np.float32)


@dataclass
class Caller:
    """Somebody with a reply queue, in no language in particular."""

    session: Session
    inbox: Inbox

    async def publish(
        self, model: str, job_id: str, asks: Any = True, *, exchange: str = JOBS, content_type: str = MSGPACK
    ) -> None:
        envelope = Properties(
            correlation_id=f"corr-{job_id}",
            message_id=job_id,
            reply_to="replies",
            content_type=content_type,
            headers={} if asks is None else {PROGRESS_HEADER: asks},
        )
        body = encode_job(Job(job_id, model, (tensor("x", X),)), content_type)
        await self.session.publish(exchange, model, body, envelope)

    def told(self, job_id: str) -> list[Progress]:
        """What came of one job with the header."""
        found: list[Progress] = []
        for each in self.inbox.deliveries:
            properties = each.properties
            if properties.correlation_id == f"corr-{job_id}" and PROGRESS_HEADER in properties.headers:
                told_of, _, progress = decode_progress(each.body, properties.content_type)
                assert told_of == job_id
                assert properties.headers[PROGRESS_HEADER] == progress.state
                assert progress.worker == "in-process"
                found.append(progress)
        return found

    def states(self, job_id: str) -> list[str]:
        """The states that were told, without repeats."""
        told = [each.state for each in self.told(job_id)]
        return [state for at, state in enumerate(told) if at == 0 or told[at - 1] != state]

    def answered(self, job_id: str) -> bool:
        for each in self.inbox.deliveries:
            properties = each.properties
            if properties.correlation_id == f"corr-{job_id}" and PROGRESS_HEADER not in properties.headers:
                assert isinstance(decode_reply(each.body, properties.content_type), Result)
                return True
        return False


@pytest.fixture
async def caller(amqp_url: str) -> AsyncIterator[Caller]:
    async with await AioPikaConnector(amqp_url).connect() as session:
        inbox = Inbox()
        await session.declare(classic("replies"))
        await session.consume("replies", inbox.take, prefetch=1000)
        yield Caller(session, inbox)


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
async def test_a_cold_job_is_told_of_its_load(
    running: Running, amqp_url: str, caller: Caller, identities: Path, backend: BackendDouble, content_type: str
) -> None:
    """Queued, loading with a share that grows and an ETA, running; then its result, and nothing after it."""
    backend.loading.shut()
    async with running(amqp_url, identities, backend) as worker:
        await caller.publish("a", "1", content_type=content_type)
        await wait_until(lambda: len([p for p in caller.told("1") if p.state == "loading"]) >= 3)
        loading = [p for p in caller.told("1") if p.state == "loading"]
        assert loading[-1].stage == "load"
        shares = [p.share or 0.0 for p in loading]
        assert shares == sorted(shares)
        assert 0.0 < shares[-1] < 1.0
        assert all(p.eta is not None and p.eta >= 0.0 for p in loading)
        backend.loading.open()
        await wait_until(lambda: caller.answered("1"))
        assert caller.states("1") == ["queued", "loading", "running"]
        errors = worker.counters.measures.eta_errors
        assert (errors["load"].count, errors["job"].count) == (1, 1)
        assert worker.counters.measures.progress["running"] == 1


async def test_who_does_not_ask_is_told_nothing(
    running: Running, amqp_url: str, caller: Caller, identities: Path, backend: BackendDouble
) -> None:
    """Cold and hot, without the header or with one that says no; and the answer is the only message."""
    async with running(amqp_url, identities, backend) as worker:
        for job_id, asks in enumerate((None, False, "false", 0)):
            await caller.publish("a", str(job_id), asks)
        await wait_until(lambda: len(caller.inbox) >= 4)
        assert all(caller.answered(str(job_id)) for job_id in range(4))
        assert not worker.counters.measures.progress
        assert worker.counters.measures.eta_errors["job"].count == 0


async def test_a_job_behind_others_is_told_how_many(
    running: Running, amqp_url: str, caller: Caller, identities: Path, backend: BackendDouble
) -> None:
    """On a hot model: queued behind those in hand, with an ETA from what runs took; running when its turn comes."""
    async with running(amqp_url, identities, backend, threads=1, prefetch=8) as worker:
        await caller.publish("a", "first", None)
        await wait_until(lambda: caller.answered("first"))
        backend.running.shut()
        await caller.publish("a", "blocks", None)
        await wait_until(lambda: backend.running.passing)
        await caller.publish("a", "before", None)
        await caller.publish("a", "asks", "yes")
        await wait_until(lambda: caller.told("asks"))
        told = caller.told("asks")
        assert [p.state for p in told] == ["queued"]
        assert told[0].ahead == 2
        assert told[0].eta is not None
        backend.running.open()
        await wait_until(lambda: caller.answered("asks"))
        assert caller.states("asks") == ["queued", "running"]
        assert not worker._tenants["a"]._server.serving.batcher._watched  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


async def test_callers_who_come_while_a_claim_begins_are_told_too(
    running: Running, amqp_url: str, caller: Caller, identities: Path, backend: BackendDouble
) -> None:
    """A burst on a cold model: the first one wakes it without asking, and those whose hints come then have asked."""
    backend.loading.shut()
    async with running(amqp_url, identities, backend) as worker:
        with_hint = [str(number) for number in range(20)]
        async with asyncio.TaskGroup() as tasks:
            for job_id in with_hint:
                tasks.create_task(caller.publish("a", job_id, None if job_id == "0" else True))
        await wait_until(lambda: backend.loading.passing)
        hints = worker.counters.hints
        backend.loading.open()
        await wait_until(lambda: all(map(caller.answered, with_hint)), 20)
        told_of_load = [job_id for job_id in with_hint if "loading" in caller.states(job_id)]
        assert len(told_of_load) >= min(hints, len(with_hint)) - 1
        assert all(caller.states(job_id)[-1] == "running" for job_id in with_hint[1:])


async def test_a_load_that_fails_puts_its_callers_back_into_the_queue(
    running: Running, amqp_url: str, caller: Caller, identities: Path, backend: BackendDouble
) -> None:
    """They hear so, and the answer is what becomes of the job in the end; nobody is left on the list."""
    backend.load_error = LoadFailed("not this time")
    async with running(amqp_url, identities, backend) as worker:
        await caller.publish("a", "1")
        await wait_until(lambda: caller.states("1") == ["queued", "loading", "queued"])
        await wait_until(lambda: "a" not in worker._tenants)
        teller = worker._parts.settler.progress
        assert (teller._asking, teller._claims, teller._loads) == ({}, set(), {})
        assert worker.counters.measures.eta_errors["load"].count == 0
        backend.load_error = None


async def test_nobody_is_told_in_a_queue_of_the_platforms_own(
    running: Running, amqp_url: str, caller: Caller, identities: Path, backend: BackendDouble
) -> None:
    """A job that names one for its answers gets no progress there either."""
    async with running(amqp_url, identities, backend) as worker:
        envelope = Properties(
            message_id="1", reply_to="qworker.jobs.b", content_type=MSGPACK, headers={PROGRESS_HEADER: True}
        )
        body = encode_job(Job("1", "a", (tensor("x", X),)), MSGPACK)
        await caller.session.publish(JOBS, "a", body, envelope)
        await wait_until(lambda: worker.counters.jobs_dead_lettered == 1)
        assert not worker.counters.measures.progress
        depth = await caller.session.depth("qworker.jobs.b")
        assert depth is not None
        assert depth.ready == 0


async def test_offline_jobs_may_ask_too(
    running: Running, amqp_url: str, caller: Caller, identities: Path, backend: BackendDouble
) -> None:
    """Their lane has hints and hands of its own, and the same words."""
    async with running(amqp_url, identities, backend):
        await caller.publish("a", "1", exchange=BATCH)
        await wait_until(lambda: caller.answered("1"), 20)
        assert caller.states("1")[-1] == "running"


async def test_a_second_load_is_estimated_by_the_first(
    running: Running, amqp_url: str, caller: Caller, identities: Path, backend: BackendDouble
) -> None:
    """What it took here counts, not what the card says: the job hears of it before the card is read again."""
    backend.load_seconds = 0.5
    async with running(amqp_url, identities, backend, max_concurrent_loads=1) as worker:
        await caller.publish("a", "1")
        await wait_until(lambda: caller.answered("1"))
        worker._tenants["a"].leave()
        await wait_until(lambda: "a" not in worker._tenants)
        await caller.publish("a", "2")
        await wait_until(lambda: caller.answered("2"))
        first = caller.told("2")[0]
        assert first.state == "queued"
        assert first.eta is not None
        assert first.eta >= 0.5
        assert is_hot(worker, "a")


def test_the_hot_path_asks_once() -> None:
    """A job whose caller does not ask goes to the batcher as ever: nothing of the teller is called."""
    from qworker.worker import in_hand

    calls: list[Callable[..., Any]] = []

    class Batcher:
        def submit(self, *_: Any) -> int:
            calls.append(self.submit)
            return 1

    class Serving:
        batcher = Batcher()

    class Delivery:
        properties = Properties()

    job = in_hand.JobInHand.__new__(in_hand.JobInHand)
    job.serving, job.delivery, job.deadline = Serving(), Delivery(), None  # pyright: ignore[reportAttributeAccessIssue]
    job.submit(Job("1", "a", ()))
    assert len(calls) == 1
    assert not hasattr(job, "server"), "what it would take to tell anybody was not there, and not missed"
