"""Which names are taken: model ids, versions, job ids, tensor names.

A model id is a routing key, a part of queue names and a folder of the store at once, so that it may
hold nothing that means something there: no ``*`` or ``#``, no ``.`` or ``..`` as a part, no empty part.
"""

from __future__ import annotations

import re

from qworker.errors import InvalidInput

MAX_MODEL_ID_BYTES = 200
"""AMQP names have 255 bytes, and queue names put a prefix and a slot around the id."""
MAX_JOB_ID_BYTES = 255
"""The length of AMQP's ``message_id``."""

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_MODEL_ID = re.compile(rf"{_PART}(?:/{_PART})*")
_VERSION = re.compile(_PART)
_RULE = "letters, digits, '.', '_' and '-', the first one a letter or digit, at most 128"


def check_model_id(model: str) -> str:
    """``model`` itself when it is a model id, else InvalidInput."""
    if len(model) <= MAX_MODEL_ID_BYTES and _MODEL_ID.fullmatch(model):
        return model
    raise InvalidInput(
        f"expected a model id of at most {MAX_MODEL_ID_BYTES} characters whose parts, joined by '/', are {_RULE} "
        f"each; found {shown(model)}: choose another id"
    )


def check_version(version: str) -> str:
    """``version`` itself when it is a version, else InvalidInput."""
    if _VERSION.fullmatch(version):
        return version
    raise InvalidInput(f"expected a version of {_RULE} characters; found {shown(version)}: choose another one")


def check_job_id(job_id: str) -> str:
    """``job_id`` itself when it fits into a ``message_id``, else InvalidInput."""
    if len(job_id) <= MAX_JOB_ID_BYTES and len(job_id.encode("utf-8", "surrogatepass")) <= MAX_JOB_ID_BYTES:
        return job_id
    raise InvalidInput(f"a job id has at most {MAX_JOB_ID_BYTES} bytes of UTF-8, this one has more: shorten it")


def check_tensor_name(where: str, name: str, max_bytes: int) -> str:
    """``name`` itself when it may name a tensor, else InvalidInput."""
    if not name:
        raise InvalidInput(f"{where}: expected a name, found an empty string: use the name that the model declares")
    if len(name) > max_bytes or len(name.encode("utf-8", "surrogatepass")) > max_bytes:
        raise InvalidInput(f"{where}: a name has at most {max_bytes} bytes of UTF-8, this one has more: shorten it")
    return name


def shown(text: str) -> str:
    """``text`` as it may stand in a message: quoted, ASCII, cut."""
    return ascii(text) if len(text) <= 80 else f"{text[:80]!a}... ({len(text)} characters)"
