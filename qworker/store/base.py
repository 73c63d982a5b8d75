"""The cold store contract: where models live while they are not in memory.

All methods block (disk): callers on an event loop run them in threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qworker.store.card import Card
from qworker.wire.messages import BlobRef, Tensor


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model's bytes, read in full and equal to the digests of its card."""

    card: Card
    path: Path
    """The model file; external weights lie beside it."""
    content: bytes | None
    """The model file's bytes when it is self-contained, else None: load from ``path``."""
    sample: Path | None
    optimised: bool = False
    """The bytes are of the optimised model that the card names."""
    mapped: memoryview | None = None
    """A plan's bytes, mapped: they need not be in memory twice."""


class Store(Protocol):
    def models(self) -> Sequence[str]:
        """Ids of all models, sorted. Raises StoreError."""
        ...

    def versions(self, model: str) -> Sequence[str]:
        """Versions of a model, oldest first; the last one is the default. Raises ModelNotFound."""
        ...

    def card(self, model: str, version: str | None = None) -> Card:
        """Raises ModelNotFound, CorruptModel (the card itself cannot be read as one), StoreError."""
        ...

    def fetch(self, card: Card) -> Fetched:
        """Read and verify. Raises ModelNotFound (gone meanwhile), CorruptModel, StoreError."""
        ...


class BlobStore(Protocol):
    """Tensors that travel beside their messages. Unlike ``Store`` it is for event loops, and never blocks one."""

    @property
    def prefix(self) -> str:
        """Where ``send`` puts them: what the other side must be able to read."""
        ...

    async def fetch(self, refs: Iterable[BlobRef]) -> Mapping[BlobRef, memoryview]:
        """The bytes of each, equal to its digest.

        Raises InvalidInput for what must not or cannot be read, BlobUnavailable for what may be there later.
        """
        ...

    async def send(self, tensors: Iterable[Tensor], limit: int) -> tuple[Tensor, ...]:
        """``tensors``, the largest of them put into the store, until at most ``limit`` bytes stay in the message.

        Raises StoreError when the store takes no more.
        """
        ...
