"""Inputs to warm a model up on: a sample that came with it, or inputs made up from its signature."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from qworker.engine.base import Engine
from qworker.errors import InferenceFailed, InvalidInput
from qworker.wire.datatypes import BYTES, bytes_array, dtype_of, tensor
from qworker.wire.messages import Tensor
from qworker.wire.signature import Dim, Signature, TensorSpec

_SIZES: Final = (1, 2, 3, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 1024, 4000, 16000)
"""Tried for the dims that the model leaves open: small ones first, then those that real models insist on."""
_MAX_ELEMENTS: Final = 4 << 20
_MAX_SECONDS: Final = 5.0
_RANKS: Final = (0, 1, 2, 3, 4)
"""Tried where the model declares no rank."""


def made_up_inputs(engine: Engine, max_seconds: float = _MAX_SECONDS) -> list[Tensor] | None:
    """Inputs that ``engine`` has just run on, or None when none of the guesses suits it in time."""
    deadline = time.monotonic() + max_seconds
    for inputs in guesses(engine.signature):
        try:
            engine.run(inputs)
        except (InvalidInput, InferenceFailed):
            if time.monotonic() > deadline:
                return None
        else:
            return inputs
    return None


def guesses(signature: Signature) -> Iterator[list[Tensor]]:
    """Made-up inputs of growing size, each different from the others.

    A size is tried with a batch of one first (the open first axis of every input is 1), then with all open
    axes alike; a symbol has the same size wherever it stands. Open axes of four-dimensional inputs may be
    channels, so that three channels are tried too.
    """
    ranks: Sequence[int | None] = _RANKS if any(spec.shape is None for spec in signature.inputs) else (None,)
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for size in _SIZES:
        for first in (1, size):
            for channels in (size, 3):
                for rank in ranks:
                    shapes = tuple(_shape(spec, size, first, channels, rank) for spec in signature.inputs)
                    if shapes in seen or sum(math.prod(shape) for shape in shapes) > _MAX_ELEMENTS:
                        continue
                    seen.add(shapes)
                    yield [_filled(spec, shape) for spec, shape in zip(signature.inputs, shapes, strict=True)]


def sample_tensors(signature: Signature, sample: Mapping[str, NDArray[Any]]) -> list[Tensor]:
    """The sample's arrays as tensors, by name. Raises InvalidInput naming what is missing or left over.

    An ``.npz`` member cannot hold a ``/``: a tensor's name is found with ``_`` in its place too.
    """
    left = dict(sample)
    missing: list[str] = []
    tensors: list[Tensor] = []
    for spec in signature.inputs:
        key = spec.name if spec.name in left else spec.name.replace("/", "_")
        array = left.pop(key, None)
        if array is None:
            missing.append(spec.name)
        else:
            tensors.append(tensor(spec.name, array, spec.datatype))
    if missing or left:
        raise InvalidInput(
            f"expected a sample of {', '.join(spec.name for spec in signature.inputs) or 'no inputs'}; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(sorted(left)) or 'none'}: "
            "name its arrays like the model's inputs"
        )
    return tensors


def read_sample(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz`` file. Raises InvalidInput when it cannot be read as one."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InvalidInput(f"expected an .npz file of named arrays; found a single array in {path.name}")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, BadZipFile, MemoryError, NotImplementedError) as exc:
        hint = "save text as a numpy array of dtype U" if "allow_pickle" in str(exc) else "write it with numpy.savez"
        raise InvalidInput(f"{path.name} cannot be read as an .npz file ({exc}): {hint}") from exc


def write_sample(path: Path, tensors: Sequence[Tensor]) -> None:
    """Write tensors as an ``.npz`` that ``read_sample`` reads. Text loses its trailing zero bytes."""
    arrays = {t.name.replace("/", "_"): t.array.astype("S") if t.datatype == BYTES else t.array for t in tensors}
    with path.open("wb") as file:  # savez would add .npz to a name
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _shape(spec: TensorSpec, size: int, first: int, channels: int, rank: int | None) -> tuple[int, ...]:
    dims: Sequence[Dim] = (None,) * (rank or 0) if spec.shape is None else spec.shape
    return tuple(
        dim if isinstance(dim, int) else first if axis == 0 else channels if len(dims) == 4 and axis == 1 else size
        for axis, dim in enumerate(dims)
    )


def _filled(spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Ones: a length of zero or a zero to divide by suits fewer models, and an index of one most vocabularies."""
    if spec.datatype == BYTES:
        return Tensor(spec.name, BYTES, bytes_array([b"a"] * math.prod(shape), shape))
    return Tensor(spec.name, spec.datatype, np.ones(shape, dtype_of(spec.datatype)))
