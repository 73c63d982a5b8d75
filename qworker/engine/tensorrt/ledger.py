"""What we believe to hold of the device, against what the driver says. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

TOLERANCE: Final = 16 << 20
"""Drift below this is the driver's own: it maps pools in pieces of 2 MiB, and loads kernels when they first run."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one engine takes. ``own`` comes back when it goes; ``shared`` is its claim on the arena, which all use."""

    model: str
    own: int
    shared: int
    measured: bool
    """False: ``own`` is what the plan says, since others loaded or left meanwhile."""


@dataclass(frozen=True, slots=True)
class Statement:
    """The account at one moment, in bytes. ``drift``: what is used and nobody here can explain; below 0: too little."""

    used: int
    total: int
    baseline: int
    arena: int
    engines: tuple[Entry, ...]
    drift: int

    @property
    def in_order(self) -> bool:
        return abs(self.drift) <= TOLERANCE


class Ledger:
    """Entries of one device. The caller locks.

    ``baseline`` is what was used before the first engine and after the last one: the CUDA context, loaded
    kernels, and other processes. It stays until the process ends, and can only be seen while nothing else is
    there.
    """

    def __init__(self, baseline: int, total: int) -> None:
        self._baseline = baseline
        self._total = total
        self._entries: dict[int, Entry] = {}
        self._loading = 0
        self._moves = 0

    # --- loads -----------------------------------------------------------------------------------

    @property
    def loading(self) -> int:
        """Loads in progress."""
        return self._loading

    def begin(self) -> int:
        """A load begins. The mark tells :meth:`measured` whether anything else moved since."""
        self._moves += 1
        self._loading += 1
        return self._moves if self._loading == 1 else -1

    def end(self) -> None:
        """It has ended, well or not."""
        self._loading -= 1

    def enter(self, ticket: int, entry: Entry) -> None:
        self._entries[ticket] = entry

    def measured(self, ticket: int, mark: int, taken: int) -> None:
        """By how much the device's use grew since the mark: the engine's own, if nothing else moved meanwhile."""
        if mark == self._moves and ticket in self._entries:
            entry = self._entries[ticket]
            self._entries[ticket] = replace(entry, own=max(taken, 0), measured=True)

    def gone(self, ticket: int) -> None:
        """An engine's memory was given back."""
        self._moves += 1
        self._entries.pop(ticket, None)

    # --- the account -----------------------------------------------------------------------------

    def statement(self, used: int, arena: int) -> Statement:
        """The account. With nothing there, what is used is the baseline."""
        if not self._entries and not self._loading:
            self._baseline = used - arena
        entries = tuple(self._entries.values())
        believed = self._baseline + arena + sum(entry.own for entry in entries)
        return Statement(used, self._total, self._baseline, arena, entries, used - believed)
