"""How large a message may be: checked on its headers, before anything of that size is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from qworker.errors import ConfigError, InvalidInput

MAX_DIM = 1 << 40
TENSORS_CEILING = 1024
RANK_CEILING = 64
"""Ceilings are part of the decoder's types, so that the parser refuses longer arrays by their header.
``Limits`` may ask for less, never for more. 64 is the most axes that numpy knows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused as too large. Only the strings of an envelope are bounded by the body alone.

    JSON has a limit of its own: while it is parsed, JSON takes up to 45 times the bytes that it was sent
    in (``[[0],[0],...]`` is the worst), where MessagePack tensors take none.
    """

    max_body_bytes: int = 128 << 20
    max_json_bytes: int = 8 << 20
    max_tensors: int = 256
    max_rank: int = 16
    max_name_bytes: int = 512
    max_bytes_elements: int = 1 << 20
    """Elements of all BYTES tensors of a message together: each one becomes an object of its own."""
    max_parameters: int = 64
    max_parameters_bytes: int = 64 << 10
    max_blob_bytes: int = 1 << 30
    """Bytes of all tensors of a message together that travel beside it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ConfigError(f"{field.name} must be at least 1, not {value}")
        if self.max_tensors > TENSORS_CEILING or self.max_rank > RANK_CEILING:
            raise ConfigError(
                f"max_tensors is at most {TENSORS_CEILING} and max_rank at most {RANK_CEILING}, "
                f"not {self.max_tensors} and {self.max_rank}: lower them"
            )


DEFAULT_LIMITS = Limits()


@lru_cache(maxsize=16)
def beside(limits: Limits) -> Limits:
    """``limits`` for the shape of a tensor that travels beside its message."""
    return replace(limits, max_body_bytes=limits.max_blob_bytes)


def check_shape(where: str, shape: Sequence[int], limits: Limits) -> int:
    """The number of elements that ``shape`` stands for. Raises InvalidInput when it can be no shape.

    Holds an empty tensor to the same extent as a full one: ``(0, 2**40)`` has no bytes, but a reduction
    over its first axis has 2**40 of them.
    """
    count = taken = 1
    for dim in shape:
        if not 0 <= dim <= MAX_DIM:
            break
        count *= dim
        taken *= dim or 1
    else:
        if taken <= limits.max_body_bytes and len(shape) <= limits.max_rank:
            return count  # nearly always; the rest says what is wrong
    if len(shape) > limits.max_rank:
        raise InvalidInput(f"{where}: at most {limits.max_rank} dims are taken, the shape has {len(shape)}: reshape it")
    for axis, dim in enumerate(shape):
        if not 0 <= dim <= MAX_DIM:
            found = "a negative number" if dim < 0 else "more than that"
            raise InvalidInput(f"{where}: each dim must be an integer from 0 to 2**40, dim {axis} is {found}")
    if math.prod(dim or 1 for dim in shape) > limits.max_body_bytes:
        raise InvalidInput(
            f"{where}: the shape {list(shape)} stands for more elements than a message of "
            f"{limits.max_body_bytes} bytes can hold: send less at once"
        )
    return math.prod(shape)
