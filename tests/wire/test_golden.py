"""Code, schemas and golden files agree."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from qworker.errors import JOB_ERRORS, InvalidInput
from qworker.wire import topology
from qworker.wire.codec import decode_job, decode_reply
from qworker.wire.control import Order, decode_order, read_cancel
from qworker.wire.datatypes import BF16, DATATYPES
from qworker.wire.limits import DEFAULT_LIMITS, MAX_DIM
from qworker.wire.messages import Failure, Job, Result
from qworker.wire.names import MAX_JOB_ID_BYTES, MAX_MODEL_ID_BYTES
from qworker.wire.progress import Progress, decode_progress
from qworker.wire.reference import Referenced
from tests.wire.golden import BLOBS, GOLDEN, MODEL, SCHEMAS, SUFFIXES, Case, Message, card_schema, cases, encode, same

_FILES = [(case, suffix) for case in cases() for suffix in case.suffixes]
_SCHEMAS = {
    name: json.loads((SCHEMAS / f"{name}.json").read_text())
    for name in ("job", "result", "failure", "progress", "control", "card")
}
_VALIDATORS = {name: Draft202012Validator(schema) for name, schema in _SCHEMAS.items()}
_NAMES = {Job: "job", Result: "result", Failure: "failure", Order: "control", Progress: "progress"}


def _decode(message: Message, body: bytes, content_type: str | None) -> Message:
    if isinstance(message, Job):
        return decode_job(body, content_type, model=MODEL, job_id="", blobs=BLOBS)
    if isinstance(message, Order):
        return decode_order(body, content_type)
    if isinstance(message, Progress):
        return decode_progress(body, content_type)[2]
    return decode_reply(body, content_type, blobs=BLOBS)


@pytest.mark.parametrize(("case", "suffix"), _FILES, ids=lambda p: p.name if isinstance(p, Case) else p)
def test_golden_files_are_read_and_written_alike(case: Case, suffix: str) -> None:
    """Each file means its value, with and without a content type, and the value is written as that file."""
    body = (GOLDEN / f"{case.name}{suffix}").read_bytes()
    for content_type in (SUFFIXES[suffix], None):
        decoded = _decode(case.message, body, content_type)
        assert same(decoded, case.message)
        assert encode(case.message, SUFFIXES[suffix]) == body
        if not case.name.endswith("-refs"):  # what was fetched is sent as data
            assert encode(decoded, SUFFIXES[suffix]) == body


def test_there_is_no_golden_file_without_a_case() -> None:
    """What lies in the folder is what is tested, and every datatype is there."""
    expected = {f"{case.name}{suffix}" for case, suffix in _FILES}
    assert {path.name for path in GOLDEN.iterdir()} == expected
    assert {f"job-{d.lower()}.msgpack" for d in DATATYPES} <= expected


@pytest.mark.parametrize("name", _SCHEMAS)
def test_schemas_are_schemas(name: str) -> None:
    """Each file is valid JSON Schema 2020-12."""
    Draft202012Validator.check_schema(_SCHEMAS[name])


@pytest.mark.parametrize(("case", "suffix"), _FILES, ids=lambda p: p.name if isinstance(p, Case) else p)
def test_json_golden_files_fit_one_schema(case: Case, suffix: str) -> None:
    """A JSON message fits its own schema, and neither of the others."""
    if suffix != ".json":
        assert case.name.startswith(("job", "result", "failure", "progress", "control"))
        return
    form = json.loads((GOLDEN / f"{case.name}.json").read_bytes())
    fitting = [name for name in _NAMES.values() if _VALIDATORS[name].is_valid(form)]
    assert fitting == [_NAMES[type(case.message)]]


def _tensor(**changed: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [2], "datatype": "INT32", "data": [1, 2]} | changed
    return {key: value for key, value in tensor.items() if value is not ...}


def _ref(**changed: Any) -> dict[str, Any]:
    return {"uri": f"s3://b/{'a' * 64}", "sha256": "a" * 64, "nbytes": 8} | changed


def _job(**changed: Any) -> dict[str, Any]:
    return {"inputs": [_tensor()]} | changed


@pytest.mark.parametrize(
    "form",
    [
        [],
        {},
        _job(inputs=None),
        _job(inputs=[1]),
        _job(id=5),
        _job(id="x" * 256),
        _job(model_name="a//b"),
        _job(model_version="../1"),
        _job(parameters=[]),
        _job(parameters={"a": {}}),
        _job(parameters={str(i): i for i in range(65)}),
        _job(outputs=["scores"]),
        _job(outputs=[{"name": "a"}, {"name": "a"}]),
        _job(outputs=[{"name": ""}]),
        _job(inputs=[_tensor()] * 257),
        *[
            _job(inputs=[_tensor(**changed)])
            for changed in (
                {"name": ...},
                {"name": ""},
                {"name": "x" * 513},
                {"shape": ...},
                {"shape": 2},
                {"shape": [-2]},
                {"shape": [2.5]},
                {"shape": ["2"]},
                {"shape": [MAX_DIM + 1]},
                {"shape": [1] * 17},
                {"datatype": "int32"},
                {"datatype": "BF16"},
                {"data": ...},
                {"data": None},
                {"data": "12"},
                {"data": [1.5, 2]},
                {"data": [None, 2]},
                {"data": {"0": 1}},
                {"data": ["1", "2"], "datatype": "FP32"},
                {"data": [1, 2], "datatype": "BYTES"},
                {"data": [1, 0], "datatype": "BOOL"},
                {"ref": {"uri": "s3://x"}, "data": ...},
                {"ref": 5},
                {"ref": _ref(), "data": [1, 2]},
                {"ref": _ref(sha256="A" * 64), "data": ...},
                {"ref": _ref(sha256="a" * 64 + "\n"), "data": ...},
                {"ref": _ref(nbytes=-1), "data": ...},
                {"ref": _ref(uri="x" * 2049), "data": ...},
                {"ref": None, "data": ...},
            )
        ],
    ],
    ids=lambda form: json.dumps(form)[:60],
)
def test_invalid_jobs_are_invalid_to_schema_and_code(form: Any) -> None:
    """What the schema forbids, the code refuses."""
    assert not _VALIDATORS["job"].is_valid(form)
    with pytest.raises(InvalidInput) as caught:
        decode_job(json.dumps(form).encode(), None, model=MODEL, job_id="")
    assert not isinstance(caught.value, Referenced)


_LEAVES = st.sampled_from([None, True, 0, 1, -1, 2, 1.0, 1.5, "", "x", "FP32", "BYTES", [], [1], [[1], [2]], ["a"], {}])
_NEAR_TENSORS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "y", ""]) | _LEAVES,
        "shape": st.lists(st.integers(-1, 2), max_size=3) | _LEAVES,
        "datatype": st.sampled_from(["BOOL", "UINT8", "INT64", "FP32", "FP64", "BYTES", BF16]) | _LEAVES,
        "data": st.lists(st.sampled_from([0, 1, 1.5, True, "a", None]), max_size=4) | _LEAVES,
    },
    optional={"ref": _LEAVES | st.just(_ref()), "other": _LEAVES},
)
_NEAR_JOBS = st.fixed_dictionaries(
    {"inputs": st.lists(_NEAR_TENSORS, max_size=2)},
    optional={
        "id": _LEAVES,
        "model_version": _LEAVES,
        "parameters": st.dictionaries(st.sampled_from("abc"), _LEAVES) | _LEAVES,
        "outputs": st.lists(st.fixed_dictionaries({"name": _LEAVES}), max_size=2) | _LEAVES,
        "other": _LEAVES,
    },
)


@given(_NEAR_JOBS)
def test_what_the_code_accepts_the_schema_accepts(form: dict[str, Any]) -> None:
    """The schema, which publishers check against, is never narrower than the code."""
    try:
        decode_job(json.dumps(form).encode(), None, model=MODEL, job_id="")
    except Referenced:
        pass  # well-formed: it is decoded once its tensors are fetched
    except InvalidInput:
        return
    _VALIDATORS["job"].validate(form)


def test_numbers_in_the_schemas_are_those_of_the_code() -> None:
    """Limits, datatypes and codes stand in the schemas as they stand in the code."""
    job, tensor = _SCHEMAS["job"]["properties"], _SCHEMAS["job"]["$defs"]["tensor"]["properties"]
    assert tensor == _SCHEMAS["result"]["$defs"]["tensor"]["properties"] | {"ref": tensor["ref"]}
    assert tensor["datatype"]["enum"] == [d for d in DATATYPES if d not in (BF16, "BYTES")] + ["BYTES"]
    assert tensor["shape"]["maxItems"] == DEFAULT_LIMITS.max_rank
    assert tensor["shape"]["items"]["maximum"] == MAX_DIM
    assert tensor["name"]["maxLength"] == DEFAULT_LIMITS.max_name_bytes
    assert job["inputs"]["maxItems"] == job["outputs"]["maxItems"] == DEFAULT_LIMITS.max_tensors
    assert job["parameters"]["maxProperties"] == DEFAULT_LIMITS.max_parameters
    assert (job["id"]["maxLength"], job["model_name"]["maxLength"]) == (MAX_JOB_ID_BYTES, MAX_MODEL_ID_BYTES)
    code = _SCHEMAS["failure"]["properties"]["error"]["properties"]["code"]
    assert code["examples"] == sorted(JOB_ERRORS)


def test_card_schema_is_that_of_the_card() -> None:
    """``schemas/card.json`` says what the store writes. If not: ``python -m tests.wire.golden``."""
    assert (SCHEMAS / "card.json").read_text(encoding="utf-8") == card_schema()


# --- the publisher's page -----------------------------------------------------------------------

_PAGE = (SCHEMAS / "README.md").read_text(encoding="utf-8")


def test_the_page_lists_every_error_code() -> None:
    """The table has each code of the code, with its retryable flag, and no other."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (yes|no) \|", _PAGE, flags=re.MULTILINE))
    assert rows == {code: "yes" if cls.retryable else "no" for code, cls in JOB_ERRORS.items()}


def test_the_page_names_real_exchanges() -> None:
    """Each exchange that the page speaks of is one that the topology declares."""
    known = {getattr(topology, name) for name in ("JOBS", "BATCH", "RESULTS", "DEAD", "CONTROL")}
    assert set(re.findall(r"`(qworker\.\w+)`", _PAGE)) == known


def test_the_examples_on_the_page_are_valid() -> None:
    """What is shown can be sent, or is what comes back."""
    examples = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", _PAGE, flags=re.DOTALL)]
    for example, name in zip(examples, ("job", "control", "progress", "result", "failure"), strict=True):
        _VALIDATORS[name].validate(example)
    assert read_cancel(decode_order(json.dumps(examples[1]).encode(), None).arguments).jobs
    assert decode_progress(json.dumps(examples[2]).encode(), None)[2].state == "loading"
    model = examples[3]["model_name"]
    assert isinstance(decode_job(json.dumps(examples[0]).encode(), None, model=model, job_id=""), Job)
    assert isinstance(decode_reply(json.dumps(examples[3]).encode(), None), Result)
    assert isinstance(decode_reply(json.dumps(examples[4]).encode(), None), Failure)
