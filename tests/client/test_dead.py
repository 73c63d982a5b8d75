"""``qworker dead`` on a real broker: list, show, put back and drop, by filters; looking loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from qworker.broker.base import Properties
from qworker.broker.fast.session import FastConnector
from qworker.cli import dead
from qworker.client.dead_letters import REQUEUED
from qworker.wire.topology import (
    CAUSE_HEADER,
    DEAD,
    DEADLINE_HEADER,
    lane_queue,
    lane_topology,
    static_topology,
    strike_queue,
)
from tests.support.broker import Inbox, ready
from tests.support.waiting import wait_until

pytestmark = pytest.mark.broker

MARK = "0123456789abcdef0123456789abcdef"
NOW = int(time.time() * 1000)
HOUR = 3_600_000


def letter(job: str, cause: str, model: str = "m", at: int = NOW, **more: Any) -> tuple[str, bytes, Properties]:
    """As ``worker/settle`` writes them."""
    headers = {
        CAUSE_HEADER: cause,
        "x-qworker-reason": f"because of {job}",
        "x-qworker-worker": "w1",
        "x-qworker-model": model,
        "x-qworker-exchange": "qworker.jobs",
        "x-qworker-at": at,
        "x-qworker-attempts": 3,
        "x-qworker-deliveries": 7,
        "mine": "kept",
    }
    return model, job.encode(), Properties(message_id=job, persistent=True, headers=headers | more)


LETTERS = [
    letter("poison", "poison_job", at=NOW - 3 * HOUR, **{"x-qworker-fingerprint": MARK, DEADLINE_HEADER: NOW - HOUR}),
    letter("lonely", "reply_gone", at=NOW - 2 * HOUR),
    letter("strange", "unknown_model", model="other/model", at=NOW - HOUR),
    letter("fresh", "reply_gone"),
]


@pytest.fixture(params=["quorum", "classic"])
async def url(request: pytest.FixtureRequest, amqp_url: str) -> str:
    """A broker with four dead letters and a model's queue."""
    async with await FastConnector(amqp_url).connect() as session:
        await session.declare(*static_topology(request.param), *lane_topology("jobs", "m", request.param))
        await session.declare(strike_queue(MARK))
        for key, body, envelope in LETTERS:
            await session.publish(DEAD, key, body, envelope)

        async def all_there() -> bool:
            return await ready(session, DEAD) == len(LETTERS)

        await wait_until(all_there)
    return amqp_url


async def run(url: str, *arguments: str, expect: int = 0) -> str:
    """The standard output of ``qworker dead``; in a thread, since the command has a loop of its own."""
    app = typer.Typer(pretty_exceptions_enable=False)
    dead.register(app)
    app.command("x")(lambda: None)  # with a single group, typer would do without its name
    variables = {**dict.fromkeys(name for name in os.environ if name.startswith("QWORKER_")), "QWORKER_BROKER": url}
    done = await asyncio.to_thread(CliRunner().invoke, app, ["dead", *arguments], env=variables)
    assert done.exit_code == expect, done.output
    return done.stdout


async def ids(url: str, *filters: str) -> list[str]:
    return [each["job_id"] for each in json.loads(await run(url, "list", "--json", *filters))]


async def test_listing_tells_all_and_takes_nothing(url: str) -> None:
    """Oldest first, however often one looks: the 4.0 default of 20 deliveries would drop them."""
    for _ in range(25):
        assert await ids(url) == ["poison", "lonely", "strange", "fresh"]
    (first, *_) = json.loads(await run(url, "list", "--json"))
    assert (first["cause"], first["attempts"], first["deliveries"], first["worker"]) == ("poison_job", 3, 7, "w1")
    assert (first["reason"], first["fingerprint"], first["at"]) == ("because of poison", MARK, (NOW - 3 * HOUR) / 1000)
    table = await run(url, "list")
    assert "reply_gone" in table
    assert "because of strange" in table


async def test_filters(url: str) -> None:
    """By cause, model, job and age; all that are given must hold."""
    assert await ids(url, "--cause", "reply_gone") == ["lonely", "fresh"]
    assert await ids(url, "--cause", "reply_gone", "--cause", "poison_job", "--older", "90m") == ["poison", "lonely"]
    assert await ids(url, "--model", "other/model") == ["strange"]
    assert await ids(url, "--newer", "90m", "--limit", "1") != []
    assert await ids(url, "--job", "nobody") == []
    await run(url, "list", "--older", "yesterday", expect=2)


async def test_show_saves_the_body(url: str, tmp_path: Path) -> None:
    """With the job as it came."""
    shown = json.loads(await run(url, "show", "strange", "--json", "--body", str(tmp_path / "body")))
    assert (shown["model"], shown["cause"]) == ("other/model", "unknown_model")
    assert (tmp_path / "body").read_bytes() == b"strange"
    await run(url, "show", "nobody", expect=1)
    assert len(await ids(url)) == len(LETTERS)


async def test_requeue_publishes_the_job_afresh(url: str) -> None:
    """Into its lane, without the letter's headers, a deadline that has passed, or the strikes on record."""
    out = json.loads(await run(url, "requeue", "--cause", "poison_job", "--json"))
    assert [each["job_id"] for each in out["requeued"]] == ["poison"]
    assert await ids(url) == ["lonely", "strange", "fresh"]
    async with await FastConnector(url).connect() as session:
        inbox = Inbox()
        await session.consume(lane_queue("jobs", "m"), inbox.take, prefetch=10)
        await wait_until(lambda: len(inbox) == 1)
        (job,) = inbox.deliveries
        assert (job.body, job.properties.message_id, job.exchange) == (b"poison", "poison", "qworker.jobs")
        assert job.properties.headers == {"mine": "kept", REQUEUED: 1}
        assert await session.depth(strike_queue(MARK).name) is None


async def test_drop(url: str) -> None:
    """Only what was chosen; all of them only when that is said."""
    await run(url, "drop", expect=2)
    await run(url, "drop", "--cause", "reply_gone", "--older", "1h")
    assert await ids(url) == ["poison", "strange", "fresh"]
    assert len(json.loads(await run(url, "drop", "--all", "--json"))["dropped"]) == 3
    assert await ids(url) == []
