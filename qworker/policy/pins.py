"""Pins by order: which models are never evicted now. Pure: times are unix seconds.

A pin may end at a time, and may hold only during certain hours of each day (UTC). All pins together may keep no more
than a share of the budget: whoever pins everything has no hot zone any more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DAY = 86_400.0
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Pin:
    """``nbytes``: what it keeps. ``hours``: seconds of the day from and to; over midnight where from is later."""

    nbytes: int
    until: float | None = None
    hours: tuple[int, int] | None = None

    def is_over(self, now: float) -> bool:
        return self.until is not None and now >= self.until

    def holds(self, now: float) -> bool:
        if self.is_over(now):
            return False
        if self.hours is None:
            return True
        begin, end = self.hours
        second = now % DAY
        return begin <= second < end if begin < end else second >= begin or second < end


def read_hours(text: str) -> tuple[int, int]:
    """``08:00-18:30`` → seconds of the day. Raises ValueError."""
    match = _HOURS.fullmatch(text)
    if match is None or match[1] + match[2] == match[3] + match[4]:
        raise ValueError(f"expected hours like 08:00-18:30 (UTC), found {text[:40]!r}")
    first, last = (3600 * int(match[at]) + 60 * int(match[at + 1]) for at in (1, 3))
    return first, last


class Pins:
    """The table. One owner calls it."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}

    def place(self, model: str, pin: Pin, most: int) -> int | None:
        """Pin ``model``, in place of an earlier pin of it; the bytes that all would keep if that is over ``most``."""
        total = pin.nbytes + sum(each.nbytes for other, each in self._pins.items() if other != model)
        if total > most:
            return total
        self._pins[model] = pin
        return None

    def drop(self, model: str) -> bool:
        """False when there was none."""
        return self._pins.pop(model, None) is not None

    def look(self, now: float) -> dict[str, bool]:
        """Each model and whether its pin holds now; those that are over are told once more, and forgotten."""
        held = {model: pin.holds(now) for model, pin in self._pins.items()}
        self._pins = {model: pin for model, pin in self._pins.items() if not pin.is_over(now)}
        return held

    def all(self) -> dict[str, Pin]:
        return dict(self._pins)
