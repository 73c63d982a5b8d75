"""Calibration rows: the user's own examples of a model's inputs, read one at a time.

- ``rows.npz``: an array for each input, named like it. Its first axis counts rows. An input that is the
  same for all rows may be given once, in its own rank without rows (a sample rate, say).
- a folder of ``.npz``: each file is one call with all inputs, of whatever sizes.
- a folder of ``.npy``: each file is one call of a model with one input; with several inputs, a folder for
  each of them with files of the same names.
- ``rows.parquet``: a column for each input, a call each row; lists are brought into the input's shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from qworker.errors import InvalidInput
from qworker.wire.datatypes import BYTES, dtype_of
from qworker.wire.names import shown
from qworker.wire.signature import TensorSpec

Feed = dict[str, NDArray[Any]]
"""Input name → array: what one call of the model takes."""

HELD_OUT: Final = 5
"""Every fifth row is kept for the accuracy gate: it has not been calibrated on."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Calls to calibrate and to check on. ``read(i)`` gives the ``i``-th, from disk or memory."""

    count: int
    read: Callable[[int], Feed]
    digest: str
    """Changes when the rows do: part of what a conversion is remembered by."""
    made_up: bool = False

    def calibration(self) -> list[int]:
        """Numbers of the rows to calibrate on. One row serves both ends."""
        return [i for i in range(self.count) if not self._is_held_out(i)] or list(range(self.count))

    def held_out(self) -> list[int]:
        """Numbers of the rows to check on."""
        return [i for i in range(self.count) if self._is_held_out(i)]

    def _is_held_out(self, i: int) -> bool:
        return i % HELD_OUT == min(HELD_OUT, self.count) - 1


def read_rows(path: Path, inputs: Sequence[TensorSpec]) -> Rows:
    """The rows of a file or folder. Raises InvalidInput saying what does not fit the model's inputs."""
    if path.is_dir():
        rows = _folder(path, inputs)
    elif path.suffix == ".npz":
        rows = _stacked(_load_npz(path), inputs, path)
    elif path.suffix in {".parquet", ".pq"}:
        rows = _parquet(path, inputs)
    else:
        found = "it does not exist" if not path.exists() else f"found a {path.suffix or 'nameless'} file"
        raise InvalidInput(f"expected calibration rows as .npz, .parquet or a folder of .npy or .npz; {found}: {path}")
    if rows.count == 0:
        raise InvalidInput(f"{path} has no rows: give some hundred examples of what the model will see")
    return rows


def fixed_rows(feeds: Sequence[Feed], *, made_up: bool) -> Rows:
    """Rows that are in memory already."""
    digest = sha256()
    for feed in feeds:
        for name, array in sorted(feed.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes() if array.dtype != object else repr(array).encode())
    return Rows(len(feeds), lambda i: feeds[i], digest.hexdigest(), made_up)


# --- the forms ----------------------------------------------------------------------------------


def _folder(path: Path, inputs: Sequence[TensorSpec]) -> Rows:
    calls = sorted(path.glob("*.npz"))
    if calls:
        return Rows(len(calls), lambda i: _call(_load_npz(calls[i]), inputs, calls[i]), _digest(calls))
    if len(inputs) == 1:
        files = {inputs[0].name: sorted(path.glob("*.npy"))}
    else:
        files = {spec.name: sorted((path / _plain(spec.name)).glob("*.npy")) for spec in inputs}
        names = {name: [file.name for file in found] for name, found in files.items()}
        if len({tuple(found) for found in names.values()}) != 1:
            counts = ", ".join(f"{shown(name)} {len(found)}" for name, found in names.items())
            raise InvalidInput(
                f"expected a folder for each input in {path} with .npy files of the same names; found {counts}: "
                "name the folders like the inputs, or save each call as one .npz"
            )
    count = len(next(iter(files.values())))

    def read(i: int) -> Feed:
        return _call({name: _load_npy(found[i]) for name, found in files.items()}, inputs, path)

    return Rows(count, read, _digest([file for found in files.values() for file in found]))


def _stacked(arrays: Feed, inputs: Sequence[TensorSpec], path: Path) -> Rows:
    by_name = _by_name(arrays, inputs, path)
    moving = {spec.name for spec in inputs if _has_rows(spec, by_name[spec.name])}
    counts = {name: len(by_name[name]) for name in moving}
    if len(set(counts.values())) > 1:
        raise InvalidInput(
            f"expected arrays with the same number of rows in {path}; "
            f"found {', '.join(f'{shown(name)} {count}' for name, count in counts.items())}: cut them alike"
        )

    def read(i: int) -> Feed:
        row = {name: array[i : i + 1] if name in moving else array for name, array in by_name.items()}
        return _call(row, inputs, path)

    return Rows(next(iter(counts.values()), 1), read, _digest([path]))


def _parquet(path: Path, inputs: Sequence[TensorSpec]) -> Rows:
    try:
        parquet = import_module("pyarrow.parquet")
        arrow = import_module("pyarrow")
    except ImportError as exc:
        raise InvalidInput(f"reading {path} needs pyarrow: pip install 'qworker[batch]'") from exc
    try:
        table: Any = parquet.read_table(str(path))
    except (OSError, arrow.ArrowException) as exc:
        raise InvalidInput(f"{path} cannot be read as parquet ({exc}): write it again") from exc
    columns: dict[str, Any] = {name: table.column(name) for name in table.column_names}
    missing = [spec.name for spec in inputs if spec.name not in columns]
    if missing:
        raise InvalidInput(
            f"expected the columns {', '.join(shown(spec.name) for spec in inputs)} in {path}; "
            f"missing {', '.join(map(shown, missing))}: name the columns like the inputs"
        )

    def read(i: int) -> Feed:
        return _call({spec.name: np.asarray(columns[spec.name][i].as_py()) for spec in inputs}, inputs, path)

    return Rows(int(table.num_rows), read, _digest([path]))


# --- one call -----------------------------------------------------------------------------------


def _call(arrays: Feed, inputs: Sequence[TensorSpec], path: Path) -> Feed:
    by_name = _by_name(arrays, inputs, path)
    return {spec.name: _fitted(spec, by_name[spec.name], path) for spec in inputs}


def _by_name(arrays: Feed, inputs: Sequence[TensorSpec], path: Path) -> Feed:
    found = {spec.name: arrays.get(spec.name, arrays.get(_plain(spec.name))) for spec in inputs}
    missing = [name for name, array in found.items() if array is None]
    if missing:
        raise InvalidInput(
            f"expected arrays named {', '.join(shown(spec.name) for spec in inputs)} in {path}; found "
            f"{', '.join(map(shown, arrays)) or 'none'}: name them like the model's inputs"
        )
    return cast("Feed", found)


def _plain(name: str) -> str:
    return name.replace("/", "_")  # what a file can be named


def _has_rows(spec: TensorSpec, array: NDArray[Any]) -> bool:
    """Whether the array has one call after the other along its first axis."""
    if spec.shape is None or array.ndim == len(spec.shape) + 1:
        return array.ndim > 0
    first = spec.shape[0] if spec.shape else 0
    return array.ndim > 0 and (not isinstance(first, int) or (first == 1 and len(array) != 1))


def _fitted(spec: TensorSpec, array: NDArray[Any], path: Path) -> NDArray[Any]:
    """The array in the input's rank and type."""
    if spec.datatype == BYTES:
        return array
    dtype = dtype_of(spec.datatype)
    if not np.can_cast(array.dtype, dtype, "same_kind") and not (array.dtype.kind in "iu" and dtype.kind in "iu"):
        raise InvalidInput(
            f"{path}: expected {spec.datatype} for input {shown(spec.name)}; found {array.dtype}: convert it"
        )
    array = np.ascontiguousarray(array, dtype) if array.ndim else array.astype(dtype)
    if spec.shape is None:
        return array
    rank = len(spec.shape)
    if array.ndim == rank + 1 and len(array) == 1:
        array = array[0]
    elif array.ndim == rank - 1:
        array = array[np.newaxis]
    elif array.ndim != rank:
        array = array.reshape(_target(spec, array.size, path, array.shape))
    if any(isinstance(dim, int) and dim != size for dim, size in zip(spec.shape, array.shape, strict=True)):
        array = array.reshape(_target(spec, array.size, path, array.shape))
    return array


def _target(spec: TensorSpec, size: int, path: Path, found: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that ``size`` elements take: one call, and at most one other open axis."""
    assert spec.shape is not None
    one = 0 if len(spec.shape) > 1 else None  # the batch axis of one call
    dims = [dim if isinstance(dim, int) else 1 if axis == one else -1 for axis, dim in enumerate(spec.shape)]
    fixed = math.prod(dim for dim in dims if dim > 0)
    if dims.count(-1) > 1 or (size != fixed if -1 not in dims else fixed == 0 or size % fixed):
        declared = ", ".join("?" if dim is None else str(dim) for dim in spec.shape)
        raise InvalidInput(
            f"{path}: expected rows of shape [{declared}] for input {shown(spec.name)}; "
            f"found {list(found)}: give each row in the input's shape"
        )
    return tuple(size // fixed if dim == -1 else dim for dim in dims)


# --- files --------------------------------------------------------------------------------------


def _load_npz(path: Path) -> Feed:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, BadZipFile, AttributeError) as exc:
        raise InvalidInput(
            f"{path} cannot be read as an .npz of named arrays ({exc}): write it with numpy.savez"
        ) from exc


def _load_npy(path: Path) -> NDArray[Any]:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as exc:
        raise InvalidInput(f"{path} cannot be read as an .npy file ({exc}): write it with numpy.save") from exc


def _digest(files: Sequence[Path]) -> str:
    digest = sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(sha256(file.read_bytes()).digest())
    return digest.hexdigest()
