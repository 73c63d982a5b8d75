"""The broker goes away, says no, or is not there yet."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pika
import pytest
from pika.exceptions import AMQPError

from qworker.broker.node import PrivateNode
from qworker.wire.topology import Queue, lane_queue, lane_topology
from tests.e2e.caller import Caller
from tests.e2e.fleet import Fleet, WorkerProcess
from tests.e2e.models import answer_of, copy_store, inputs_of
from tests.support.rabbitmq import STRANGER, start_node
from tests.support.waiting import wait_until_sync

pytestmark = pytest.mark.broker

REPLIES = "replies-that-survive"


@pytest.fixture(scope="module")
def late_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LateNode]:
    """A broker of this file's own that the tests may start and stop. Not started yet."""
    node = LateNode(tmp_path_factory.mktemp("late-node"))
    yield node
    if node.node is not None:
        node.node.stop()


@pytest.fixture
def lonely(late_node: LateNode, made_up_store: Path, tmp_path: Path) -> Iterator[Fleet]:
    """A fleet on that broker."""
    fleet = Fleet(late_node.url, copy_store(made_up_store, tmp_path / "store"), tmp_path / "workers")
    yield fleet
    fleet.stop()


class LateNode:
    """A node whose address is known before it runs."""

    def __init__(self, folder: Path) -> None:
        self.port = port_that_stays_free()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        self.node: PrivateNode | None = None
        self._folder = folder

    def start(self) -> PrivateNode:
        if self.node is None:
            self.node = start_node(self._folder, port=self.port)
        return self.node


def port_that_stays_free() -> int:
    """Not one of those that the system gives to outgoing connections.

    While nobody listens on such a port, a client that keeps trying it is one day given it as its own, connects
    to itself, and the broker cannot come back.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Traffic(threading.Thread):
    """Publishes jobs one after the other, whatever becomes of the broker, until told to stop.

    ``confirmed`` has the jobs that the broker has promised to keep.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.confirmed: dict[str, tuple[str, int]] = {}
        self.outages = 0
        self._url = url
        self._told = threading.Event()

    def run(self) -> None:
        k = 0
        while not self._told.is_set():
            try:
                with Caller(self._url, REPLIES, durable=True, listen=False) as caller:
                    while not self._told.is_set():
                        model = ("echo", "roll", "other")[k % 3]
                        self.confirmed[caller.job(model, inputs_of(model, k))] = (model, k)
                        k += 1
            except (AMQPError, OSError):
                self.outages += 1
                time.sleep(0.1)

    def stop(self) -> None:
        self._told.set()
        self.join(20)
        assert not self.is_alive(), "the publisher hangs"


def test_broker_down_at_start(lonely: Fleet, late_node: LateNode) -> None:
    """The worker says what it waits for, tries ever more rarely, and serves once the broker is up."""
    lonely.start(1, wait=False)
    (worker,) = lonely.workers
    first = worker.wait_event("broker.unavailable")
    worker.port = worker.wait_event("http.listening")["port"]
    assert str(late_node.port) in first["reason"]
    assert "guest:guest" not in worker.text(), "the password is in the log"
    status, page = worker.page("/healthz")
    assert (status, page["alive"]) == (200, True)
    status, page = worker.page("/readyz")
    assert (status, page["ready"]) == (503, False)
    late_node.start()
    worker.wait_ready()
    waits = [line["retry_seconds"] for line in worker.events("broker.unavailable")]
    assert waits[:3] == sorted(waits[:3]), "the back-off grows"
    assert waits[0] < waits[-1]
    with Caller(late_node.url) as caller:
        assert caller.call("echo", inputs_of("echo", 1)).code == "ok"
    lonely.finish()


@pytest.mark.chaos
@pytest.mark.slow
def test_broker_stops_and_starts_under_traffic(lonely: Fleet, late_node: LateNode) -> None:
    """Every job that the broker confirmed is answered, and each model is hot on one worker again."""
    node = late_node.start()
    Caller(node.url, REPLIES, durable=True, listen=False).close()
    lonely.start(2)
    traffic = Traffic(node.url)
    traffic.start()
    try:
        for model in ("echo", "roll", "other"):
            lonely.holder(model)
        node.restart()
        for worker in lonely.workers:
            worker.wait_event("broker.lost")
            worker.wait_ready()
        seen = len(traffic.confirmed)
        deadline = time.monotonic() + 30
        while len(traffic.confirmed) < seen + 30 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        traffic.stop()
    assert traffic.outages >= 1, "the broker was never away for the publisher"
    with Caller(node.url, REPLIES, durable=True) as caller:
        for job_id, reply in caller.wait(traffic.confirmed, 60).items():
            model, k = traffic.confirmed[job_id]
            assert (reply.y == answer_of(model, inputs_of(model, k))).all()
    for model in ("echo", "roll", "other"):
        wait_until_sync(
            lambda model=model: [worker.is_hot(model) for worker in lonely.workers].count(True) == 1,
            what=f"{model} is hot on one worker",
            timeout=40,
        )
    lonely.finish()


def last_line(worker: WorkerProcess) -> str:
    """What a worker that gave up has said, which is one line and no traceback."""
    assert worker.wait_exit(30) == 1
    said = [line for line in worker.text().splitlines() if line.startswith("qworker worker: ")]
    assert len(said) == 1, worker.text()
    assert "Traceback" not in worker.text()
    return said[0]


def test_wrong_password(fleet: Fleet) -> None:
    """The worker stops at once and says why, without the password."""
    fleet.url = fleet.url.replace("guest:guest@", "guest:not-this-one@")
    fleet.start(1, wait=False)
    said = last_line(fleet.workers[0])
    assert "refused" in said
    assert "assword" in said
    assert "not-this-one" not in fleet.workers[0].text()


def test_no_permission(fleet: Fleet) -> None:
    """A user who may not declare anything is told so."""
    fleet.url = fleet.url.replace("guest:guest@", "{}:{}@".format(*STRANGER))
    fleet.start(1, wait=False)
    assert "qworker." in last_line(fleet.workers[0])


def test_queue_with_other_arguments(fleet: Fleet) -> None:
    """A model's queue that somebody declared differently: one error that names the queue and both values."""
    connection = pika.BlockingConnection(pika.URLParameters(fleet.url))
    (ours,) = (each for each in lane_topology("jobs", "echo", "quorum") if isinstance(each, Queue))
    arguments = {**ours.arguments, "x-delivery-limit": 7}
    connection.channel().queue_declare(lane_queue("jobs", "echo"), durable=True, arguments=arguments)
    connection.close()
    fleet.start(1, wait=False)
    said = last_line(fleet.workers[0])
    assert lane_queue("jobs", "echo") in said
    assert "x-delivery-limit = 7" in said
    assert str(ours.arguments["x-delivery-limit"]) in said


def test_store_that_is_not_there_yet(fleet: Fleet, caller_before: Caller) -> None:
    """A worker without its store says so, keeps the jobs, and serves once the store is there."""
    away = fleet.store.with_name("away")
    fleet.store.rename(away)
    fleet.start(1, wait=False)
    (worker,) = fleet.workers
    assert str(fleet.store) in worker.wait_event("store.unreadable")["reason"]
    worker.port = worker.wait_event("http.listening")["port"]
    wait_until_sync(lambda: str(fleet.store) in (worker.page("/readyz")[1]["reason"] or ""))
    job_id = caller_before.job("echo", inputs_of("echo", 3))
    wait_for_two_complaints = len(worker.events("store.unreadable")) + 2
    deadline = time.monotonic() + 20
    while len(worker.events("store.unreadable")) < wait_for_two_complaints and time.monotonic() < deadline:
        time.sleep(0.05)
    away.rename(fleet.store)
    reply = caller_before.wait([job_id], 30)[job_id]
    assert (reply.y == answer_of("echo", inputs_of("echo", 3))).all()
    worker.wait_ready()
    fleet.finish()


@pytest.fixture
def caller_before(amqp_url: str) -> Iterator[Caller]:
    """A caller that is there before any worker has declared the topology."""
    with Caller(amqp_url) as caller:
        yield caller


def test_worker_writes_nothing_into_its_store(fleet: Fleet, caller: Caller) -> None:
    """Serving needs no right to write: what the store holds is the same, to the file times, after a job."""
    before = snapshot(fleet.store)
    fleet.start(1)
    assert caller.call("table-b", inputs_of("table-b", 2)).code == "ok"
    fleet.finish()
    assert snapshot(fleet.store) == before


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(root.rglob("*"))}
