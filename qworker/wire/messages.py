"""What crosses the network, as values: jobs, results and failures.

Names follow the Open Inference Protocol (V2). Nothing here knows bytes (``codec``) or queues
(``topology``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from qworker.errors import JOB_ERRORS, JobError, JobFailed, QworkerError

MSGPACK = "application/msgpack"
JSON = "application/json"


# Structs, not frozen dataclasses: several are made for each job, and that takes a fifth of the time.


class BlobRef(msgspec.Struct, frozen=True):
    """Where the bytes of a tensor lie that travels beside its message, and how to know them again."""

    uri: str
    sha256: str
    nbytes: int


class Tensor(msgspec.Struct, frozen=True, eq=False):
    """A named array with its Open Inference datatype.

    ``array`` is C-contiguous, little-endian. BYTES is an object array of ``bytes``; BF16 is a uint16
    array that holds the raw two bytes of each value (numpy has no bfloat16). An array that was decoded is
    a read-only view into the message, and starts wherever the message has it: not always aligned.

    With ``ref`` the message holds that in place of the values (see ``wire/reference``).
    """

    name: str
    datatype: str
    array: NDArray[Any]
    ref: BlobRef | None = None


class Job(msgspec.Struct, frozen=True, eq=False):
    """One request to run a model once.

    ``outputs`` names the outputs that are wanted; empty means all of them.
    """

    id: str
    model: str
    inputs: tuple[Tensor, ...]
    version: str | None = None
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = {}


class Result(msgspec.Struct, frozen=True, eq=False):
    """The answer to a job. ``timing`` holds seconds: ``queue``, ``run``, ``total``."""

    id: str
    model: str
    version: str
    outputs: tuple[Tensor, ...]
    timing: Mapping[str, float] = {}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The outputs as ``{name: array}``."""
        return {t.name: t.array for t in self.outputs}


@dataclass(frozen=True, slots=True)
class Failure:
    """The typed answer to a job that cannot have a result."""

    id: str
    model: str
    code: str
    message: str
    retryable: bool = False

    @classmethod
    def of(cls, job_id: str, model: str, error: QworkerError) -> Failure:
        """The failure that tells a requester about ``error``."""
        return cls(job_id, model, error.code, str(error), error.retryable)

    def error(self) -> QworkerError:
        """The exception that a caller gets for this failure."""
        known: type[JobError] | None = JOB_ERRORS.get(self.code)
        if known is not None:
            return known(self.message)
        return JobFailed(self.code, self.message, retryable=self.retryable)
