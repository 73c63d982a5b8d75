"""The messages of ``schemas/golden``, as values. ``python -m tests.wire.golden`` writes the files anew.

Write them anew only for an added field: a golden file that changes is a publisher that breaks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qworker.store.card import Card
from qworker.wire.codec import encode_failure, encode_job, encode_result
from qworker.wire.control import Order, cancel_order, encode_order
from qworker.wire.datatypes import tensor
from qworker.wire.messages import JSON, MSGPACK, BlobRef, Failure, Job, Result, Tensor
from qworker.wire.progress import Progress, encode_progress
from qworker.wire.reference import blob_part

SCHEMAS = Path(__file__).parents[2] / "schemas"
GOLDEN = SCHEMAS / "golden"
MODEL = "vision/mnist-8"
SUFFIXES = {".msgpack": MSGPACK, ".json": JSON}

Message = Job | Result | Failure | Order | Progress

BLOBS: dict[BlobRef, memoryview] = {}
"""What lies beside the golden messages: filled by ``cases``."""


@dataclass(frozen=True)
class Case:
    """One message and the forms that can hold it."""

    name: str
    message: Message
    suffixes: tuple[str, ...] = (".msgpack", ".json")


def cases() -> list[Case]:
    """All golden messages."""
    every = [Case(f"job-{t.datatype.lower()}", Job(f"job-{t.datatype}", MODEL, (t,))) for t in _one_of_each_datatype()]
    raw = np.array([[0x3F80, 0xC000], [0x7FC0, 0x0000]], dtype=np.uint16)
    return [
        *every,
        Case("job-bf16", Job("job-BF16", MODEL, (tensor("x", raw, "BF16"),)), (".msgpack",)),
        Case("job-bytes-binary", Job("b", MODEL, (tensor("x", [b"\xff\x00", b""]),)), (".msgpack",)),
        Case("job-no-inputs", Job("none", MODEL, ())),
        Case("job-zero-dim", Job("0", MODEL, (tensor("x", np.float32(1.5)), tensor("s", "text")))),
        Case("job-empty", Job("e", MODEL, (tensor("x", np.empty((2, 0, 3), np.int64)), tensor("s", [], "BYTES")))),
        Case("job-full", _full_job()),
        Case("job-refs", Job("refs", MODEL, (*_apart(), tensor("y", np.array([1, 2], np.int16))))),
        Case("result-refs", Result("refs", MODEL, "8.1", _apart(), {"run": 0.5})),
        Case("result", _result(np.array([[0.25, -1.5]], np.float32))),
        Case("result-not-finite", _result(np.array([np.nan, np.inf, 1.0], np.float32)), (".msgpack",)),
        Case("result-nan", _result(np.array([np.nan, 1.0], np.float32))),
        Case("failure", Failure("f", MODEL, "model_unavailable", "the store is away: try again in a minute", True)),
        Case("progress-queued", Progress("queued", ahead=3, eta=0.25, worker="a")),
        Case("progress-loading", Progress("loading", share=0.5, eta=3.5, stage="load", worker="a")),
        Case("progress-running", Progress("running", eta=0.125, worker="a")),
        Case("control-cancel", cancel_order(["7c9e6679", "7c9e667a"], MODEL)),
        Case("control-pin", Order("pin", {"model": MODEL, "seconds": 3600.0, "hours": "08:00-18:00"})),
    ]


def encode(message: Message, content_type: str) -> bytes:
    """The body of any message."""
    if isinstance(message, Order):
        return encode_order(message, content_type)
    if isinstance(message, Progress):
        return encode_progress("7c9e6679", MODEL, message, content_type)
    if isinstance(message, Job):
        return encode_job(message, content_type)
    return (
        encode_result(message, content_type) if isinstance(message, Result) else encode_failure(message, content_type)
    )


def card_schema() -> str:
    """The text of ``schemas/card.json``."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Card.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def same_tensors(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    """Whether names, datatypes, dtypes, shapes and values agree; NaN equals NaN."""
    return len(left) == len(right) and all(
        (a.name, a.datatype, a.array.dtype, a.array.shape) == (b.name, b.datatype, b.array.dtype, b.array.shape)
        and np.array_equal(a.array, b.array, equal_nan=a.datatype.startswith("FP"))
        for a, b in zip(left, right, strict=True)
    )


def same(left: Message, right: Message) -> bool:
    """Whether two messages say the same."""
    if isinstance(left, Job) and isinstance(right, Job):
        rest = [(m.id, m.model, m.version, m.outputs, m.parameters) for m in (left, right)]
        return rest[0] == rest[1] and same_tensors(left.inputs, right.inputs)
    if isinstance(left, Result) and isinstance(right, Result):
        rest = [(m.id, m.model, m.version, m.timing) for m in (left, right)]
        return rest[0] == rest[1] and same_tensors(left.outputs, right.outputs)
    return isinstance(left, Failure | Order | Progress) and left == right


def _one_of_each_datatype() -> list[Tensor]:
    edges = [
        np.array([[np.iinfo(t).min, np.iinfo(t).max, 1]], dtype=t)
        for t in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
    ]
    floats = [np.array([[0.1, -2.5], [np.finfo(t).max, 0.0]], dtype=t) for t in ("f2", "f4", "f8")]
    texts = tensor("x", ["", "plain", "gr\u00fc\u00dfe \U0001f40e", 'a "quote", a comma'])
    return [tensor("x", [True, False]), *(tensor("x", a) for a in (*edges, *floats)), texts]


def _apart() -> tuple[Tensor, ...]:
    """A tensor of numbers and one of BYTES that travel beside the message."""
    there: list[Tensor] = []
    for inline in (tensor("x", np.array([[0.5, -1.5, 3.25]], np.float32)), tensor("words", ["", "two", "three"])):
        part = bytes(blob_part(inline))
        digest = hashlib.sha256(part).hexdigest()
        ref = BlobRef(f"file:///var/qworker/blobs/{digest}", digest, len(part))
        BLOBS[ref] = memoryview(part)
        there.append(Tensor(inline.name, inline.datatype, inline.array, ref))
    return tuple(there)


def _full_job() -> Job:
    return Job(
        id="7c9e6679",
        model=MODEL,
        inputs=(tensor("image", np.arange(12, dtype=np.float32).reshape(1, 3, 4)), tensor("labels", [["a", "b"]])),
        version="8.1",
        outputs=("scores", "boxes"),
        parameters={"temperature": 0.5, "top_k": 2**63, "language": "de", "exact": True},
    )


def _result(scores: np.ndarray) -> Result:
    outputs = (tensor("scores", scores), tensor("labels", ["cat", "dog"]), tensor("count", np.int64(2)))
    return Result("r", MODEL, "8.1", outputs, {"queue": 0.25, "run": 0.5, "total": 0.75})


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for case in cases():
        for suffix in case.suffixes:
            (GOLDEN / f"{case.name}{suffix}").write_bytes(encode(case.message, SUFFIXES[suffix]))
    (SCHEMAS / "card.json").write_text(card_schema(), encoding="utf-8")


if __name__ == "__main__":
    main()
