"""Which worker should take up the next cold model: the one where it would be ready first.

Pure. A worker cannot see the others, nor which model comes next. So each says how ready it is for a model of the usual
size, as a level, and the broker hands a hint to the highest level that has a free load slot.
"""

from __future__ import annotations

from typing import Final

NOT_READY: Final = 0
"""Loads fail here."""
CROWDED: Final = 1
"""Loads wait for bytes already: the next one waits behind them."""
FULL: Final = 2
"""Something must leave first."""
MOST_ROOMS: Final = 6
"""Levels above, each for twice the room of the one below: a few more bytes need not change who is asked."""


def level(free: int, held: int, models: int, *, crowded: bool) -> int:
    """How ready a worker is for a model that it does not know yet; higher is sooner.

    ``free`` bytes, and ``held`` bytes by so many ``models``. With room for one model of their mean size it is above
    those that must evict, with room for two above that, then four, and so on: loads that come together are spread.
    """
    if crowded:
        return CROWDED
    if models <= 0 or held <= 0:
        return FULL + MOST_ROOMS if free > 0 else FULL
    return FULL + min(MOST_ROOMS, (max(0, free) * models // held).bit_length())
