"""What a plan takes and gives, which of its profiles suits a shape, and where tensors lie in a block. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from qworker.wire.signature import Signature, TensorSpec

ALIGNMENT: Final = 256

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Shapes that one profile takes for one input."""

    min: Shape
    opt: Shape
    max: Shape

    def takes(self, shape: Shape) -> bool:
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )

    def __str__(self) -> str:
        if self.min == self.max:
            return words(self.min)
        return f"{words(self.min)} to {words(self.max)}"


Profile = Mapping[str, Bounds]


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of the plan. ``on_host``: its values are read or written in host memory (shapes)."""

    name: str
    datatype: str
    dims: Shape
    itemsize: int
    on_host: bool


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything that goes in and out, in the plan's order, and the profiles for it."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    profiles: tuple[Profile, ...]

    def signature(self) -> Signature:
        """As the plan tells it, which has no names for its open dims; the card knows more."""
        return Signature(tuple(map(_spec, self.inputs)), tuple(map(_spec, self.outputs)))


def choose_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int | None:
    """The profile that takes all ``shapes`` and was made for sizes nearest to them; None when none takes them."""
    takers = [
        number
        for number, ranges in enumerate(profiles)
        if all(name in shapes and bounds.takes(shapes[name]) for name, bounds in ranges.items())
    ]
    return min(takers, key=lambda number: _distance(profiles[number], shapes), default=None)


def out_of_range(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> str:
    """Which input no profile takes, what it has, and what there is."""
    for name, shape in shapes.items():
        offered = [ranges[name] for ranges in profiles if name in ranges]
        if offered and not any(bounds.takes(shape) for bounds in offered):
            taken = ", or ".join(dict.fromkeys(map(str, offered)))
            return f"input {name!r} has the shape {words(shape)}; the plan was built for {taken}"
    return f"no profile of the plan takes the shapes {', '.join(f'{n} {words(s)}' for n, s in shapes.items())} together"


def place(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of tensors in one block, aligned, and the block's bytes. A tensor of no bytes has a place too."""
    offsets: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        offsets[name] = end
        end += aligned(max(size, 1))
    return offsets, end


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def words(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _distance(ranges: Profile, shapes: Mapping[str, Shape]) -> float:
    """How far from the best sizes: a factor of two counts the same in both directions."""
    return sum(
        abs(math.log2((math.prod(shapes[name]) + 1) / (math.prod(bounds.opt) + 1))) for name, bounds in ranges.items()
    )


def _spec(port: Port) -> TensorSpec:
    # as from the other backend: an empty shape says nothing
    return TensorSpec(port.name, port.datatype, tuple(dim if dim >= 0 else None for dim in port.dims) or None)
