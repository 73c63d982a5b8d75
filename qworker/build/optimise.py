"""Keeping a model as its library has optimised it, where that makes loads faster and changes no answer.

Runs in the probe's child. What an ONNX Runtime does to a graph before it can run takes most of a load: of 20 real
models, 15 load in half of the CPU time or less from the optimised file, and answer with the same bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qworker.engine.base import ModelSource
from qworker.errors import InferenceFailed, InvalidInput, LoadFailed
from qworker.wire.datatypes import BYTES
from qworker.wire.messages import Tensor

if TYPE_CHECKING:
    from qworker.engine.onnx import OnnxBackend, OnnxEngine

WORTH: Final = 0.75
"""Of the time that the model itself takes: otherwise a second file is not worth its place."""
LEAST_SECONDS: Final = 1e-3
"""Saved by a load: less is not worth a second file either."""
_LOADS: Final = 3


def optimise(
    backend: OnnxBackend, source: ModelSource, target: Path, engine: OnnxEngine, tensors: Sequence[Tensor] | None
) -> bool:
    """Write the optimised model to ``target``; False, and no file, where it is not worth it.

    ``engine`` is the model as it is and ``tensors`` a job for it: without one answers cannot be compared.
    """
    if tensors is None:
        return False
    keep = False
    try:
        answer = engine.run(tensors)
        backend.write_optimised(source, target)
        keep = _is_better(backend, source, target, tensors, answer)
    except (LoadFailed, InvalidInput, InferenceFailed):
        pass  # it takes no such form, as one of more than 2 GiB does not: it is served as it is
    finally:
        if not keep:
            target.unlink(missing_ok=True)
    return keep


def _is_better(
    backend: OnnxBackend, source: ModelSource, target: Path, tensors: Sequence[Tensor], answer: Sequence[Tensor]
) -> bool:
    ready = ModelSource(source.model, source.version, target, target.read_bytes(), optimised=True)
    engine = backend.load(ready)
    try:
        same = _same(engine.run(tensors), answer)
    finally:
        engine.close()
    if not same:
        return False
    plain, faster = _load_seconds(backend, source), _load_seconds(backend, ready)
    return faster <= min(WORTH * plain, plain - LEAST_SECONDS)


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    def plain(tensors: Sequence[Tensor]) -> list[object]:
        return [
            (t.name, t.array.shape, t.array.tolist() if t.datatype == BYTES else t.array.tobytes()) for t in tensors
        ]

    return plain(found) == plain(expected)


def _load_seconds(backend: OnnxBackend, source: ModelSource) -> float:
    """CPU seconds from the file's bytes to an engine, the digest that a worker checks included."""
    seconds: list[float] = []
    for _ in range(_LOADS):
        before = time.process_time()
        hashlib.sha256(source.content or b"").digest()
        backend.load(source).close()
        seconds.append(time.process_time() - before)
    return min(seconds)
