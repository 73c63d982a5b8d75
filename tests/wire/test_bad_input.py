"""Whatever is sent, the codec answers with a message or with InvalidInput, and takes no memory for it."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import InvalidInput
from qworker.wire.codec import decode_job, decode_reply
from qworker.wire.messages import JSON, MSGPACK, Job
from tests.wire.golden import GOLDEN

SECRET = "s3cret-payload"
MIB = 1 << 20


def _tensor(**changed: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [2], "datatype": "INT32", "data": bytes(8)} | changed
    return {key: value for key, value in tensor.items() if value is not ...}


def _packed(**changed: Any) -> bytes:
    return msgpack.packb({"inputs": [_tensor(**changed)]})


def _job(**changed: Any) -> bytes:
    return msgpack.packb({"inputs": [_tensor()], **changed})


def _json(**changed: Any) -> bytes:
    return json.dumps({"inputs": [_tensor(**({"data": [1, 2]} | changed))]}).encode()


_GOOD = _packed()
_SECRET = SECRET.encode()

MALFORMED = {
    "empty": (b"", "truncated"),
    "no MessagePack": (b"\xc1" + _SECRET, "application/msgpack"),
    "text": (_SECRET, "content_type"),
    "no map: nil": (b"\xc0", "got `None`"),
    "no map: list": (msgpack.packb([SECRET]), "got `array`"),
    "no map: number": (b"\x07", "got `int`"),
    "integer keys": (msgpack.packb({1: SECRET}), "Expected `str`"),
    "truncated": (_GOOD[:-3], "truncated"),
    "trailing": (_GOOD + b"\x00", "byte"),
    "bin of 1 GiB announced": (b"\x81\xa6inputs\xc6\x40\x00\x00\x00" + _SECRET, "truncated"),
    "data of 1 GiB announced": (b"\x81\xa6inputs\x91\x81\xa4data\xc6\x40\x00\x00\x00" + _SECRET, "truncated"),
    "map of 4 G announced": (b"\xdf\xff\xff\xff\xff", "truncated"),
    "array of 4 G announced": (b"\x81\xa6inputs\xdd\xff\xff\xff\xff", "1024"),
    "nested 10,000 deep": (b"\x81\xa6inputs" + b"\x91" * 10_000 + b"\xc0", "at `\\$.inputs\\[0\\]`"),
    "nested 10,000 deep, unknown field": (b"\x81\xa1u" + b"\x91" * 10_000 + b"\xc0", "too deep"),
    "nested 10,000 deep, parameters": (
        b"\x82\xa6inputs\x90\xaaparameters\x81\xa1a" + b"\x91" * 10_000 + b"\xc0",
        "too deep",
    ),
    "nested 10,000 deep, data": (b"\x81\xa6inputs\x91\x81\xa4data" + b"\x91" * 10_000 + b"\xc0", "too deep"),
    "JSON nested 10,000 deep": (b'{"u":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "too deep"),
    "JSON cut": (_json()[:-4], "truncated"),
    "JSON with trailing text": (_json() + _SECRET, "byte"),
    "JSON NaN in shape": (_json(shape=[float("nan")]), "byte"),
    "bad UTF-8 name": (b"\x82\xa6inputs\x90\xa2id\xa2\xff\xfe", "UTF-8"),
    "bad UTF-8 in JSON": (b'{"id":"\xff\xfe","inputs":[]}', "UTF-8"),
    "no inputs": (msgpack.packb({"id": SECRET}), "inputs"),
    "inputs a map": (_job(inputs={"x": SECRET}), "got `object`"),
    "id a number": (_job(id=5), "Expected `str | null`, got `int`"),
    "id too long": (_job(id=SECRET * 30), "255 bytes"),
    "other model": (_job(model_name="other/model"), "'the/model'.*'other/model'"),
    "version that leaves the folder": (_job(model_version="../1"), "expected a version"),
    "missing name": (_packed(name=...), "missing required field `name`"),
    "empty name": (_packed(name=""), "empty string"),
    "name too long": (_packed(name=SECRET * 100), "512 bytes"),
    "missing shape": (_packed(shape=...), "missing required field `shape`"),
    "NaN in shape": (_packed(shape=[float("nan")]), "Expected `int`, got `float`"),
    "float in shape": (_packed(shape=[2.0]), "Expected `int`, got `float`"),
    "bool in shape": (_packed(shape=[True]), "Expected `int`, got `bool`"),
    "negative dim": (_packed(shape=[-2]), "'x'.*negative"),
    "negative dims that multiply to the right size": (_packed(shape=[-1, -2]), "'x'.*negative"),
    "huge dim": (_packed(shape=[2**63]), "2\\*\\*40"),
    "huge product": (_packed(shape=[2**32, 2**32]), "more elements"),
    "huge product with a zero": (_packed(shape=[2**40, 0], data=b""), "more elements"),
    "rank too high": (_packed(shape=[1] * 17), "at most 16"),
    "rank far too high": (_packed(shape=[1] * 65), "64"),
    "unknown datatype": (_packed(datatype="float32"), "'x'|FP32.*'float32'"),
    "missing data": (_packed(data=...), "'x'.*expected data; found none"),
    "data too short": (_packed(data=bytes(7)), "'x'.*takes 8 bytes; found 7"),
    "data too long": (_packed(data=bytes(9)), "takes 8 bytes; found 9"),
    "data of an empty tensor": (_packed(shape=[0]), "takes 0 bytes; found 8"),
    "data as text": (_packed(data=SECRET), "one bin.*found text"),
    "data as numbers": (_packed(data=[1, 2]), "one bin.*found an array"),
    "data nil": (_packed(data=None), "found nil"),
    "BOOL that is none": (_packed(datatype="BOOL", data=b"\x01\x02"), "0 or 1"),
    "BYTES as one bin": (_packed(datatype="BYTES", data=_SECRET), "array of bin.*found a bin"),
    "BYTES as text": (_packed(datatype="BYTES", data=[SECRET, SECRET]), "pack bytes"),
    "BYTES, one missing": (_packed(datatype="BYTES", data=[_SECRET]), "has 2 elements; found 1"),
    "BYTES nested": (_packed(datatype="BYTES", data=[[_SECRET], [_SECRET]]), "each BYTES element must be a bin"),
    "BYTES, too many": (_packed(datatype="BYTES", shape=[2**21], data=[]), "at most 1048576 BYTES"),
    "twice": (_job(inputs=[_tensor(), _tensor()]), "'x' is there twice"),
    "too many": (_job(inputs=[_tensor(name=str(i)) for i in range(257)]), "at most 256 inputs"),
    "ref": (_packed(ref={"uri": SECRET}), "the ref does not fit"),
    "output twice": (_job(outputs=[{"name": "o"}, {"name": "o"}]), "'o' is asked for twice"),
    "outputs as names": (_job(outputs=[SECRET]), "got `str` - at `\\$.outputs\\[0\\]`"),
    "parameters a list": (_job(parameters=[SECRET]), "got `array`"),
    "parameters nested": (_job(parameters={"a": {"b": SECRET}}), "got `object`"),
    "parameters of bin": (_job(parameters={"a": _SECRET}), "got `bytes`"),
    "parameters too long": (_job(parameters={"a": SECRET * 10_000}), "65536 bytes"),
    "parameter NaN": (_job(parameters={"a": float("nan")}), "'a'.*finite"),
    "JSON parameter of 100 digits": (b'{"inputs":[],"parameters":{"a":' + b"9" * 100 + b"}}", "'a'.*64 bits|range"),
    "JSON BF16": (_json(datatype="BF16"), "send application/msgpack"),
    "JSON bytes, one comma in text": (_json(datatype="BYTES", data=['\\",']), "has 2 elements; found 1"),
    "JSON fraction for INT32": (_json(data=[1.5, 2]), "does not fit INT32"),
    "JSON out of range": (_json(data=[2**31, 0]), "within INT32"),
    "JSON far out of range": (_json(data=[2**200, 0]), "within INT32|range"),
    "JSON FP16 out of range": (_json(data=[1e6, 0], datatype="FP16"), "within FP16"),
    "JSON FP64 out of range": (_json(data=[1, 2], datatype="FP64").replace(b"1,", b"1e999,"), "range"),
    "JSON null": (_json(data=[None, 1], datatype="FP32"), "got `null`"),
    "JSON number as text": (_json(data=["1", "2"], datatype="FP32"), "got `str`"),
    "JSON count": (_json(data=[1, 2, 3]), "has 2 elements; found 3"),
    "JSON empty": (_json(data=[]), "has 2 elements; found 0"),
    "JSON nested unlike the shape": (_json(shape=[2, 2], data=[[1, 2, 3], [4]]), "nested|uneven"),
    "JSON transposed": (_json(shape=[2, 3], data=[[1, 2], [3, 4], [5, 6]]), "disagrees"),
    "JSON nested too deep": (_json(data=[[1, 2]]), "does not fit"),
    "JSON map as data": (_json(data={"a": SECRET}), "expected data as a list"),
    "JSON bytes unlike the shape": (_json(datatype="BYTES", data=[SECRET]), "has 2 elements; found 1"),
    "JSON data of an empty tensor": (_json(shape=[0, 2], data=[[1, 2]]), "disagrees"),
    "JSON bytes that are no UTF-8": (
        _json(datatype="BYTES", data=["~", ""]).replace(b"~", b"\xff\xfe"),
        "'x'.*UTF-8",
    ),
    "JSON lone surrogate": (_json(datatype="BYTES", data=["\ud800", ""]), "application/json|truncated"),
}  # fmt: skip


@pytest.mark.parametrize("label", MALFORMED)
def test_malformed_jobs_are_named_and_never_quoted(label: str) -> None:
    """Each kind of wrong body says what is wrong with it, in few words, without the values sent."""
    body, words = MALFORMED[label]
    with pytest.raises(InvalidInput, match=words) as caught:
        decode_job(body, None, model="the/model", job_id="1")
    assert SECRET not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_good_job_beside_them_passes() -> None:
    """The table's template itself is sound, in both forms."""
    for body in (_GOOD, _json(), _job(parameters={"a": SECRET}, outputs=[{"name": "o"}])):
        assert decode_job(body, None, model="the/model", job_id="1").inputs[0].array.shape == (2,)


MALFORMED_REPLIES = {
    "neither": msgpack.packb({"id": "1", "model_name": "m"}),
    "no version": msgpack.packb({"id": "1", "model_name": "m", "outputs": []}),
    "error a text": msgpack.packb({"id": "1", "model_name": "m", "error": SECRET}),
    "no code": msgpack.packb({"id": "1", "model_name": "m", "error": {"message": SECRET}}),
    "timing of text": msgpack.packb(
        {"id": "1", "model_name": "m", "model_version": "1", "outputs": [], "timing": {"a": SECRET}}
    ),
    "a job": _GOOD,
}  # fmt: skip


@pytest.mark.parametrize("label", MALFORMED_REPLIES)
def test_malformed_replies_are_refused(label: str) -> None:
    """A caller meets InvalidInput, not a KeyError."""
    with pytest.raises(InvalidInput) as caught:
        decode_reply(MALFORMED_REPLIES[label], MSGPACK)
    assert SECRET not in str(caught.value)


# --- memory -------------------------------------------------------------------------------------

_N = 8 * MIB
_LENGTH = struct.pack(">I", _N)
BOMBS = {
    "empty lists as parameters": b"\x82\xa6inputs\x90\xaaparameters\x81\xa1a\xdd" + _LENGTH + b"\x90" * _N,
    "empty maps as inputs": b"\x81\xa6inputs\xdd" + _LENGTH + b"\x80" * _N,
    "dims": b"\x81\xa6inputs\x91\x81\xa5shape\xdd" + _LENGTH + b"\x01" * _N,
    "unknown field": b"\x82\xa6inputs\x90\xa1u\xdd" + _LENGTH + b"\x90" * _N,
    "output names": b"\x82\xa6inputs\x90\xa7outputs\xdd" + _LENGTH + b"\x80" * _N,
    "numbers as data": b"\x81\xa6inputs\x91\x84\xa4name\xa1x\xa5shape\x91\x02\xa8datatype\xa4FP32\xa4data\xdd"
    + _LENGTH
    + b"\x90" * _N,
    "bytes elements": b"\x81\xa6inputs\x91\x84\xa4name\xa1x\xa5shape\x91\xce"
    + struct.pack(">I", _N // 2)
    + b"\xa8datatype\xa5BYTES\xa4data\xdd"
    + struct.pack(">I", _N // 2)
    + b"\xc4\x00" * (_N // 2),
    "JSON values that no shape asks for": _json(data=[0] * (_N // 3)),
}


def _peak(body: bytes) -> int:
    tracemalloc.start()
    try:
        decode_job(body, None, model="m", job_id="1")
    except InvalidInput:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("label", BOMBS)
def test_nothing_is_built_from_what_is_too_long(label: str) -> None:
    """8 MiB that would become hundreds of MiB of objects are refused by their header."""
    allowed = 9 * MIB if label.startswith("JSON") else MIB // 2  # JSON copies the text of one tensor
    assert _peak(BOMBS[label]) < allowed


@pytest.mark.parametrize(
    ("datatype", "shape", "element"),
    [("BYTES", [2**18], '"ab"'), ("BYTES", [2**18, 1], "[]"), ("FP64", [2**18], "0"), ("FP64", [2**18, 1], "[0]")],
)
def test_json_takes_at_most_the_factor_that_limits_tell_of(datatype: str, shape: list[int], element: str) -> None:
    """The worst JSON that parses stays within 45 times its size; hence a limit of its own."""
    data = "[" + ",".join([element] * 2**18) + "]"
    body = f'{{"inputs":[{{"name":"x","shape":{shape},"datatype":"{datatype}","data":{data}}}]}}'.encode()
    peak = _peak(body)
    assert peak < 45 * len(body), peak / len(body)


# --- fuzz ---------------------------------------------------------------------------------------

_BODIES = sorted(path.read_bytes() for path in GOLDEN.glob("*"))
_CONTENT_TYPES = st.sampled_from([None, MSGPACK, JSON])
_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "double", "end"]),
        st.integers(0, 1 << 16),
        st.binary(min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=4,
)


def _mutated(body: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, where, extra in edits:
        at = where % (len(body) + 1)
        size = len(extra)
        if kind == "flip":
            body = body[:at] + extra + body[at + size :]
        elif kind == "cut":
            body = body[:at] + body[at + size :]
        elif kind == "insert":
            body = body[:at] + extra + body[at:]
        elif kind == "double":
            body = body[: at + 8 * size] + body[at:]
        else:
            body = body[:at]
    return body


def _survives(body: bytes, content_type: str | None) -> None:
    """Decode as everything; only InvalidInput may come, and what comes out fits its own shape."""
    for decode in (
        lambda: decode_job(body, content_type, model="vision/mnist-8", job_id=""),
        lambda: decode_reply(body, content_type),
    ):
        try:
            message = decode()
        except InvalidInput as exc:
            assert len(str(exc)) < 2_000  # noqa: PT017  # its absence is as good
            continue
        tensors = message.inputs if isinstance(message, Job) else getattr(message, "outputs", ())
        for tensor in tensors:
            assert tensor.array.nbytes <= 8 * len(body)


@given(st.binary(max_size=200), _CONTENT_TYPES)
def test_random_bytes(body: bytes, content_type: str | None) -> None:
    """Noise is refused, or is a message."""
    _survives(body, content_type)


@given(st.sampled_from(_BODIES), _EDITS, _CONTENT_TYPES)
def test_mutated_golden_messages(body: bytes, edits: list[tuple[str, int, bytes]], content_type: str | None) -> None:
    """Messages with a few bytes wrong are refused, or still messages."""
    _survives(_mutated(body, edits), content_type)


_INTS = st.integers(-(2**63), 2**64 - 1)
_ANY = st.recursive(
    st.none() | st.booleans() | _INTS | st.floats() | st.text(max_size=4) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
_ALMOST_TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("x") | _ANY,
        "shape": st.lists(st.integers(-1, 3) | _INTS, max_size=4) | _ANY,
        "datatype": st.sampled_from(["BOOL", "INT8", "FP16", "FP64", "BYTES", "BF16"]) | _ANY,
        "data": st.binary(max_size=16) | st.lists(st.binary(max_size=3), max_size=3) | _ANY,
        "ref": _ANY,
    },
)  # fmt: skip
_ALMOST_MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "id": st.just("1") | _ANY,
        "model_name": st.just("vision/mnist-8") | _ANY,
        "model_version": st.just("1") | _ANY,
        "parameters": _ANY,
        "timing": st.dictionaries(st.text(max_size=3), st.floats(), max_size=2) | _ANY,
        "inputs": st.lists(_ALMOST_TENSORS, max_size=2) | _ANY,
        "outputs": st.lists(_ALMOST_TENSORS, max_size=2) | _ANY,
        "error": _ANY,
    },
)


@given(_ALMOST_MESSAGES)
def test_almost_messages(form: dict[str, Any]) -> None:
    """Maps with the right fields and any values in them are refused, or are messages."""
    _survives(msgpack.packb(form), None)
