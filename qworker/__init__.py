"""qworker: inference jobs from RabbitMQ, run by workers that subscribe to a model only while it is hot.

For callers: ``from qworker import Client`` (or ``SyncClient``) and the errors of ``qworker.errors``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from qworker.errors import (
    BrokerRefused,
    BrokerUnavailable,
    CallTimeout,
    ConfigError,
    InferenceFailed,
    InvalidInput,
    JobFailed,
    ModelUnavailable,
    QworkerError,
    UnknownModel,
)

if TYPE_CHECKING:
    from qworker.api import Client, SyncClient
    from qworker.wire.messages import Failure, Result, Tensor
    from qworker.wire.progress import Progress

__all__ = [
    "BrokerRefused",
    "BrokerUnavailable",
    "CallTimeout",
    "Client",
    "ConfigError",
    "Failure",
    "InferenceFailed",
    "InvalidInput",
    "JobFailed",
    "ModelUnavailable",
    "Progress",
    "QworkerError",
    "Result",
    "SyncClient",
    "Tensor",
    "UnknownModel",
    "__version__",
]

try:
    __version__ = version("qworker")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

# Imported on first use: ``import qworker.errors`` must not pull in an AMQP library, nor make the
# pure parts of the package depend on it.
_LAZY = {
    "Client": "qworker.api",
    "SyncClient": "qworker.api",
    "Failure": "qworker.wire.messages",
    "Result": "qworker.wire.messages",
    "Tensor": "qworker.wire.messages",
    "Progress": "qworker.wire.progress",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
