"""Whether rows of a model are independent: run alone and together, they must give the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qworker.build.calibrate_rows import Feed, Rows
from qworker.build.convert import SESSION_ERRORS, open_session, session_options
from qworker.build.profiles import open_axes
from qworker.wire.signature import TensorSpec

_TOLERANCE: Final = 1e-3
"""Relative to the largest magnitude of the output: batches are computed in another order."""
_LOOKED_AT: Final = 16


def why_not_batched(path: Path, inputs: Sequence[TensorSpec], rows: Rows | None) -> str | None:
    """What speaks against batching along the first axis of all inputs that leave it open; None: nothing.

    Takes two rows of the same shapes, or a row and a changed copy of it.
    """
    if rows is None:
        return "there are no rows to try it on: give --calibration, or register the model with a --sample"
    batched = [spec.name for spec in inputs if 0 in open_axes(spec)]
    one, other = _two(rows, batched)
    together = {name: np.concatenate([array, other[name]]) if name in batched else array for name, array in one.items()}
    session = open_session(path, session_options())
    names = [value.name for value in session.get_outputs()]
    try:
        first, second = (session.run(names, feed) for feed in (one, other))
    except SESSION_ERRORS as exc:
        return f"the model does not run on these rows: {exc}"
    try:
        both = session.run(names, together)
    except SESSION_ERRORS as exc:
        return f"it does not run on two rows at once: {' '.join(str(exc).split())[:200]}"
    for name, alone, another, batch in zip(names, first, second, both, strict=True):
        against = _differs(name, [alone, another], batch)
        if against is not None:
            return against
    return None


def _two(rows: Rows, batched: Sequence[str]) -> tuple[Feed, Feed]:
    first = rows.read(0)
    for i in range(1, min(rows.count, _LOOKED_AT)):
        other = rows.read(i)
        if all(array.shape == other[name].shape for name, array in first.items()) and any(
            not np.array_equal(first[name], other[name]) for name in batched
        ):
            # what is not batched must be one and the same
            return first, {name: array if name in batched else first[name] for name, array in other.items()}
    return first, _changed(first, batched)


def _changed(feed: Mapping[str, NDArray[Any]], batched: Sequence[str]) -> Feed:
    """Another row like this one: halved floats with a ripple, other inputs turned round."""
    changed = dict(feed)
    for name in batched:
        array = feed[name]
        if array.dtype.kind == "f":
            ripple = np.cos(np.arange(array.size)).reshape(array.shape)
            changed[name] = (0.5 * array + 0.1 * ripple).astype(array.dtype)
        elif array.dtype.kind in "iu":
            changed[name] = np.ascontiguousarray(np.where(array > 0, array - 1, array)[..., ::-1]).astype(array.dtype)
    return changed


def _differs(name: str, alone: Sequence[NDArray[Any]], batch: NDArray[Any]) -> str | None:
    if batch.ndim == 0 or any(each.ndim == 0 for each in alone):
        return f"output {name!r} has no axes"
    expected = np.concatenate(list(alone)) if len({each.shape[1:] for each in alone}) == 1 else None
    if expected is None or expected.shape != batch.shape:
        shapes = " and ".join(str(list(each.shape)) for each in alone)
        return f"output {name!r} is {shapes} for rows alone and {list(batch.shape)} for both"
    if expected.dtype.kind == "f":
        scale = float(np.nanmax(np.abs(expected), initial=0.0))
        same = np.allclose(expected, batch, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)
    else:
        same = bool(np.array_equal(expected, batch))
    return None if same else f"output {name!r} of a row changes with the rows beside it"
