"""Every error that qworker raises or sends.

Each class has a stable ``code`` that travels on the wire (``schemas/failure.json``), says whether the
same job may succeed later (``retryable``), and its message says three things: what was expected, what
was found, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class QworkerError(Exception):
    """Base of all errors of this package."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False


# --- what can be wrong with one job -------------------------------------------------------------


class JobError(QworkerError):
    """Something about one job; answered to its requester, and nothing else is harmed."""


class InvalidInput(JobError):
    """The body, or a tensor in it, is not what the model takes. Never retried."""

    code = "invalid_input"


class UnknownModel(JobError):
    """No model of that id is registered."""

    code = "unknown_model"


class ModelUnavailable(JobError):
    """The model is registered, but it cannot be loaded here now. The message says why."""

    code = "model_unavailable"
    retryable = True


class ModelTooLarge(JobError):
    """The model needs more bytes than the worker's whole budget."""

    code = "model_too_large"


class InferenceFailed(JobError):
    """The engine refused or failed while it ran this job."""

    code = "inference_failed"


class OutOfMemory(InferenceFailed):
    """There was no memory to run this job, not even by itself. It may pass when less else is in memory."""

    code = "out_of_memory"
    retryable = True


class DeadlineExceeded(JobError):
    """The job's deadline passed before it ran."""

    code = "deadline_exceeded"


class JobCancelled(JobError):
    """The job was cancelled before it ran."""

    code = "cancelled"


class ResultTooLarge(JobError):
    """The result is larger than a broker message may be."""

    code = "result_too_large"


class BlobUnavailable(JobError):
    """A tensor that travels by reference cannot be read now: the store is away, or no longer has it."""

    code = "blob_unavailable"
    retryable = True


class PoisonJob(JobError):
    """The job was delivered too often without an outcome: it is held to be what ends workers."""

    code = "poison_job"


# --- what a caller meets ------------------------------------------------------------------------


class JobFailed(QworkerError):
    """The worker answered with a failure whose code has no class of its own here.

    ``code`` is the wire code (an instance attribute that shadows the class's).
    """

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code  # pyright: ignore[reportAttributeAccessIssue]  # one class, many wire codes
        self.retryable = retryable  # pyright: ignore[reportAttributeAccessIssue]


class CallTimeout(QworkerError):
    """No reply came in time. The job may still run."""

    code = "call_timeout"
    retryable = True


# --- the platform around us ---------------------------------------------------------------------


class BrokerError(QworkerError):
    """Base of what can go wrong between us and RabbitMQ."""

    code = "broker_error"


class BrokerUnavailable(BrokerError):
    """The broker cannot be reached, or the connection was lost. Trying again may help."""

    code = "broker_unavailable"
    retryable = True


class BrokerRefused(BrokerError):
    """The broker answered and said no: wrong password, virtual host or permission. Stop and mend."""

    code = "broker_refused"


class TopologyMismatch(BrokerError):
    """A queue or exchange exists already, with other arguments than ours."""

    code = "topology_mismatch"


class PublishFailed(BrokerError):
    """The broker did not take the message: nacked, or no confirm in time."""

    code = "publish_failed"
    retryable = True


class Unroutable(PublishFailed):
    """A mandatory message has no queue to go to."""

    code = "unroutable"
    retryable = False


class StoreError(QworkerError):
    """The cold store cannot be read or written."""

    code = "store_error"


class ModelNotFound(StoreError):
    """The store has no such model or version."""

    code = "unknown_model"


class CorruptModel(StoreError):
    """The bytes of a model are not those that its card describes."""

    code = "model_unavailable"


class ModelRefused(QworkerError):
    """A model cannot be registered or loaded by this backend; the message gives the reason."""

    code = "model_refused"


class LoadFailed(QworkerError):
    """An engine could not be made from bytes that were read in full and verified."""

    code = "model_unavailable"


class DeviceUnavailable(QworkerError):
    """This process cannot use a GPU: no driver, no device, or a library is missing. The message says which."""

    code = "device_unavailable"


class DeviceMemoryFull(QworkerError):
    """The device had no memory for it now. Nothing is wrong with the model: it may fit later."""

    code = "model_unavailable"
    retryable = True


class DeviceLost(Exception):
    """The device answers every call of this process with an error from now on.

    Not a QworkerError on purpose: whoever deals with those must not live on. The process ends, the broker has
    its jobs back, and a new process starts afresh.
    """


class ConfigError(QworkerError):
    """A setting is missing or wrong."""

    code = "config_error"


# --- offline scoring ----------------------------------------------------------------------------


class ScoreError(QworkerError):
    """A scoring run cannot begin, or cannot go on. What is done so far is kept where the message says so."""

    code = "score_error"


class InputUnreadable(ScoreError):
    """The input is missing, damaged, of mixed types, or of a kind that is not read."""

    code = "input_unreadable"


class EmptyInput(ScoreError):
    """The input has no rows."""

    code = "empty_input"


class ColumnMissing(ScoreError):
    """A column that was asked for is not in the input."""

    code = "column_missing"


class MappingUnclear(ScoreError):
    """Which column feeds which input of the model does not follow from their names and types."""

    code = "mapping_unclear"


class DuplicateKey(ScoreError):
    """Two rows have the same key."""

    code = "duplicate_key"


class OutputUnusable(ScoreError):
    """The output cannot be written there: no folder, no room, the input itself, or somebody else's file."""

    code = "output_unusable"


class RunChanged(ScoreError):
    """The journal beside the output is of another run: other input, models or options. Nothing is mixed."""

    code = "run_changed"


class RunBusy(ScoreError):
    """Another process writes this output now."""

    code = "run_busy"


class ModelChanged(ScoreError):
    """A model was replaced or removed while its rows were scored."""

    code = "model_changed"


class TooManyErrors(ScoreError):
    """More rows failed than the run allows."""

    code = "too_many_errors"


class RowRefused(JobError):
    """One row of an input is not what the model takes: a null, a ragged or wrongly shaped cell, one too large."""

    code = "row_refused"


JOB_ERRORS: dict[str, type[JobError]] = {
    cls.code: cls
    for cls in (
        InvalidInput,
        UnknownModel,
        ModelUnavailable,
        ModelTooLarge,
        InferenceFailed,
        OutOfMemory,
        DeadlineExceeded,
        JobCancelled,
        ResultTooLarge,
        BlobUnavailable,
        PoisonJob,
    )
}
"""Wire code → class, for the errors that a worker answers with."""
