"""What a model takes and gives: names, datatypes and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qworker.errors import InvalidInput
from qworker.wire.messages import Tensor
from qworker.wire.names import shown

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


def check_inputs(signature: Signature, tensors: Sequence[Tensor]) -> None:
    """Raise InvalidInput unless ``tensors`` are the inputs that the model declares, in any order.

    Looks at names, datatypes, ranks and fixed sizes. Symbolic sizes are left to the engine: models give
    two different sizes one name.
    """
    if len(tensors) == 1 == len(signature.inputs):
        tensor, spec = tensors[0], signature.inputs[0]
        if (
            tensor.name == spec.name
            and tensor.datatype == spec.datatype
            and (spec.shape is None or _fits(spec.shape, tensor.array.shape))
        ):
            return  # what most models take: the rest finds out what is wrong
    given = {tensor.name: tensor for tensor in tensors}
    if len(given) != len(tensors) or given.keys() != {spec.name for spec in signature.inputs}:
        _refuse_names(signature, tensors)
    for spec in signature.inputs:
        tensor = given[spec.name]
        if tensor.datatype != spec.datatype:
            raise InvalidInput(
                f"input {shown(spec.name)}: expected datatype {spec.datatype}; found {tensor.datatype}: convert it"
            )
        if spec.shape is not None and not _fits(spec.shape, tensor.array.shape):
            raise InvalidInput(
                f"input {shown(spec.name)}: expected shape {_shape_words(spec.shape)}; "
                f"found {_shape_words(tensor.array.shape)}: reshape it"
            )


def check_outputs(signature: Signature, names: Sequence[str]) -> None:
    """Raise InvalidInput when a wanted output is none of the model's."""
    known = {spec.name for spec in signature.outputs}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidInput(
            f"expected outputs among {_name_words([spec.name for spec in signature.outputs])}; "
            f"found {_name_words(unknown)}: ask for outputs that the model has"
        )


def _refuse_names(signature: Signature, tensors: Sequence[Tensor]) -> None:
    expected = [spec.name for spec in signature.inputs]
    found = [tensor.name for tensor in tensors]
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    what = [f"missing: {_name_words(missing)}"] if missing else []
    what += [f"not known: {_name_words(extra)}"] if extra else []
    what = what or ["one of them twice"]
    raise InvalidInput(
        f"expected the inputs {_name_words(expected)}; found {_name_words(found)} ({'; '.join(what)}): "
        "send each declared input once, by its name"
    )


def _fits(declared: Sequence[Dim], found: Sequence[int]) -> bool:
    if len(declared) != len(found):
        return False
    for dim, size in zip(declared, found, strict=True):  # noqa: SIM110  # a generator costs more than the whole loop
        if dim != size and isinstance(dim, int):
            return False
    return True


def _shape_words(shape: Sequence[Dim]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def _name_words(names: Sequence[str]) -> str:
    shorter = [shown(name) for name in names[:20]]
    rest = [f"{len(names) - 20} more"] if len(names) > 20 else []
    return ", ".join(shorter + rest) or "none"
