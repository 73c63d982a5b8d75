"""Round trips, and what the codec promises beyond them."""

from __future__ import annotations

import json

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from qworker.errors import DeadlineExceeded, InvalidInput, UnknownModel
from qworker.wire.codec import (
    body_kind,
    decode_job,
    decode_reply,
    encode_failure,
    encode_job,
    encode_result,
    reply_kind,
)
from qworker.wire.datatypes import tensor
from qworker.wire.limits import Limits
from qworker.wire.messages import JSON, MSGPACK, Failure, Job, Result, Tensor
from tests.wire.golden import same

_SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
_NUMBERS = npst.arrays(st.sampled_from(list("?BHIQbhilefd")).map(np.dtype), _SHAPES)
_TEXTS = st.lists(st.text(max_size=5).filter(lambda t: t.isprintable()), max_size=4)
_TENSORS = st.lists(_NUMBERS | _TEXTS, max_size=4).map(
    lambda arrays: tuple(
        tensor(f"t{i}", a, None if len(np.shape(a)) != 1 or len(a) else "BYTES") for i, a in enumerate(arrays)
    )
)


def _finite(tensors: tuple[Tensor, ...]) -> bool:
    return all(t.array.dtype.kind != "f" or bool(np.isfinite(t.array).all()) for t in tensors)


@given(_TENSORS, st.sampled_from([MSGPACK, JSON]))
def test_jobs_survive_the_trip(inputs: tuple[Tensor, ...], content_type: str) -> None:
    """What a client encodes is what the worker sees; JSON refuses what it cannot say."""
    job = Job("id", "m", inputs, "1", ("a", "b"), {"k": 1, "f": 0.5, "b": True, "s": "x"})
    if content_type == JSON and not _finite(inputs):
        with pytest.raises(InvalidInput, match="NaN"):
            encode_job(job, content_type)
        return
    assert same(decode_job(encode_job(job, content_type), content_type, model="m", job_id=""), job)


@given(_TENSORS, st.sampled_from([MSGPACK, JSON]))
def test_results_survive_the_trip(outputs: tuple[Tensor, ...], content_type: str) -> None:
    """What a worker encodes is what the caller gets; JSON turns what is not finite into NaN."""
    decoded = decode_reply(encode_result(Result("id", "m", "1", outputs, {"run": 0.5}), content_type), content_type)
    if content_type == JSON:
        outputs = tuple(
            Tensor(t.name, t.datatype, np.where(np.isinf(t.array), np.nan, t.array).astype(t.array.dtype))
            if t.array.dtype.kind == "f"
            else t
            for t in outputs
        )
    assert same(decoded, Result("id", "m", "1", outputs, {"run": 0.5}))


def test_failures_survive_the_trip_as_typed_errors() -> None:
    """A caller gets the class that the worker raised, with its words."""
    for content_type in (MSGPACK, JSON):
        failure = Failure.of("id", "m", UnknownModel("no such model"))
        decoded = decode_reply(encode_failure(failure, content_type), content_type)
        assert decoded == failure
        assert isinstance(decoded, Failure)
        assert isinstance(decoded.error(), UnknownModel)


def test_a_failure_can_always_be_encoded() -> None:
    """Neither a lone surrogate nor a long text nor an unknown content type loses an answer."""
    body = encode_failure(Failure("\udcff", "m", "internal", "\ud800" + "x" * 10_000), "image/png")
    decoded = decode_reply(body, None)
    assert isinstance(decoded, Failure)
    assert len(decoded.message) < 5_000
    assert decoded.message.startswith("?x")
    assert isinstance(Failure.of("", "m", DeadlineExceeded("late")).error(), DeadlineExceeded)


def test_tensors_are_views_into_the_body() -> None:
    """A 4 MB tensor is not copied on its way in."""
    body = encode_job(Job("id", "m", (tensor("x", np.arange(1 << 20, dtype=np.float32)),)))
    array = decode_job(body, MSGPACK, model="m", job_id="").inputs[0].array
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))
    assert not array.flags.writeable


def test_any_layout_is_encoded_in_c_order() -> None:
    """Transposed and big-endian arrays, put into a Tensor by hand, go out as the protocol wants them."""
    source = np.arange(6, dtype=">f4").reshape(2, 3).T
    body = encode_job(Job("id", "m", (Tensor("x", "FP32", source),)))
    assert decode_job(body, MSGPACK, model="m", job_id="").inputs[0].array.tolist() == source.tolist()


def test_a_tensor_that_lies_about_its_type_is_not_sent() -> None:
    """A wrong dtype would be wrong bytes on the wire."""
    with pytest.raises(InvalidInput, match=r"'x'.*float32.*int64"):
        encode_job(Job("id", "m", (Tensor("x", "FP32", np.arange(3)),)))


def test_the_caller_decides_the_id() -> None:
    """The message's id counts; the body's only where there is none."""
    body = encode_job(Job("body", "m", ()))
    assert decode_job(body, None, model="m", job_id="message").id == "message"
    assert decode_job(body, None, model="m", job_id="").id == "body"
    assert decode_job(msgpack.packb({"inputs": []}), None, model="m", job_id="").id == ""


def test_nulls_are_absent_fields_and_unknown_fields_are_ignored() -> None:
    """Clients that send every field, and newer ones that send more, are understood."""
    form = {
        "id": None, "model_name": None, "model_version": None, "parameters": None, "outputs": None, "new": {"a": [1]},
        "inputs": [{"name": "x", "shape": [1], "datatype": "UINT8", "data": [7], "parameters": {"a": 1}}],
    }  # fmt: skip
    job = decode_job(json.dumps(form).encode(), JSON, model="m", job_id="1")
    assert (job.version, job.outputs, job.parameters) == (None, (), {})
    form["inputs"] = [{"name": "x", "shape": [1], "datatype": "UINT8", "data": b"\x07"}]
    assert same(decode_job(msgpack.packb(form), MSGPACK, model="m", job_id="1"), job)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([], "5"),
        ([], "[5]"),
        ([2, 2], "[1,2,3,4]"),
        ([2, 2], "[ [1, 2],\n [3, 4] ]"),
        ([1, 2, 2], "[[[1,2],[3,4]]]"),
        ([2, 0, 3], "[[],[]]"),
        ([2, 0, 3], "[[ ],\n[ ]]"),
        ([0, 3], "[]"),
        ([2, 0], "[]"),
    ],
)
def test_json_values_are_flat_or_nested(shape: list[int], data: str) -> None:
    """Both layouts of the protocol, and what ``tolist()`` gives for empty arrays."""
    text = f'{{"inputs":[{{"name":"x","shape":{shape},"datatype":"INT64","data":{data}}}]}}'
    array = decode_job(text.encode(), JSON, model="m", job_id="").inputs[0].array
    assert array.shape == tuple(shape)
    assert array.reshape(-1).tolist() == [int(c) for c in data if c.isdigit()]


def test_integers_are_exact_in_json() -> None:
    """64-bit integers do not go through floats."""
    values = tensor("x", np.array([0, 2**53 + 1, 2**64 - 1], np.uint64))
    body = encode_job(Job("id", "m", (values,)), JSON)
    assert b"18446744073709551615" in body
    assert decode_job(body, JSON, model="m", job_id="").inputs[0].array.tolist() == [0, 2**53 + 1, 2**64 - 1]


def test_json_results_say_what_they_cannot_carry() -> None:
    """BF16 and bytes that are no text point to MessagePack; NaN becomes null."""
    bf16 = tensor("x", np.zeros(1, np.uint16), "BF16")
    for output in (bf16, tensor("x", [b"\xff"])):
        with pytest.raises(InvalidInput, match=r"'x'.*application/msgpack"):
            encode_result(Result("id", "m", "1", (output,)), JSON)
    body = encode_result(Result("id", "m", "1", (tensor("x", [np.nan, np.inf]),)), JSON)
    assert json.loads(body)["outputs"][0]["data"] == [None, None]


@pytest.mark.parametrize(
    ("content_type", "body", "kind"),
    [
        (None, b"\x80", MSGPACK),
        (None, b"{}", JSON),
        ("", b" \n{}", JSON),
        (None, b"", MSGPACK),
        (MSGPACK, b"{}", MSGPACK),
        ("application/x-msgpack", b"", MSGPACK),
        ("Application/JSON; charset=utf-8", b"\x80", JSON),
    ],
)
def test_the_form_is_the_content_type_or_the_first_byte(content_type: str | None, body: bytes, kind: str) -> None:
    """The property decides; without one, no MessagePack map begins like JSON."""
    assert body_kind(content_type, body) == kind == reply_kind(content_type, body)


def test_an_unknown_content_type_is_refused_and_still_answered() -> None:
    """The refusal goes back in a form that the sender may well read."""
    with pytest.raises(InvalidInput, match="application/msgpack or application/json; found 'text/csv'"):
        body_kind("text/csv", b"{}")
    assert reply_kind("text/csv", b"{}") == JSON
    assert reply_kind("text/csv", b"1,2") == MSGPACK


def test_limits_of_the_caller_hold() -> None:
    """Each limit of a message can be lowered."""
    job = Job(
        "id", "m", (tensor("x", ["a", "b"]), tensor("yy", [[1]])), outputs=("a", "b"), parameters={"a": 1, "b": 2}
    )
    for content_type in (MSGPACK, JSON):
        body = encode_job(job, content_type)
        decode_job(body, content_type, model="m", job_id="", limits=Limits(max_body_bytes=len(body)))
        for limits in (
            Limits(max_body_bytes=len(body) - 1),
            Limits(max_tensors=1),
            Limits(max_rank=1),
            Limits(max_name_bytes=1),
            Limits(max_bytes_elements=1),
            Limits(max_parameters=1),
            Limits(max_parameters_bytes=5),
        ):
            with pytest.raises(InvalidInput, match="at most"):
                decode_job(body, content_type, model="m", job_id="", limits=limits)
