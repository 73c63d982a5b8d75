"""The engine contract: a model that is loaded and ready to run.

Backends (``onnx``, later ``tensorrt``) pass the same conformance suite, ``tests/contract/test_engine.py``.
All methods here may block for long: the worker calls them in threads, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from qworker.wire.messages import Tensor
from qworker.wire.signature import Signature


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Verified bytes of a model, as the store hands them over.

    ``content`` is the model file when it is self-contained; otherwise ``path`` is loaded, and its
    external weights lie beside it. ``path`` always exists (None only in tests). ``threads`` within a run
    are the card's advice, for a backend that is told to follow it. ``mapped`` is a large file's bytes where
    they lie, for a backend that need not have them in memory. ``host_code``: the file may run code on the host.
    ``optimised``: the library has optimised the model before, and need not do it again.
    """

    model: str
    version: str
    path: Path
    content: bytes | None
    threads: int | None = None
    mapped: memoryview | None = None
    host_code: bool = False
    optimised: bool = False


class Engine(Protocol):
    """One loaded model. Threads may call ``run`` at once; ``close`` waits for none of them."""

    @property
    def signature(self) -> Signature: ...

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[str] = ()) -> list[Tensor]:
        """Run once; the named outputs, or all, in the model's order.

        Inputs have been checked against ``signature``. Raises InvalidInput when the engine rejects the
        shapes or values, InferenceFailed for everything else that goes wrong inside.
        """
        ...

    def close(self) -> None:
        """Free everything. Idempotent. After it, ``run`` raises InferenceFailed."""
        ...


class Backend(Protocol):
    """Makes engines, and knows the memory they live in."""

    @property
    def name(self) -> str: ...

    def load(self, source: ModelSource) -> Engine:
        """Make an engine. Raises LoadFailed (this file will never load here) with the library's words."""
        ...

    def warm_up(self, engine: Engine, sample: Mapping[str, NDArray[Any]] | None) -> bool:
        """Run once on ``sample``, or on made-up inputs. False when no made-up input suits the model."""
        ...

    def used_bytes(self) -> int:
        """Bytes of the budgeted memory that this process holds now (RSS, or device memory)."""
        ...

    def trim(self) -> None:
        """Give freed memory back to the system, so that ``used_bytes`` tells the truth."""
        ...


BackendFactory = Callable[[], Backend]
