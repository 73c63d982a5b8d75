"""Tensors that travel beside their message: what a ref may say, and what its bytes mean."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import InvalidInput
from qworker.wire.codec import decode_job, decode_reply, encode_job, encode_result
from qworker.wire.datatypes import tensor
from qworker.wire.limits import Limits
from qworker.wire.messages import JSON, MSGPACK, BlobRef, Job, Result, Tensor
from qworker.wire.reference import Referenced, blob_bytes, blob_part, to_send_apart
from tests.wire.golden import same_tensors

SAMPLES = [
    tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3)),
    tensor("x", [True, False, True]),
    tensor("x", np.arange(4, dtype=np.uint16), "BF16"),
    tensor("x", ["", "a", "\u00fc\u00df"]),
    tensor("x", np.empty((0, 3), np.int64)),
    tensor("x", np.float64(2.5)),
]


def apart(inline: Tensor) -> tuple[Tensor, dict[BlobRef, memoryview]]:
    """The tensor with a ref, and what it refers to."""
    part = bytes(blob_part(inline))
    digest = hashlib.sha256(part).hexdigest()
    ref = BlobRef(f"s3://b/{digest}", digest, len(part))
    return Tensor(inline.name, inline.datatype, inline.array, ref), {ref: memoryview(part)}


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
@pytest.mark.parametrize("inline", SAMPLES, ids=lambda t: f"{t.datatype}{list(t.array.shape)}")
def test_what_is_sent_apart_comes_back(inline: Tensor, content_type: str) -> None:
    """Both ways, in both forms: first the refs are told, then the values are what they were."""
    there, blobs = apart(inline)
    job = encode_job(Job("j", "m", (there,)), content_type)
    with pytest.raises(Referenced) as told:
        decode_job(job, content_type, model="m", job_id="")
    assert told.value.refs == tuple(blobs)
    assert same_tensors(decode_job(job, content_type, model="m", job_id="", blobs=blobs).inputs, (inline,))
    result = encode_result(Result("j", "m", "1", (there,)), content_type)
    with pytest.raises(Referenced):
        decode_reply(result, content_type)
    decoded = decode_reply(result, content_type, blobs=blobs)
    assert isinstance(decoded, Result)
    assert same_tensors(decoded.outputs, (inline,))
    assert decoded.outputs[0].ref is None


def _referring(nbytes: int, **changed: Any) -> bytes:
    ref = {"uri": "s3://b/" + "a" * 64, "sha256": "a" * 64, "nbytes": nbytes}
    form = {"name": "x", "shape": [2, 3], "datatype": "FP32", "ref": ref} | changed
    return json.dumps({"inputs": [form]}).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_referring(23), "takes 24 bytes of FP32; the ref says 23"),
        (_referring(25), "the ref says 25"),
        (_referring(23, datatype="BYTES"), "at least 24 bytes"),
        (_referring(24, datatype="FP33"), "datatype"),
        (_referring(4 << 40, shape=[1 << 40]), "more elements"),
        (_referring(4 << 20, shape=[1 << 20]), "by reference; found more"),
        (_referring(0, shape=[0, 1 << 40]), "more elements"),
        (_referring(24, data=[0]), "found both"),
    ],
)
def test_a_ref_that_cannot_hold_the_tensor_is_refused_unseen(body: bytes, words: str) -> None:
    """Sizes are compared before anything is fetched, and none is larger than the limit."""
    with pytest.raises(InvalidInput, match=words) as caught:
        decode_job(body, JSON, model="m", job_id="", limits=Limits(max_blob_bytes=3 << 20))
    assert not isinstance(caught.value, Referenced)


@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_are_elements_or_are_refused(noise: bytes, count: int) -> None:
    """Noise in place of BYTES elements: refused, or exactly that many elements that make it up."""
    digest = hashlib.sha256(noise).hexdigest()
    ref = BlobRef(f"s3://b/{digest}", digest, len(noise))
    form = {"name": "x", "shape": [count], "datatype": "BYTES"}
    form["ref"] = {"uri": ref.uri, "sha256": digest, "nbytes": len(noise)}
    body = json.dumps({"inputs": [form]}).encode()
    try:
        job = decode_job(body, JSON, model="m", job_id="", blobs={ref: memoryview(noise)})
    except InvalidInput:
        return
    assert bytes(blob_part(job.inputs[0])) == noise


def test_a_bool_that_is_none_is_refused() -> None:
    """As in a message."""
    there, blobs = apart(tensor("x", [True]))
    (ref,) = blobs
    body = encode_job(Job("j", "m", (there,)))
    with pytest.raises(InvalidInput, match="BOOL"):
        decode_job(body, MSGPACK, model="m", job_id="", blobs={ref: memoryview(b"\x02")})


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(0, 300))
def test_the_largest_leave_until_the_rest_fits(sizes: list[int], limit: int) -> None:
    """What stays fits, nothing leaves without need, and no smaller one leaves before a larger one."""
    tensors = [tensor(str(at), np.zeros(size, np.uint8)) for at, size in enumerate(sizes)]
    leaving = to_send_apart(tensors, limit)
    left = [blob_bytes(t) for t in tensors if t.name in leaving]
    stay = [blob_bytes(t) for t in tensors if t.name not in leaving]
    assert sum(stay) <= limit
    assert not left or sum(stay) + min(left) > limit
    assert not left or not stay or min(left) >= max(stay)
