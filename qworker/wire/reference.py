"""Tensors that travel beside their message: what a ``ref`` says, and the bytes that it stands for.

The bytes are the same in every form of a message: little-endian, in C order; BYTES is each element behind
its length (four bytes, little-endian), as in the binary extension of the Open Inference Protocol.

Nothing here reads anything: who may read what is up to ``store/blobs``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from qworker.errors import InvalidInput
from qworker.wire.datatypes import BYTES, bytes_array, dtype_of, to_bytes
from qworker.wire.messages import BlobRef, Tensor
from qworker.wire.payload import write_msgpack

_LENGTH_BYTES = 4

Part = bytes | memoryview


class RefForm(msgspec.Struct, frozen=True, gc=False):
    """``ref`` as it stands in a message."""

    uri: Annotated[str, Meta(max_length=2048)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    nbytes: Annotated[int, Meta(ge=0, le=1 << 53)]

    def value(self) -> BlobRef:
        return BlobRef(self.uri, self.sha256, self.nbytes)


class Referenced(InvalidInput):
    """The message is well-formed, and cannot be decoded before ``refs`` are fetched: decode it again with them.

    To whoever has no blob store it is what it looks like: input that cannot be taken. ``tensors`` are all of the
    message's, in their order; those with a ref have their shape, and no values.
    """

    def __init__(self, where: str, tensors: tuple[Tensor, ...]) -> None:
        super().__init__(
            f"{where}: it travels by reference, and there is no blob store here (setting blob_store): send its "
            "values as data, or have one set"
        )
        self.tensors = tensors
        self.refs = tuple(tensor.ref for tensor in tensors if tensor.ref is not None)


def check_size(where: str, datatype: str, count: int, ref: BlobRef) -> None:
    """Raise InvalidInput where ``ref`` cannot hold ``count`` elements: before anything is fetched."""
    dtype = dtype_of(datatype)
    if datatype == BYTES:
        if ref.nbytes < count * _LENGTH_BYTES:
            raise InvalidInput(
                f"{where}: {count} BYTES elements take at least {count * _LENGTH_BYTES} bytes; the ref says "
                f"{ref.nbytes}: put four bytes of length before each element"
            )
    elif ref.nbytes != count * dtype.itemsize:
        raise InvalidInput(
            f"{where}: the shape takes {count * dtype.itemsize} bytes of {datatype}; the ref says {ref.nbytes}: "
            "correct the shape, the datatype or the ref"
        )


def read_blob(where: str, datatype: str, shape: tuple[int, ...], count: int, blob: memoryview) -> NDArray[Any]:
    """The array in ``blob``, whose size was checked: a view of it (BYTES is copied). Raises InvalidInput."""
    if datatype == BYTES:
        return bytes_array(_elements(where, count, blob), shape)
    array = np.frombuffer(blob, dtype_of(datatype), count) if count else np.empty(0, dtype_of(datatype))
    if datatype == "BOOL" and bool((array.view(np.uint8) > 1).any()):
        raise InvalidInput(f"{where}: a BOOL byte must be 0 or 1; found another value: send 0 or 1")
    return array.reshape(shape)


def _elements(where: str, count: int, blob: memoryview) -> list[bytes]:
    elements: list[bytes] = []
    at = 0
    while at + _LENGTH_BYTES <= len(blob) and len(elements) < count:
        end = at + _LENGTH_BYTES + int.from_bytes(blob[at : at + _LENGTH_BYTES], "little")
        if end > len(blob):
            break
        elements.append(bytes(blob[at + _LENGTH_BYTES : end]))
        at = end
    if len(elements) != count or at != len(blob):
        raise InvalidInput(
            f"{where}: expected {count} BYTES elements, each behind four bytes of its length, and nothing after them; "
            "found something else: correct the shape or the bytes"
        )
    return elements


def blob_bytes(tensor: Tensor) -> int:
    """The bytes that ``tensor`` has beside its message."""
    if tensor.datatype != BYTES:
        return tensor.array.nbytes
    return sum(_LENGTH_BYTES + len(to_bytes(element)) for element in tensor.array.reshape(-1).tolist())


def blob_part(tensor: Tensor) -> Part:
    """The bytes of ``tensor``: where they lie, except for BYTES, which is put together."""
    if tensor.datatype != BYTES:
        part = write_msgpack(tensor)
        assert not isinstance(part, list)
        return part
    elements = [to_bytes(element) for element in tensor.array.reshape(-1).tolist()]
    return b"".join(part for element in elements for part in (len(element).to_bytes(_LENGTH_BYTES, "little"), element))


def to_send_apart(tensors: Iterable[Tensor], limit: int) -> set[str]:
    """Names of the tensors that have to leave the message, the largest first, until at most ``limit`` bytes stay."""
    sizes = sorted(((blob_bytes(tensor), tensor.name) for tensor in tensors), reverse=True)
    staying = sum(size for size, _ in sizes)
    apart: set[str] = set()
    for size, name in sizes:
        if staying <= limit:
            break
        apart.add(name)
        staying -= size
    return apart
