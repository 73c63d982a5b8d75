"""The broker permissions of each role, on a real broker: its work can be done with them, and nothing more."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from qworker import Client
from qworker.app import declare_models
from qworker.broker.node import PrivateNode
from qworker.errors import BrokerRefused
from qworker.store.local import LocalStore
from qworker.wire.topology import CONTROL, DEAD, RESULTS, order_key
from tests.e2e.caller import Caller
from tests.e2e.fleet import COMMAND, ROOT, Fleet
from tests.e2e.models import copy_store, inputs_of
from tests.support.models import identity
from tests.support.rabbitmq import start_node
from tests.support.waiting import wait_until_sync

GRANT = ROOT / "ops" / "rabbitmq" / "grant"
ROLES = {"alice": "publisher", "bob": "publisher", "wanda": "worker", "oscar": "operator", "carl": "collector"}
MODELS = "echo|words"
"""What alice, bob and carl may use; ``other`` is there too."""
BOBS = "qworker.replies.bob.kept"
ACCESS_REFUSED, RESOURCE_LOCKED = 403, 405
X = np.ones((2, 3), np.float32)


def granted(user: str) -> dict[str, Any]:
    """What the script says, as an operator would get it."""
    command = [sys.executable, str(GRANT), ROLES[user], user, "--json", "--models", MODELS]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """A broker with one user a role (password: the name)."""
    parts = [granted(user) for user in ROLES]
    users = [{"name": "guest", "password": "guest", "tags": ["administrator"]}]
    everything = {"user": "guest", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    definitions = {
        "vhosts": [{"name": "/"}],
        "users": users + [{"name": user, "password": user, "tags": []} for user in ROLES],
        "permissions": [everything, *(each for part in parts for each in part["permissions"])],
        "topic_permissions": [each for part in parts for each in part["topic_permissions"]],
    }
    node = start_node(tmp_path_factory.mktemp("strict"), definitions=definitions)
    yield node
    node.stop(timeout=10.0)


def url(node: PrivateNode, user: str) -> str:
    return node.url_of("/", (user, user))


@pytest.fixture(scope="module")
def served(strict: PrivateNode, made_up_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """The operator has registered the models, a worker serves them, and bob has a durable reply queue."""
    folder = tmp_path_factory.mktemp("roles")
    store = copy_store(made_up_store, folder / "store")
    asyncio.run(declare_models(url(strict, "oscar"), LocalStore(store).models()))
    fleet = Fleet(url(strict, "wanda"), store, folder / "workers")
    fleet.start(1)
    Caller(url(strict, "bob"), BOBS, durable=True, listen=False).close()
    yield strict
    try:
        fleet.finish()
    finally:
        fleet.stop()


# --- what each role is for -----------------------------------------------------------------------


async def test_a_publisher_calls_publishes_and_reads_its_own(served: PrivateNode) -> None:
    """By direct reply-to, by a queue that the client names, and by a durable one of its own name."""
    async with Client(url(served, "alice")) as client:
        assert ((await client.call("echo", {"x": X}, timeout=60)).arrays()["y"] == X).all()
        for queue in (client.reply_queue(), client.reply_queue("qworker.replies.alice.mine", durable=True)):
            async with queue:
                job_id = await client.publish("echo", {"x": X}, reply_to=queue.name)
                assert (await queue.receive()).correlation_id == job_id


def test_a_publisher_may_cancel(served: PrivateNode) -> None:
    """One order, and no other."""
    _allowed(url(served, "alice"), lambda channel: channel.basic_publish(CONTROL, order_key("cancel"), b""))


def _qworker(*arguments: str) -> str:
    command = [*COMMAND, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def test_an_operator_registers_a_model_by_files(served: PrivateNode, tmp_path: Path) -> None:
    """The user and the password of the settings' files, as everywhere: the URL's would be refused."""
    (tmp_path / "model.onnx").write_bytes(identity())
    for name in ("user", "password"):
        (tmp_path / name).write_text("oscar\n")
    config = tmp_path / "qworker.toml"
    config.write_text(f'broker_username_file = "{tmp_path}/user"\nbroker_password_file = "{tmp_path}/password"\n')
    command = [
        "models",
        "register",
        str(tmp_path / "model.onnx"),
        "--id",
        "by-files",
        "--store",
        str(tmp_path / "store"),
    ]
    _qworker(*command, "--config", str(config), "--broker", url(served, "nobody"))
    _allowed(url(served, "oscar"), lambda channel: channel.queue_declare("qworker.jobs.by-files", passive=True))


def test_an_operator_sees_to_dead_letters(served: PrivateNode) -> None:
    """Lists them, puts one back (it comes again, being as bad as before), and drops it."""
    broker = ("--broker", url(served, "oscar"), "--json")
    with Caller(url(served, "alice"), "qworker.replies.alice.dead", listen=False) as alice:
        job_id = alice.send("echo", b"\xc1 nothing", reply_to=None)
    wait_until_sync(lambda: job_id in _qworker("dead", "list", *broker), 30, what="the dead letter")
    assert job_id in _qworker("dead", "requeue", "--job", job_id, *broker)
    wait_until_sync(lambda: job_id in _qworker("dead", "list", *broker), 30, what="the dead letter again")
    assert job_id in _qworker("dead", "drop", "--job", job_id, *broker)
    assert job_id not in _qworker("dead", "list", *broker)


def test_an_operator_gives_orders(served: PrivateNode) -> None:
    """And hears the answers, and the events."""
    broker = ("--broker", url(served, "oscar"), "--json")
    assert [row["state"] for row in json.loads(_qworker("workers", "ls", *broker))["workers"]] == ["ready"]
    assert json.loads(_qworker("why", "echo", *broker))["answers"]
    _allowed(url(served, "oscar"), bind("qworker.watch.x", "qworker.events", "snapshot.#"))


def test_an_operator_scores(served: PrivateNode, made_up_store: Path, tmp_path: Path) -> None:
    """Publishes into the batch lane, and reads the answers of its own run."""
    rows = np.arange(30, dtype=np.float32).reshape(10, 3)
    np.savez(tmp_path / "rows.npz", x=rows)
    files = ("-i", str(tmp_path / "rows.npz"), "-o", str(tmp_path / "scored.npz"))
    _qworker("score", *files, "-m", "echo", "--store", str(made_up_store), "--broker", url(served, "oscar"))
    with np.load(tmp_path / "scored.npz") as scored:
        assert sorted(scored["row"]) == list(range(10))
        assert (scored["y"] == rows[scored["row"]]).all()


def test_a_collector_collects(served: PrivateNode) -> None:
    """The results of its models, as they come."""
    with Caller(url(served, "carl"), "qworker.collected.carl.all", listen=False) as carl:
        carl.channel.queue_bind(carl.reply_queue, RESULTS, "echo")
        with Caller(url(served, "bob"), BOBS, durable=True, listen=False) as bob:
            job_id = bob.job("echo", inputs_of("echo", 1), reply_to=None)
        assert carl.get(carl.reply_queue)[0].correlation_id == job_id


# --- and nothing more ----------------------------------------------------------------------------

Try = Callable[[BlockingChannel], object]


def publish(exchange: str, key: str) -> Try:
    return lambda channel: channel.basic_publish(exchange, key, b"")


def get(queue: str) -> Try:
    return lambda channel: channel.basic_get(queue, auto_ack=True)


def consume(queue: str) -> Try:
    return lambda channel: channel.basic_consume(queue, lambda *_: None)


def declare(queue: str, **arguments: str) -> Try:
    return lambda channel: channel.queue_declare(queue, exclusive=True, arguments=arguments)


def bind(queue: str, exchange: str, key: str) -> Try:
    def work(channel: BlockingChannel) -> None:
        channel.queue_declare(queue, exclusive=True)  # that much is allowed
        channel.queue_bind(queue, exchange, key)

    return work


_REPLIES_ALICE = "qworker.replies.alice.bound"
_COLLECTED = "qworker.collected.carl.bound"
REFUSED: dict[str, tuple[str, Try]] = {
    "alice reads jobs": ("alice", get("qworker.jobs.echo")),
    "alice consumes jobs": ("alice", consume("qworker.jobs.echo")),
    "alice reads dead letters": ("alice", get("qworker.dead")),
    "alice reads stray jobs": ("alice", get("qworker.unroutable")),
    "alice reads hints": ("alice", get("qworker.activation")),
    "alice reads expired jobs": ("alice", get("qworker.expired")),
    "alice reads bob's results": ("alice", get(BOBS)),
    "alice consumes bob's results": ("alice", consume(BOBS)),
    "alice takes bob's name": ("alice", declare("qworker.replies.bob.new")),
    "alice takes a name like bob's": ("alice", declare("qworker.replies.alicebob")),
    "alice declares anything": ("alice", declare("anything")),
    "alice takes a lease": ("alice", declare("qworker.lease.echo.0")),
    "alice becomes the sweeper": ("alice", declare("qworker.sweeper")),
    "alice declares an exchange": ("alice", lambda channel: channel.exchange_declare("qworker.hot.echo.0", "direct")),
    "alice deletes a model's queue": ("alice", lambda channel: channel.queue_delete("qworker.jobs.echo")),
    "alice deletes bob's queue": ("alice", lambda channel: channel.queue_delete(BOBS)),
    "alice empties a model's queue": ("alice", lambda channel: channel.queue_purge("qworker.jobs.echo")),
    "alice answers bob": ("alice", publish("", BOBS)),
    "alice goes around the exchange": ("alice", publish("", "qworker.jobs.echo")),
    "alice makes results": ("alice", publish("qworker.results", "echo")),
    "alice makes dead letters": ("alice", publish("qworker.dead", "echo")),
    "alice makes events": ("alice", publish("qworker.events", "answered")),
    "alice makes hints": ("alice", publish("qworker.cold", "echo")),
    "alice uses another model": ("alice", publish("qworker.jobs", "other")),
    "alice uses another model in batch": ("alice", publish("qworker.batch", "other")),
    "alice uses a model that begins alike": ("alice", publish("qworker.jobs", "echo2")),
    "alice gives another order": ("alice", publish("qworker.control", "unload.all")),
    "alice pins a model": ("alice", publish("qworker.control", "pin.all")),
    "alice drains a worker": ("alice", publish("qworker.control", "drain.worker-0")),
    "alice watches": ("alice", publish("qworker.control", "watch.all")),
    "alice hears all jobs": ("alice", bind(_REPLIES_ALICE, "qworker.jobs", "#")),
    "alice hears all results": ("alice", bind(_REPLIES_ALICE, "qworker.results", "#")),
    "alice hears dead letters": ("alice", bind(_REPLIES_ALICE, "qworker.dead", "#")),
    "alice hears hints": ("alice", bind(_REPLIES_ALICE, "qworker.presence", "#")),
    "alice hears orders": ("alice", bind(_REPLIES_ALICE, "qworker.control", "#")),
    "alice hears events": ("alice", bind(_REPLIES_ALICE, "qworker.events", "#")),
    "alice dead-letters into results": (
        "alice",
        declare(_REPLIES_ALICE, **{"x-dead-letter-exchange": "qworker.results"}),
    ),
    "the worker reads replies": ("wanda", get(BOBS)),
    "the worker takes a reply queue's name": ("wanda", declare("qworker.replies.wanda.x")),
    "the worker hears results": ("wanda", bind("qworker.control.x", "qworker.results", "#")),
    "the worker declares anything": ("wanda", declare("anything")),
    "the worker uses another exchange": ("wanda", publish("amq.topic", "x")),
    "the operator answers bob": ("oscar", publish("", BOBS)),
    "the operator makes results": ("oscar", publish("qworker.results", "echo")),
    "the operator reads replies": ("oscar", get(BOBS)),
    "the operator hears results": ("oscar", bind("qworker.watch.x", "qworker.results", "#")),
    "the operator takes a lease": ("oscar", declare("qworker.lease.echo.0")),
    "the operator declares anything": ("oscar", declare("anything")),
    "the collector publishes jobs": ("carl", publish("qworker.jobs", "echo")),
    "the collector makes results": ("carl", publish("qworker.results", "echo")),
    "the collector hears another model": ("carl", bind(_COLLECTED, "qworker.results", "other")),
    "the collector hears all models": ("carl", bind(_COLLECTED, "qworker.results", "#")),
    "the collector hears jobs": ("carl", bind(_COLLECTED, "qworker.jobs", "echo")),
    "the collector reads jobs": ("carl", get("qworker.jobs.echo")),
    "the collector reads replies": ("carl", get(BOBS)),
}


def _channel(url: str) -> tuple[pika.BlockingConnection, BlockingChannel]:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.confirm_delivery()
    return connection, channel


def _allowed(url: str, work: Try) -> None:
    connection, channel = _channel(url)
    try:
        work(channel)
    finally:
        connection.close()


@pytest.mark.parametrize("what", REFUSED)
def test_refused(served: PrivateNode, what: str) -> None:
    """The broker refuses it by permission, not for another reason."""
    user, work = REFUSED[what]
    connection, channel = _channel(url(served, user))
    with pytest.raises(ChannelClosedByBroker) as closed:
        work(channel)
    connection.close()
    assert closed.value.reply_code == ACCESS_REFUSED, closed.value


PLATFORMS = ("qworker.jobs.other", "qworker.activation", "qworker.strikes.forged", "qworker.results.forged")


@pytest.mark.parametrize("queue", PLATFORMS)
def test_a_publisher_cannot_write_by_a_workers_hand(served: PrivateNode, queue: str) -> None:
    """An answer goes into no queue of the platform's own: the job is a dead letter, and the queue stays as it was."""
    connection, channel = _channel(served.url)  # an administrator: the queues are there, and could be written to
    channel.queue_declare(queue, passive=queue in PLATFORMS[:2], exclusive=queue not in PLATFORMS[:2])
    channel.queue_purge(DEAD)
    with Caller(url(served, "alice"), "qworker.replies.alice.hand") as alice:
        job_id = alice.job("echo", inputs_of("echo", 1), reply_to=queue)
        letter = wait_until_sync(lambda: channel.basic_get(DEAD, auto_ack=True)[1], 20, what="the dead letter")
        assert (letter.message_id, letter.headers["x-qworker-cause"]) == (job_id, "reply_gone")
        assert alice.call("echo", inputs_of("echo", 2)).code == "ok"
    assert channel.queue_declare(queue, passive=True).method.message_count == 0
    connection.close()


async def test_nobody_else_reads_an_exclusive_reply_queue(served: PrivateNode) -> None:
    """Its name has the form that every publisher may read: the connection is what guards it."""
    async with Client(url(served, "alice")) as client, client.reply_queue() as replies:
        connection, channel = _channel(url(served, "bob"))
        with pytest.raises(ChannelClosedByBroker) as closed:
            channel.basic_get(replies.name)
        connection.close()
        assert closed.value.reply_code == RESOURCE_LOCKED
        job_id = await client.publish("echo", {"x": X}, reply_to=replies.name)
        assert (await replies.receive()).correlation_id == job_id


async def test_our_client_says_what_is_not_allowed(served: PrivateNode) -> None:
    """A typed error that names the queue, not a hang."""
    async with Client(url(served, "alice")) as client:
        with pytest.raises(BrokerRefused, match=BOBS):
            async with client.reply_queue(BOBS, durable=True):
                pass


def test_the_script_takes_no_name_that_could_be_anothers() -> None:
    """A dot, or a letter that means something in a regular expression, in a user's name is refused."""
    for name in ("al.ice", "alice|bob", ".*", ""):
        done = subprocess.run(
            [sys.executable, str(GRANT), "publisher", name, "--json"], check=False, capture_output=True, timeout=60
        )
        assert done.returncode == 2, name


def test_the_script_runs_rabbitmqctl(tmp_path: Path) -> None:
    """Takes all away first, gives last, and stops at the first command that fails."""
    told = tmp_path / "told"
    ctl = tmp_path / "ctl"
    ctl.write_text(f'#!/bin/sh\necho "$1 $4 $5" >> {told}\n[ "$1" != "$FAIL" ]\n')
    ctl.chmod(0o755)
    command = [sys.executable, str(GRANT), "publisher", "alice", "--rabbitmqctl", str(ctl)]
    subprocess.run(command, check=True, timeout=60)
    lines = told.read_text().splitlines()
    assert lines[0] == "set_permissions alice ^$"
    assert lines[1].startswith("clear_topic_permissions alice")
    assert [line.split()[0] for line in lines[2:]] == ["set_topic_permissions"] * 3 + ["set_permissions"]
    told.unlink()
    failed = subprocess.run(
        command, check=False, env={"FAIL": "set_topic_permissions", "PATH": "/bin"}, capture_output=True, timeout=60
    )
    assert failed.returncode == 1
    assert len(told.read_text().splitlines()) == 3
