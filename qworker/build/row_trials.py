"""Rows to try a model on: those of its sample, random ones that it takes, and extreme neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qworker.errors import JobError
from qworker.wire.datatypes import BYTES
from qworker.wire.messages import Tensor
from qworker.wire.rows import take
from qworker.wire.signature import Signature, TensorSpec

Row = list[Tensor]
Run = Callable[[Row], list[Tensor]]
Draw = Callable[[np.random.Generator], NDArray[Any]]

_FLOATS: Final = frozenset({"FP16", "FP32", "FP64"})
_UPPERS: Final = (1000, 100, 30, 8, 2)
"""Tried for whole numbers, which may be places in a table of unknown length: the first that the model takes."""
_LARGE: Final = 1e3
_TRIES: Final = 3


def candidates(signature: Signature, sample: Sequence[Tensor]) -> Iterator[dict[str, int]]:
    """Which axis of each input may count rows, likeliest first; only axes that the model leaves open.

    The first open axis of each input (a state of shape ``[2, batch, 128]`` has its rows on axis 1); those of the
    same symbol; those of inputs with more than one axis; and the second open one, for inputs that have time first.
    """
    ranks = {tensor.name: tensor.array.ndim for tensor in sample}
    opened = {spec.name: _open_axes(spec, ranks[spec.name]) for spec in signature.inputs}
    first = {name: axes[0] for name, axes in opened.items() if axes}
    seen: list[dict[str, int]] = []
    for candidate in (
        first,
        _same_symbol(signature),
        {name: axis for name, axis in first.items() if ranks[name] > 1},
        {name: axes[1] if len(axes) > 1 else axes[0] for name, axes in opened.items() if axes and ranks[name] > 2},
    ):
        if candidate and candidate not in seen:
            seen.append(candidate)
            yield candidate


def rows_of(sample: Sequence[Tensor], axes: Mapping[str, int], most: int) -> list[Row]:
    """The first rows of a sample, each as inputs of its own."""
    count = min(tensor.array.shape[axes[tensor.name]] for tensor in sample if tensor.name in axes)
    return [take(sample, axes, i, 1) for i in range(min(count, most))]


class RandomRows:
    """Makes rows that the model takes, like the given one and different from each other."""

    def __init__(self, row: Row, axes: Mapping[str, int], run: Run, rng: np.random.Generator) -> None:
        self._row = row
        self._axes = axes
        self._run = run
        self._rng = rng
        self._uppers: dict[str, int] = {}
        self._draws: dict[str, Draw] = {t.name: self._draw_of(t) for t in row if t.name in axes}

    def one(self) -> tuple[Row, list[Tensor]]:
        """A row, with what the model gives for it alone. Raises JobError when it takes not even the sample's."""
        for _ in range(_TRIES):
            row = self._made({name: draw(self._rng) for name, draw in self._draws.items()})
            outputs = self._outputs(row)
            if outputs is not None:
                return row, outputs
        shuffled = self._made({t.name: _shuffled(t)(self._rng) for t in self._row if t.name in self._axes})
        outputs = self._outputs(shuffled)
        return (shuffled, outputs) if outputs is not None else (self._row, self._run(self._row))

    def extremes(self) -> list[Row]:
        """Rows that the model takes alone and that would be felt beside others: huge, zero, not a number."""
        made = [
            self._made({t.name: extreme(t) for t in self._row if t.name in self._axes})
            for extreme in (self._large, _zero, _nan)
        ]
        return [row for row in made if self._outputs(row) is not None]

    def _draw_of(self, tensor: Tensor) -> Draw:
        """How to fill one input, the others as in the sample: the widest way that the model takes."""
        for upper, draw in _draws(tensor):
            if self._outputs(self._made({tensor.name: draw(self._rng)})) is not None:
                self._uppers[tensor.name] = upper
                return draw
        return _shuffled(tensor)

    def _large(self, tensor: Tensor) -> NDArray[Any]:
        array = self._draws[tensor.name](self._rng)
        if tensor.datatype in _FLOATS:
            with np.errstate(over="ignore"):
                return array * array.dtype.type(_LARGE)
        if tensor.datatype == BYTES:
            return array
        upper = self._uppers.get(tensor.name)
        return np.full_like(array, array.max() if upper is None else upper - 1)

    def _made(self, arrays: Mapping[str, NDArray[Any]]) -> Row:
        return [Tensor(t.name, t.datatype, arrays.get(t.name, t.array)) for t in self._row]

    def _outputs(self, row: Row) -> list[Tensor] | None:
        try:
            return self._run(row)
        except JobError:
            return None


def _open_axes(spec: TensorSpec, rank: int) -> list[int]:
    if spec.shape is None:
        return list(range(rank))
    return [axis for axis, dim in enumerate(spec.shape) if not isinstance(dim, int)]


def _same_symbol(signature: Signature) -> dict[str, int]:
    """The axes that bear the symbol of the first open axis there is."""
    shapes = {spec.name: spec.shape or () for spec in signature.inputs}
    symbol = next((dim for shape in shapes.values() for dim in shape if not isinstance(dim, int)), None)
    return {name: shape.index(symbol) for name, shape in shapes.items() if symbol is not None and symbol in shape}


def _draws(tensor: Tensor) -> Iterator[tuple[int, Draw]]:
    """Ways to fill a tensor, the widest first, with the bound of whole numbers."""
    array, datatype = tensor.array, tensor.datatype
    if datatype in _FLOATS:
        mean, spread = _moments(array)
        yield 0, lambda rng: (mean + spread * rng.standard_normal(array.shape)).astype(array.dtype)
    elif datatype == "BOOL":
        yield 2, lambda rng: rng.random(array.shape) < 0.5
    elif datatype != BYTES and array.ndim > 1:  # one-dimensional ones may be lengths: those of the sample will do
        for upper in _UPPERS:
            if upper - 1 <= np.iinfo(array.dtype).max:
                yield upper, _integers(array, upper)


def _integers(array: NDArray[Any], upper: int) -> Draw:
    return lambda rng: rng.integers(0, upper, array.shape).astype(array.dtype)


def _shuffled(tensor: Tensor) -> Draw:
    """Values of the sample in another order: what is left where the model is choosy."""
    flat = tensor.array.reshape(-1)
    return lambda rng: flat[rng.integers(0, flat.size, flat.size)].reshape(tensor.array.shape) if flat.size else flat


def _moments(array: NDArray[Any]) -> tuple[float, float]:
    finite = array[np.isfinite(array)].astype(np.float64)
    spread = float(finite.std()) if finite.size else 0.0
    return (float(finite.mean()), spread) if spread > 0.0 else (0.0, 1.0)


def _zero(tensor: Tensor) -> NDArray[Any]:
    return tensor.array if tensor.datatype == BYTES else np.zeros_like(tensor.array)


def _nan(tensor: Tensor) -> NDArray[Any]:
    return np.full_like(tensor.array, np.nan) if tensor.datatype in _FLOATS else tensor.array
