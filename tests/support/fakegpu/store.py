"""Plans of the double in a store, with cards like those of the builder."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qworker.store.card import Card, Plan
from qworker.store.local import LocalStore
from qworker.store.plans import plan_name, publish_plan
from tests.support.fakegpu import double

MIB = 1 << 20


def put_plan(
    root: Path, model: str, *, weights: int = MIB, scratch: int = MIB, build: Any = None, **facts: Any
) -> Card:
    """A plan beside the newest version of ``model``. ``facts`` replace those of its card; ``build`` is the double's."""
    store = LocalStore(root)
    source = store.card(model)
    onnx = store.fetch(source).content
    assert onnx is not None
    io = 64 << 10
    told: dict[str, Any] = {
        "target": "trt",
        "precision": "fp32",
        "library_version": "11.4.0.106",
        "cuda_version": "13.0",
        "compute_capability": "9.0",
        "device": "FakeGPU",
        "weights_bytes": weights,
        "context_bytes": (scratch,),
        "io_bytes": (io,),
        "source_sha256": hashlib.sha256(onnx).hexdigest(),
        "build_seconds": 1.0,
        "measured": True,
    }
    plan = Plan(**{**told, **facts})
    content = double().build(onnx, weights=weights, scratch=scratch, **(build or {}))
    with store.stage() as staging:
        name = plan_name(model, source.version, plan)
        (staging.folder / name).write_bytes(content)
        draft = source.model_copy(
            update={
                "backend": "tensorrt",
                "files": (staging.adopt(name),),
                "sample": None,
                "resident_bytes": weights + scratch + io,
                "runtime": "TensorRT 11.4.0.106 (double)",
                "created": datetime.now(UTC),
                "plan": plan,
                "batching": None,
            }
        )
        return publish_plan(store, staging, draft)
