"""Jobs, results and failures to bytes and back: MessagePack, or JSON with the same field names.

``schemas/`` is the normative description. Decoding refuses whatever is no such message with
InvalidInput, whose text names fields, types and sizes, but never the values that were sent: it travels
back over the network and into logs. Tensors come out as views into the body, never as copies.

msgspec decodes (typed, so that what does not fit is not built) and encodes; msgpack puts together what has large
tensors, in parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast

import msgpack
import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, UnsetType

from qworker.errors import InvalidInput
from qworker.wire.datatypes import BYTES, dtype_of
from qworker.wire.limits import DEFAULT_LIMITS, RANK_CEILING, TENSORS_CEILING, Limits, beside, check_shape
from qworker.wire.messages import JSON, MSGPACK, BlobRef, Failure, Job, Result, Tensor
from qworker.wire.names import check_job_id, check_tensor_name, check_version, shown
from qworker.wire.payload import read_json, read_msgpack, write_json, write_msgpack
from qworker.wire.reference import Referenced, RefForm, check_size, read_blob

Kind = Literal["application/msgpack", "application/json"]

_ALIASES: dict[str, Kind] = {
    MSGPACK: MSGPACK,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
    JSON: JSON,
}
_MAX_FAILURE_TEXT = 4096
_INT_RANGE = (-(2**63), 2**64 - 1)
_SAFE_ERROR = re.compile(r"truncated|UTF-8|byte \d+")

LARGE_TENSOR_BYTES = 64 << 10
"""From here on a tensor is worth a part of its own in ``result_body``."""
_TENSOR_KEYS = frozenset(("inputs", "outputs"))
_Packer = cast("Callable[[], Any]", msgpack.Packer)
_packb = msgspec.msgpack.Encoder().encode

_NOTHING = np.zeros((), np.uint8)
"""In place of the values that are still to be fetched."""

Scalar = str | bool | int | float
Blobs = Mapping[BlobRef, memoryview]


class _TensorForm(msgspec.Struct, frozen=True, gc=False):
    name: str
    shape: Annotated[list[int], Meta(max_length=RANK_CEILING)]
    datatype: str
    data: Raw | UnsetType = UNSET
    ref: Raw | UnsetType = UNSET


class _OutputForm(msgspec.Struct, frozen=True, gc=False):
    name: str


class _JobForm(msgspec.Struct, frozen=True):
    inputs: Annotated[list[_TensorForm], Meta(max_length=TENSORS_CEILING)]
    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    parameters: Raw | UnsetType = UNSET
    outputs: Annotated[list[_OutputForm], Meta(max_length=TENSORS_CEILING)] | None = None


class _ErrorForm(msgspec.Struct, frozen=True):
    code: str
    message: str
    retryable: bool = False


class _ReplyForm(msgspec.Struct, frozen=True):
    id: str
    model_name: str
    model_version: str | None = None
    outputs: Annotated[list[_TensorForm], Meta(max_length=TENSORS_CEILING)] | None = None
    timing: Raw | UnsetType = UNSET
    error: _ErrorForm | None = None


_Form = TypeVar("_Form")
_Decoder = msgspec.msgpack.Decoder[_Form] | msgspec.json.Decoder[_Form]

_JOBS: dict[Kind, _Decoder[_JobForm]] = {
    MSGPACK: msgspec.msgpack.Decoder(_JobForm),
    JSON: msgspec.json.Decoder(_JobForm),
}
_REPLIES: dict[Kind, _Decoder[_ReplyForm]] = {
    MSGPACK: msgspec.msgpack.Decoder(_ReplyForm),
    JSON: msgspec.json.Decoder(_ReplyForm),
}
_TIMINGS: dict[Kind, _Decoder[dict[str, float]]] = {
    MSGPACK: msgspec.msgpack.Decoder(dict[str, float]),
    JSON: msgspec.json.Decoder(dict[str, float]),
}
_REFS: dict[Kind, _Decoder[RefForm | None]] = {
    MSGPACK: msgspec.msgpack.Decoder(RefForm | None),
    JSON: msgspec.json.Decoder(RefForm | None),
}
_PARAMETERS: dict[Kind, _Decoder[dict[str, Scalar]]] = {
    MSGPACK: msgspec.msgpack.Decoder(dict[str, Scalar]),
    JSON: msgspec.json.Decoder(dict[str, Scalar]),
}


# --- which form a body has ----------------------------------------------------------------------


def body_kind(content_type: str | None, body: bytes) -> Kind:
    """The form of a body: what ``content_type`` says, or what its first byte says when there is none.

    Raises InvalidInput for a content type that is neither. Parameters (charset) do not count.
    """
    if content_type == MSGPACK:
        return MSGPACK
    if not content_type:
        return _sniffed(body)
    kind = _ALIASES.get(content_type.partition(";")[0].strip().lower())
    if kind is None:
        raise InvalidInput(
            f"expected the content type {MSGPACK} or {JSON}; found {shown(content_type)}: set the message's "
            "content_type property, or leave it out"
        )
    return kind


def reply_kind(content_type: str | None, body: bytes) -> Kind:
    """The form to answer a body in: its own. Never fails: an unknown content type is answered by sniffing."""
    try:
        return body_kind(content_type, body)
    except InvalidInput:
        return _sniffed(body)


def _sniffed(body: bytes) -> Kind:
    # no MessagePack map begins with an ASCII byte
    return JSON if body[:64].lstrip().startswith(b"{") else MSGPACK


# --- decode -------------------------------------------------------------------------------------


def decode_job(
    body: bytes,
    content_type: str | None,
    *,
    model: str,
    job_id: str,
    limits: Limits = DEFAULT_LIMITS,
    blobs: Blobs | None = None,
) -> Job:
    """The job in ``body``, for ``model`` (the routing key). Raises InvalidInput, and nothing else.

    ``job_id`` is the message's id; the body's own id counts only where that is empty. Tensors are views
    into ``body``: read-only, and not always aligned. Where some travel beside it, the InvalidInput is Referenced,
    until it is decoded with ``blobs``: the bytes of each.
    """
    kind = body_kind(content_type, body)
    form = _parse(_JOBS[kind], body, kind, limits)
    if form.model_name is not None and form.model_name != model:
        raise InvalidInput(
            f"the routing key says model {shown(model)}, the body's model_name says {shown(form.model_name)}: "
            "make them equal, or leave model_name out"
        )
    body_id = check_job_id(form.id) if form.id else ""
    return Job(
        id=job_id or body_id,
        model=model,
        inputs=_tensors("input", form.inputs, kind, limits, blobs, nulls=False),
        version=None if form.model_version is None else check_version(form.model_version),
        outputs=_output_names(form.outputs, limits) if form.outputs else (),
        parameters=_parameters(form.parameters, kind, limits) if form.parameters is not UNSET else {},
    )


def decode_reply(
    body: bytes, content_type: str | None, limits: Limits = DEFAULT_LIMITS, blobs: Blobs | None = None
) -> Result | Failure:
    """The result or failure in ``body``. Raises InvalidInput when it is neither.

    A null among the floats of a JSON result is NaN (see ``encode_result``). ``blobs`` as in ``decode_job``.
    """
    kind = body_kind(content_type, body)
    form = _parse(_REPLIES[kind], body, kind, limits)
    if form.error is not None:
        return Failure(form.id, form.model_name, form.error.code, form.error.message, form.error.retryable)
    if form.outputs is None or form.model_version is None:
        raise InvalidInput("expected a reply with error, or with model_version and outputs; found neither")
    return Result(
        id=form.id,
        model=form.model_name,
        version=form.model_version,
        outputs=_tensors("output", form.outputs, kind, limits, blobs, nulls=True),
        timing=_timing(form.timing, kind, limits),
    )


def _parse(decoder: _Decoder[_Form], body: bytes, kind: Kind, limits: Limits) -> _Form:
    most = limits.max_body_bytes if kind == MSGPACK else min(limits.max_body_bytes, limits.max_json_bytes)
    if len(body) > most:
        raise InvalidInput(f"expected at most {most} bytes of {kind}; found {len(body)}: send less at once")
    return _decode(decoder, body, "the body", kind)


def _decode(decoder: _Decoder[_Form], encoded: bytes | Raw, where: str, kind: Kind) -> _Form:
    try:
        return decoder.decode(encoded)
    except msgspec.ValidationError as exc:  # says types and field paths only
        hint = "see schemas/README.md for the fields"
        if "`$" not in str(exc) and "got" in str(exc):  # not even a map
            hint = "send one map of fields, and say in content_type what it is"
        raise InvalidInput(f"{where} does not fit {kind}: {exc}: {hint}") from exc
    except msgspec.DecodeError as exc:
        found = _SAFE_ERROR.search(str(exc))  # the rest may quote a byte of the body
        detail = f" ({found[0]})" if found else ""
        raise InvalidInput(
            f"expected {where} to be one whole {kind} map; found something else{detail}: check the encoder, "
            "and that content_type says what was sent"
        ) from exc
    except RecursionError as exc:
        raise InvalidInput(f"{where} is nested too deep: a job nests no deeper than its tensors") from exc


def _tensors(
    role: str, forms: list[_TensorForm], kind: Kind, limits: Limits, blobs: Blobs | None, *, nulls: bool
) -> tuple[Tensor, ...]:
    if len(forms) > limits.max_tensors:
        raise InvalidInput(f"expected at most {limits.max_tensors} {role}s; found {len(forms)}: send fewer")
    elements = 0
    tensors: dict[str, Tensor] = {}
    absent = ""
    for form in forms:
        name, where = _named(role, form.name, limits.max_name_bytes)
        if name in tensors:
            raise InvalidInput(f"{where} is there twice: send each {role} once")
        shape = tuple(form.shape)
        ref = None if form.ref is UNSET else _reference(where, form, kind)
        count = check_shape(where, shape, limits if ref is None else beside(limits))
        if form.datatype == BYTES:
            elements += count
            if elements > limits.max_bytes_elements:
                raise InvalidInput(f"{where}: at most {limits.max_bytes_elements} BYTES elements are taken: send fewer")
        if ref is not None:
            check_size(where, form.datatype, count, ref)
            blob = None if blobs is None else blobs[ref]
            if blob is None:
                absent = absent or where
                tensors[name] = Tensor(name, form.datatype, np.broadcast_to(_NOTHING, shape), ref)
                continue
            array = read_blob(where, form.datatype, shape, count, blob)
        elif kind == MSGPACK:
            array = read_msgpack(where, form.datatype, shape, count, _payload(where, form))
        else:
            array = read_json(where, form.datatype, shape, count, _payload(where, form), nulls=nulls)
        tensors[name] = Tensor(name, form.datatype, array)
    if absent:
        _refuse_absent(absent, tuple(tensors.values()), limits)
    return tuple(tensors.values())


def _refuse_absent(where: str, tensors: tuple[Tensor, ...], limits: Limits) -> NoReturn:
    if sum(tensor.ref.nbytes for tensor in tensors if tensor.ref is not None) > limits.max_blob_bytes:
        raise InvalidInput(
            f"expected at most {limits.max_blob_bytes} bytes in all tensors that travel by reference; found more: "
            "send less at once"
        )
    raise Referenced(where, tensors)


@lru_cache(maxsize=4096)
def _named(role: str, name: str, max_bytes: int) -> tuple[str, str]:
    """A tensor's name, and how to speak of it: the same for all jobs of a model."""
    check_tensor_name(f"an {role}", name, max_bytes)
    return name, f"{role} {shown(name)}"


def _payload(where: str, form: _TensorForm) -> Raw:
    if isinstance(form.data, Raw):
        return form.data
    raise InvalidInput(f"{where}: expected data; found none: send the tensor's values as data")


def _reference(where: str, form: _TensorForm, kind: Kind) -> BlobRef | None:
    """What stands in place of the values, or None where ``ref`` is null, which is as if it were absent."""
    assert isinstance(form.ref, Raw)
    found = _decode(_REFS[kind], form.ref, f"{where}: the ref", kind)
    if found is None:
        return None
    if isinstance(form.data, Raw) and not _is_null(form.data):
        raise InvalidInput(f"{where}: expected data or a ref; found both: leave one of them out")
    return found.value()


def _output_names(forms: Iterable[_OutputForm], limits: Limits) -> tuple[str, ...]:
    names = tuple(check_tensor_name("an output", form.name, limits.max_name_bytes) for form in forms)
    if len(names) > limits.max_tensors:
        raise InvalidInput(f"expected at most {limits.max_tensors} outputs; found {len(names)}: ask for fewer")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"output {shown(twice)} is asked for twice: name each output once")
    return names


def _parameters(raw: Raw | UnsetType, kind: Kind, limits: Limits) -> dict[str, Scalar]:
    if not isinstance(raw, Raw) or _is_null(raw):
        return {}
    if len(memoryview(raw)) > limits.max_parameters_bytes:
        raise InvalidInput(
            f"expected at most {limits.max_parameters_bytes} bytes of parameters; found more: send fewer"
        )
    parameters = _decode(_PARAMETERS[kind], raw, "parameters", kind)
    _check_parameters(parameters, limits)
    return parameters


def _check_parameters(parameters: Mapping[str, object], limits: Limits) -> None:
    if len(parameters) > limits.max_parameters:
        raise InvalidInput(f"expected at most {limits.max_parameters} parameters; found {len(parameters)}: send fewer")
    for name, value in parameters.items():
        where = f"parameter {shown(name)}"
        if not isinstance(value, (str, bool, int, float)):
            raise InvalidInput(
                f"{where}: expected text, a number or a boolean; found {type(value).__name__}: convert it"
            )
        if isinstance(value, int) and not _INT_RANGE[0] <= value <= _INT_RANGE[1]:
            raise InvalidInput(f"{where}: expected an integer of 64 bits; found a longer one: send text")
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(f"{where}: expected a finite number; found NaN or infinity: send text, or leave it out")


def _timing(raw: Raw | UnsetType, kind: Kind, limits: Limits) -> dict[str, float]:
    if not isinstance(raw, Raw) or _is_null(raw):
        return {}
    values = _decode(_TIMINGS[kind], raw, "timing", kind)
    if len(values) > limits.max_parameters or not all(map(math.isfinite, values.values())):
        raise InvalidInput("expected timing to hold seconds; found something else")
    return values


def _is_null(raw: Raw) -> bool:
    return bytes(memoryview(raw)[:4]) in (b"\xc0", b"null")


# --- encode -------------------------------------------------------------------------------------


def encode_job(job: Job, content_type: str = MSGPACK) -> bytes:
    """The body of ``job``. Raises InvalidInput for what cannot be sent.

    JSON cannot carry BF16, BYTES that are not UTF-8, NaN or infinity.
    """
    kind = body_kind(content_type, b"")
    if kind == JSON:
        _refuse_non_finite(t for t in job.inputs if t.ref is None)
    _check_parameters(job.parameters, DEFAULT_LIMITS)
    form: dict[str, Any] = {"id": job.id, "model_name": job.model}
    if job.version is not None:
        form["model_version"] = job.version
    if job.parameters:
        form["parameters"] = dict(job.parameters)
    form["inputs"] = _tensor_forms(job.inputs, kind)
    if job.outputs:
        form["outputs"] = [{"name": name} for name in job.outputs]
    if kind == MSGPACK and sum(t.array.nbytes for t in job.inputs) >= LARGE_TENSOR_BYTES:
        return b"".join(_encode_in_parts(form))  # one copy; the packer grows its buffer, and copies it at the end
    return _encode(form, kind)


def encode_result(result: Result, content_type: str = MSGPACK) -> bytes:
    """The body of ``result``. In JSON, NaN and infinities become null.

    Raises InvalidInput when JSON was asked for and cannot carry an output: BF16, or BYTES that are not
    UTF-8. The requester chose the form, so it is the requester who is told to choose the other.
    """
    kind = body_kind(content_type, b"")
    return _encode(_result_form(result, kind), kind)


def _result_form(result: Result, kind: Kind) -> dict[str, Any]:
    return {
        "id": result.id,
        "model_name": result.model,
        "model_version": result.version,
        "outputs": _tensor_forms(result.outputs, kind),
        "timing": dict(result.timing),
    }


def result_body(result: Result, content_type: str = MSGPACK) -> bytes | list[bytes | memoryview]:
    """``encode_result``, in parts where tensors are large: those stay where they are."""
    if body_kind(content_type, b"") == JSON:
        return encode_result(result, JSON)
    form = _result_form(result, MSGPACK)
    for tensor in result.outputs:
        if tensor.array.nbytes >= LARGE_TENSOR_BYTES:
            return _encode_in_parts(form)
    return _encode(form, MSGPACK)


def encode_failure(failure: Failure, content_type: str = MSGPACK) -> bytes:
    """The body of ``failure``; never fails: a long message is cut, a character that is none replaced."""
    kind = reply_kind(content_type, b"")
    message = failure.message
    if len(message) > _MAX_FAILURE_TEXT:
        message = f"{message[:_MAX_FAILURE_TEXT]}... (cut)"
    error = {"code": failure.code, "message": _clean(message), "retryable": failure.retryable}
    return _encode({"id": _clean(failure.id), "model_name": _clean(failure.model), "error": error}, kind)


def _tensor_forms(tensors: Iterable[Tensor], kind: Kind) -> list[dict[str, Any]]:
    write = write_msgpack if kind == MSGPACK else write_json
    return [
        {"name": t.name, "shape": list(t.array.shape), "datatype": t.datatype, "data": write(t)}
        if t.ref is None
        else {"name": t.name, "shape": list(t.array.shape), "datatype": t.datatype, "ref": _ref_form(t.ref)}
        for t in tensors
    ]


def _ref_form(ref: BlobRef) -> dict[str, Any]:
    return {"uri": ref.uri, "sha256": ref.sha256, "nbytes": ref.nbytes}


def _encode(form: Mapping[str, Any], kind: Kind) -> bytes:
    try:
        return _packb(form) if kind == MSGPACK else msgspec.json.encode(form)
    except UnicodeEncodeError as exc:
        raise InvalidInput("expected text that can be sent as UTF-8; found a lone surrogate: rename it") from exc
    except ValueError as exc:
        raise InvalidInput(f"the message is larger than {kind} can hold: send less at once") from exc


def _encode_in_parts(form: Mapping[str, Any]) -> list[bytes | memoryview]:
    """``_encode`` as MessagePack, with the bytes of large tensors as parts of their own."""
    packer = _Packer()
    parts: list[bytes | memoryview] = []
    packed = bytearray(packer.pack_map_header(len(form)))
    for key, value in form.items():
        packed += packer.pack(key)
        if key not in _TENSOR_KEYS:
            packed += packer.pack(value)
            continue
        packed += packer.pack_array_header(len(value))
        for tensor in value:
            payload = tensor.get("data")
            if not isinstance(payload, memoryview) or payload.nbytes < LARGE_TENSOR_BYTES:
                packed += packer.pack(tensor)
                continue
            head = {name: field for name, field in tensor.items() if name != "data"}
            packed += packer.pack_map_header(len(tensor))
            for name, field in head.items():
                packed += packer.pack(name) + packer.pack(field)
            packed += packer.pack("data") + b"\xc6" + payload.nbytes.to_bytes(4, "big")
            parts += (bytes(packed), payload)
            packed.clear()
    parts.append(bytes(packed))
    return parts


def _refuse_non_finite(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if dtype_of(tensor.datatype).kind == "f" and not bool(np.isfinite(tensor.array).all()):
            raise InvalidInput(f"input {shown(tensor.name)}: JSON has no NaN or infinity: send {MSGPACK}")


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
