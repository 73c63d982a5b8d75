"""How ready a worker is for one more model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.placement import CROWDED, FULL, MOST_ROOMS, NOT_READY, level

BYTES = st.integers(0, 1 << 45)
MODELS = st.integers(0, 1000)


def test_levels() -> None:
    """Loads that wait, no room, room for one, for two, for four; an empty worker is the readiest."""
    assert level(1000, 10, 1, crowded=True) == CROWDED
    assert level(9, 20, 2, crowded=False) == FULL
    assert level(10, 20, 2, crowded=False) == FULL + 1
    assert [level(10 * rooms, 10, 1, crowded=False) - FULL for rooms in (1, 2, 3, 4, 7, 8)] == [1, 2, 2, 3, 3, 4]
    assert level(100, 0, 0, crowded=False) == FULL + MOST_ROOMS


@given(BYTES, BYTES, BYTES, MODELS)
def test_more_room_is_never_less_ready(free: int, more: int, held: int, models: int) -> None:
    """And waiting loads are less ready than any."""
    low, high = level(free, held, models, crowded=False), level(free + more, held, models, crowded=False)
    assert NOT_READY < CROWDED < FULL <= low <= high <= FULL + MOST_ROOMS
    assert level(free, held, models, crowded=True) == CROWDED
