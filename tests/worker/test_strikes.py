"""What the payload of a job is on record as: the same whoever sends it, and another for any other payload."""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np
import pytest

from qworker.wire.codec import decode_job, encode_job
from qworker.wire.messages import JSON, MSGPACK, BlobRef, Job, Tensor
from qworker.worker.strikes import mark_of_job

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def beside(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]], datatype: str = "FP32", name: str = "x") -> Tensor:
    """``array`` by reference."""
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return Tensor(name, datatype, array, BlobRef(f"file:///there/{digest}", digest, array.nbytes))


def mark(*inputs: Tensor, job_id: str = "1", content_type: str = MSGPACK, build: str = "b") -> str:
    body = encode_job(Job(job_id, "m", inputs), content_type)
    return mark_of_job("m", build, body, lambda: decode_job(body, content_type, model="m", job_id=job_id))


@pytest.mark.parametrize("tensor", [Tensor("x", "FP32", X), beside(X)])
def test_the_same_payload_is_known_under_any_id_and_in_any_form(tensor: Tensor) -> None:
    """The id lies in the body, and counts for nothing; nor does the form of the message, or where a blob lies."""
    assert mark(tensor) == mark(tensor, job_id="another") == mark(tensor, content_type=JSON)
    if tensor.ref is not None:
        elsewhere = BlobRef("s3://bucket/" + tensor.ref.sha256, tensor.ref.sha256, tensor.ref.nbytes)
        assert mark(tensor) == mark(Tensor("x", "FP32", X, elsewhere))


def test_another_payload_is_not_taken_for_it() -> None:
    """Other bytes, another shape, datatype or name, another tensor beside it, another build."""
    k = Tensor("k", "FP32", np.ones(1, np.float32))
    marks = [
        mark(beside(X)),
        mark(beside(X + 1)),
        mark(beside(X.reshape(3, 2))),
        mark(beside(X.view(np.int32), "INT32")),  # type: ignore[arg-type]
        mark(beside(X, name="z")),
        mark(beside(X), k),
        mark(beside(X), Tensor("k", "FP32", np.zeros(1, np.float32))),
        mark(beside(X), build="other"),
        mark(Tensor("x", "FP32", X)),
    ]
    assert all(one != other for one, other in combinations(marks, 2))


def test_what_is_no_job_is_known_by_its_bytes() -> None:
    """Nothing can be decoded of it."""

    def told(body: bytes) -> str:
        return mark_of_job("m", "b", body, lambda: decode_job(body, MSGPACK, model="m", job_id="1"))

    assert told(b"noise") == told(b"noise") != told(b"voice")
