"""What a model takes and gives: names, datatypes and shapes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

Dim = int | str | None
"""A fixed size, the name of a symbolic size, or unknown."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output as the model declares it.

    ``shape`` is None where the model declares no rank. Declared *output* shapes are only a hint: real
    models declare wrong ranks.
    """

    name: str
    datatype: str
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model, in the model's own order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
