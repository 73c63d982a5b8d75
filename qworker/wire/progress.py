"""What a caller who asks is told while its job waits, to bytes and back. ``schemas/progress.json`` is normative.

Such a message goes where the answer will go, with the job's correlation id. The header ``x-progress`` on it, with the
state as its value, says that it is no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from qworker.errors import InvalidInput
from qworker.wire.codec import body_kind
from qworker.wire.messages import JSON

PROGRESS_HEADER: Final = "x-progress"
"""On a job: its caller wants to be told. On what comes back: the state; what has it is no answer."""
_NO: Final = frozenset({"", "0", "false", "no", "off"})

State = Literal["queued", "loading", "running"]


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a job stands, as one worker sees it. What is not known is None."""

    state: State
    """``queued``: behind others, or its model is being claimed; ``loading``: its model loads; ``running``: it runs."""
    share: float | None = None
    """Of the load, 0 to 1, by time."""
    eta: float | None = None
    """Seconds until the answer is expected, from the sending of this message."""
    stage: str | None = None
    """Of the load: ``fetch`` (read and verify), ``room`` (wait for memory), ``slot`` (wait for a load slot), ``load``.
    More may be added."""
    ahead: int | None = None
    """Jobs in the worker's hands that come before it."""
    worker: str | None = None
    """The name of the worker that says so."""

    def __str__(self) -> str:
        """In words, as in ``loading 40 % (fetch), about 3 s``."""
        words: str = self.state
        if self.state == "loading" and self.share is not None:
            words += f" {100 * self.share:.0f} %"
        if self.stage in _STAGES:
            words += f" ({_STAGES[self.stage]})"
        if self.state == "queued" and self.ahead:
            words += f" behind {self.ahead} job{'s' if self.ahead > 1 else ''}"
        return words if self.eta is None else f"{words}, about {_seconds(self.eta)}"


_STAGES: Final = {
    "fetch": "reading and verifying",
    "room": "waiting for memory",
    "slot": "waiting for a load slot",
    "load": "loading and warming up",
}


class _Form(msgspec.Struct, frozen=True):
    id: str
    model_name: str
    progress: Progress


def wants_progress(headers: Mapping[str, Any]) -> bool:
    """Whether the header of a job asks for it: any value does but false, 0, and the words for them."""
    asked = headers.get(PROGRESS_HEADER)
    return asked.lower() not in _NO if isinstance(asked, str) else bool(asked)


def encode_progress(job_id: str, model: str, progress: Progress, content_type: str) -> bytes:
    form = _Form(job_id, model, progress)
    return msgspec.json.encode(form) if content_type == JSON else msgspec.msgpack.encode(form)


def decode_progress(body: bytes, content_type: str | None) -> tuple[str, str, Progress]:
    """The job's id, its model, and where it stands. Raises InvalidInput for what is no such message."""
    decode = msgspec.json.decode if body_kind(content_type, body) == JSON else msgspec.msgpack.decode
    try:
        form = decode(body, type=_Form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput("expected a progress message; see schemas/progress.json") from exc
    return form.id, form.model_name, form.progress


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10.0 else f"{seconds:.0f} s"
