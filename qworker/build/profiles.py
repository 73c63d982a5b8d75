"""Optimization profiles: the ranges of input shapes that one plan is built for.

A text is ``input=MIN,OPT,MAX`` with shapes like ``4x3x224x224``; one shape stands for all three. The first
text of each input belongs to the first profile, the second one to the second profile, and so on. Inputs
whose *values* are shapes (the second input of Reshape or Expand) take values: ``input:=1x4,2x4,8x4``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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
    inputs: Sequence[TensorSpec], given: Sequence[Profile], rows_are_independent: Callable[[], str | None]
) -> tuple[Profile, ...]:
    """The profiles to build with: those given, checked, or one derived for the batch axis.

    Dynamic sizes of inputs that no text mentions are derived when only the first axis is dynamic and
    ``rows_are_independent`` finds nothing against it (it returns the reason, or None). Raises InvalidInput
    naming the input and the axis otherwise. No profile at all is needed when every size is fixed.
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
    verdict: list[str | None] = []
    for number, profile in enumerate(profiles, 1):
        for spec in open_inputs:
            if spec.name in profile:
                continue
            if not verdict and open_axes(spec) == [0]:
                verdict.append(rows_are_independent())
            profile[spec.name] = _derive(spec, number, len(profiles), verdict[0] if verdict else None, given)
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


def _derive(spec: TensorSpec, number: int, profiles: int, against: str | None, given: Sequence[Profile]) -> Range:
    assert spec.shape is not None
    missing = f"input {shown(spec.name)} has no --profile" + (f" in profile {number}" if profiles > 1 else "")
    others = [axis for axis in open_axes(spec) if axis != 0]
    example = f"--profile {spec.name}={','.join('x'.join(_example(spec, size)) for size in DERIVED)}"
    if others:
        named = ", ".join(f"axis {axis} ({_dim_words(spec, axis)})" for axis in others)
        raise InvalidInput(f"{missing}, and its {named} may be of any size: give the sizes, as in {example}")
    if given:
        raise InvalidInput(f"{missing}, and others have one: give it too, as in {example}")
    if against is not None:
        raise InvalidInput(
            f"{missing}, and its first axis is not a batch axis ({against}): give the sizes, as in {example}"
        )
    low, best, high = ((size, *(int(dim) for dim in spec.shape[1:] if isinstance(dim, int))) for size in DERIVED)
    return Range(low, best, high)


def _example(spec: TensorSpec, size: int) -> list[str]:
    shape = spec.shape or ()
    return [str(dim) if isinstance(dim, int) else str(size) if axis == 0 else "N" for axis, dim in enumerate(shape)]


def _dim_words(spec: TensorSpec, axis: int) -> str:
    dim = (spec.shape or ())[axis]
    return shown(dim) if isinstance(dim, str) else "no name"
