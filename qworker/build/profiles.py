"""Optimization profiles: the ranges of input shapes that one plan is built for.

A text is ``input=MIN,OPT,MAX`` with shapes like ``4x3x224x224``; one shape stands for all three. The first
text of each input belongs to the first profile, the second one to the second profile, and so on. Inputs
whose *values* are shapes (the second input of Reshape or Expand) take values: ``input:=1x4,2x4,8x4``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from qworker.errors import InvalidInput
from qworker.wire.names import shown
from qworker.wire.signature import TensorSpec

DERIVED: Final = (1, 4, 8)
"""Batch sizes of a profile that nobody gave: the smallest, the one to be fast for, the largest."""

_TEXT: Final = re.compile(r"(?P<name>.+?)(?P<sign>:?=)(?P<shapes>[0-9x,\s]*)")


@dataclass(frozen=True, slots=True)
class Range:
    """Shapes of one input, or with ``values`` the values of an input that holds a shape."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]
    values: bool = False

    def __str__(self) -> str:
        return ", ".join("x".join(map(str, shape)) or "scalar" for shape in (self.min, self.opt, self.max))


Profile = Mapping[str, Range]
"""Input name → its range. Inputs of fixed shape may be left out."""


def parse_profiles(texts: Sequence[str]) -> tuple[Profile, ...]:
    """The profiles of the command line's texts. Raises InvalidInput naming the text that is wrong."""
    profiles: list[dict[str, Range]] = []
    for text in texts:
        name, given = _parse(text)
        for profile in profiles:
            if name not in profile:
                profile[name] = given
                break
        else:
            profiles.append({name: given})
    return tuple(profiles)


def settle_profiles(
    inputs: Sequence[TensorSpec], given: Sequence[Profile], axes: Mapping[str, int], unbatched: str | None = None
) -> tuple[Profile, ...]:
    """The profiles to build with: those given, checked, or one derived for the batch axis.

    ``axes`` are those that were verified to count rows, by input; ``unbatched`` says why there are none. An
    open size that no text gives is derived when it is such an axis, else InvalidInput names it. No profile at
    all is needed when every size is fixed.
    """
    known = {spec.name: spec for spec in inputs}
    for profile in given:
        for name, wanted in profile.items():
            if name not in known:
                raise InvalidInput(
                    f"expected --profile for one of the inputs {', '.join(map(shown, known))}; found {shown(name)}: "
                    "use the model's own names"
                )
            _check_fits(known[name], wanted)
    open_inputs = [spec for spec in inputs if open_axes(spec)]
    if not open_inputs:
        return tuple(given)
    profiles = [dict(profile) for profile in given] or [{}]
    for number, profile in enumerate(profiles, 1):
        for spec in open_inputs:
            if spec.name not in profile:
                where = f" in profile {number}" if len(profiles) > 1 else ""
                profile[spec.name] = _derive(spec, axes.get(spec.name), unbatched, where, given)
    return tuple(profiles)


def open_axes(spec: TensorSpec) -> list[int]:
    """The axes of an input whose size the model leaves open."""
    return [] if spec.shape is None else [axis for axis, dim in enumerate(spec.shape) if not isinstance(dim, int)]


def _parse(text: str) -> tuple[str, Range]:
    found = _TEXT.fullmatch(text.strip())
    shapes = found["shapes"].split(",") if found else []
    if found is None or len(shapes) not in {1, 3} or not all(re.fullmatch(r"\d+(x\d+)*", s.strip()) for s in shapes):
        raise InvalidInput(
            f"expected a profile like x=1x3x224x224,4x3x224x224,8x3x224x224 (smallest, best, largest); "
            f"found {shown(text)}: give the input's name and one or three shapes"
        )
    low, best, high = [tuple(int(size) for size in shape.strip().split("x")) for shape in shapes * (3 // len(shapes))]
    if not len(low) == len(best) == len(high) or not all(a <= b <= c for a, b, c in zip(low, best, high, strict=True)):
        raise InvalidInput(
            f"expected three shapes of one rank that grow from smallest to largest; found {shown(text)}: order them"
        )
    return found["name"].strip(), Range(low, best, high, values=found["sign"] == ":=")


def _check_fits(spec: TensorSpec, wanted: Range) -> None:
    if wanted.values or spec.shape is None:
        return
    for shape in (wanted.min, wanted.opt, wanted.max):
        if len(shape) != len(spec.shape) or any(
            isinstance(dim, int) and dim != size for dim, size in zip(spec.shape, shape, strict=True)
        ):
            declared = ", ".join("?" if dim is None else str(dim) for dim in spec.shape)
            raise InvalidInput(
                f"--profile of {shown(spec.name)}: expected shapes that fit [{declared}]; "
                f"found {'x'.join(map(str, shape))}: keep the model's rank and fixed sizes"
            )


def _derive(spec: TensorSpec, batch: int | None, unbatched: str | None, where: str, given: Sequence[Profile]) -> Range:
    assert spec.shape is not None
    missing = f"input {shown(spec.name)} has no --profile{where}"
    others = [axis for axis in open_axes(spec) if axis != batch]
    example = f"--profile {spec.name}={','.join('x'.join(_example(spec, batch or 0, size)) for size in DERIVED)}"
    if batch is None and others == [0]:
        raise InvalidInput(
            f"{missing}, and its first axis was not found to count rows ({unbatched or 'it was never looked at'}): "
            f"give the sizes, as in {example}"
        )
    if others:
        named = ", ".join(f"axis {axis} ({_dim_words(spec, axis)})" for axis in others)
        raise InvalidInput(f"{missing}, and its {named} may be of any size: give the sizes, as in {example}")
    if given:
        raise InvalidInput(f"{missing}, and others have one: give it too, as in {example}")
    low, best, high = (tuple(dim if isinstance(dim, int) else size for dim in spec.shape) for size in DERIVED)
    return Range(low, best, high)


def _example(spec: TensorSpec, batch: int, size: int) -> list[str]:
    shape = spec.shape or ()
    return [str(dim) if isinstance(dim, int) else str(size) if axis == batch else "N" for axis, dim in enumerate(shape)]


def _dim_words(spec: TensorSpec, axis: int) -> str:
    dim = (spec.shape or ())[axis]
    return shown(dim) if isinstance(dim, str) else "no name"
