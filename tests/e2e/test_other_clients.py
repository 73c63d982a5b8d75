"""Clients that have never heard of us: pika with JSON and with MessagePack, and Node.js with amqplib."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pika
import pytest

from tests.e2e.caller import JSON, Caller, as_json, packed
from tests.e2e.fleet import ROOT, Fleet
from tests.e2e.models import answer_of, copy_store, inputs_of
from tests.support.rabbitmq import SuiteNode

NODE_FOLDER = ROOT / ".cache" / "node"
AMQPLIB = "amqplib@0.10.9"


@pytest.fixture(scope="module")
def shared(suite_node: SuiteNode, made_up_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One worker for the clients of this file."""
    folder = tmp_path_factory.mktemp("clients")
    fleet = Fleet(suite_node.fresh_url(), copy_store(made_up_store, folder / "store"), folder / "workers")
    fleet.start(1)
    yield fleet
    try:
        fleet.finish()
    finally:
        fleet.stop()


@pytest.mark.parametrize("model", ["echo", "roll", "table-a"])
def test_pika_with_messagepack(shared: Fleet, model: str) -> None:
    """A body made by hand, a reply queue of one's own, and the result under the same correlation id."""
    inputs = inputs_of(model, 7)
    with Caller(shared.url) as caller:
        reply = caller.call_raw(model, packed(model, inputs))
    assert reply.content_type == "application/msgpack"
    assert (reply.y == answer_of(model, inputs)).all()
    assert reply.fields["model_name"] == model
    assert reply.fields["model_version"] == "1"


@pytest.mark.parametrize("content_type", [JSON, None])
@pytest.mark.parametrize("model", ["echo", "roll", "table-a"])
def test_pika_with_json(shared: Fleet, model: str, content_type: str | None) -> None:
    """A JSON body is answered with JSON, whether its type is named or not."""
    inputs = inputs_of(model, 7)
    with Caller(shared.url) as caller:
        reply = caller.call_raw(model, as_json(inputs), content_type=content_type)
    assert reply.content_type == JSON
    assert (reply.y == answer_of(model, inputs)).all()


def test_text_as_json(shared: Fleet) -> None:
    """Strings in, strings out."""
    body = {"inputs": [{"name": "words", "shape": [2], "datatype": "BYTES", "data": ["hund", "cat"]}]}
    with Caller(shared.url) as caller:
        reply = caller.call_raw("words", json.dumps(body).encode(), content_type=JSON)
    outputs = {output["name"]: output["data"] for output in reply.fields["outputs"]}
    assert outputs == {"translated": ["Hündin", "Katze"], "same": ["hund", "cat"]}


def test_nothing_but_exchange_key_and_body(shared: Fleet) -> None:
    """A publisher that sets no property but where to answer is served; the job gets an id of its own."""
    with pika.BlockingConnection(pika.URLParameters(shared.url)) as connection:
        channel = connection.channel()
        replies = channel.queue_declare("", exclusive=True).method.queue
        body = packed("echo", {"x": np.ones((1, 3), np.float32)})
        channel.basic_publish("qworker.jobs", "echo", body, pika.BasicProperties(reply_to=replies))
        _, properties, answer = next(channel.consume(replies, auto_ack=True, inactivity_timeout=20))
        assert answer is not None, "no reply"
        channel.cancel()
    fields = msgpack.unpackb(answer)
    assert fields["outputs"][0]["data"] == np.ones((1, 3), np.float32).tobytes()
    assert fields["id"]
    assert properties.correlation_id == fields["id"]


def test_pika_with_direct_reply_to(shared: Fleet) -> None:
    """RPC as RabbitMQ's own tutorial does it."""
    with pika.BlockingConnection(pika.URLParameters(shared.url)) as connection:
        channel = connection.channel()
        answers: list[bytes] = []
        channel.basic_consume("amq.rabbitmq.reply-to", lambda *delivery: answers.append(delivery[3]), auto_ack=True)
        body = packed("echo", {"x": np.ones((1, 3), np.float32)})
        for number in range(3):
            properties = pika.BasicProperties(reply_to="amq.rabbitmq.reply-to", correlation_id=str(number))
            channel.basic_publish("qworker.jobs", "echo", body, properties)
        for _ in range(100):
            connection.process_data_events(0.2)
            if len(answers) == 3:
                break
    assert len(answers) == 3
    assert all("outputs" in msgpack.unpackb(answer) for answer in answers)


NODE_PROGRAM = """
const amqp = require('amqplib');
(async () => {
  const connection = await amqp.connect(process.argv[2]);
  const channel = await connection.createConfirmChannel();
  const { queue } = await channel.assertQueue('', { exclusive: true });
  const answers = {};
  const all = new Promise((resolve) => channel.consume(queue, (message) => {
    answers[message.properties.correlationId] = JSON.parse(message.content.toString());
    if (Object.keys(answers).length === 4) resolve();
  }, { noAck: true }));
  const publish = (id, model, body) => channel.publish('qworker.jobs', model, Buffer.from(body),
    { correlationId: id, replyTo: queue, contentType: 'application/json' });
  const tensor = { name: 'x', shape: [1, 3], datatype: 'FP32', data: [1.5, -2, 3] };
  publish('good', 'echo', JSON.stringify({ id: 'of-node', inputs: [tensor] }));
  publish('words', 'words', JSON.stringify({ inputs: [
    { name: 'words', shape: [1], datatype: 'BYTES', data: ['hund'] }] }));
  publish('bad', 'echo', JSON.stringify({ inputs: [{ ...tensor, shape: [2, 3] }] }));
  publish('unknown', 'nobody', JSON.stringify({ inputs: [tensor] }));
  await channel.waitForConfirms();
  await all;
  console.log(JSON.stringify(answers));
  await connection.close();
})().catch((error) => { console.error(error); process.exit(1); });
"""


@pytest.fixture(scope="module")
def amqplib() -> Path:
    """A folder with amqplib; where Node.js or the package cannot be had, the test is skipped."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no Node.js on this machine")
    if not (NODE_FOLDER / "node_modules" / "amqplib").is_dir():
        NODE_FOLDER.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", str(NODE_FOLDER), AMQPLIB]
        done = subprocess.run(command, cwd=NODE_FOLDER, capture_output=True, text=True, timeout=90, check=False)
        if done.returncode:
            pytest.skip(f"npm could not install {AMQPLIB}: {done.stderr.strip()[-300:]}")
    return NODE_FOLDER


def test_node(shared: Fleet, amqplib: Path) -> None:
    """Results and failures for a JavaScript program, in JSON."""
    done = subprocess.run(
        ["node", "-e", NODE_PROGRAM, "client", shared.url],
        cwd=amqplib,
        env={**os.environ, "NODE_PATH": str(amqplib / "node_modules")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["good"]["id"] == "of-node"
    assert answers["good"]["outputs"] == [{"name": "y", "shape": [1, 3], "datatype": "FP32", "data": [1.5, -2.0, 3.0]}]
    assert answers["words"]["outputs"][0]["data"] == ["Hündin"]
    assert answers["bad"]["error"]["code"] == "invalid_input"
    assert answers["unknown"]["error"]["code"] == "unknown_model"
