"""Pins by order: their time, their hours, and the share of the budget that all may keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.pins import DAY, Pin, Pins, read_hours

NOON = 20_000 * DAY + 12 * 3600


def test_hours_may_go_over_midnight() -> None:
    """From the first minute on, until the last one is over."""
    day, night = Pin(1, hours=read_hours("08:00-18:00")), Pin(1, hours=read_hours("22:30-06:00"))
    assert (day.holds(NOON), night.holds(NOON)) == (True, False)
    assert (day.holds(NOON + 6 * 3600), night.holds(NOON + 10.5 * 3600)) == (False, True)
    assert (day.holds(NOON - 4 * 3600), night.holds(NOON - 6 * 3600)) == (True, False)


@pytest.mark.parametrize("text", ["8:00-18:00", "08:00", "24:00-01:00", "08:00-08:00", "08:60-09:00", ""])
def test_what_is_no_hours_is_refused(text: str) -> None:
    """With the form that is expected."""
    with pytest.raises(ValueError, match="08:00-18:30"):
        read_hours(text)


def test_a_pin_ends() -> None:
    """It is told once more when it is over, and then forgotten."""
    pins = Pins()
    pins.place("m", Pin(1, until=NOON + 1), 10)
    assert pins.look(NOON) == {"m": True}
    assert pins.look(NOON + 1) == {"m": False}
    assert pins.look(NOON + 2) == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9))), st.integers(0, 12))
def test_all_together_never_keep_more_than_the_quota(wishes: list[tuple[str, int]], most: int) -> None:
    """Whatever is asked for, in whatever order; who pins again is counted once."""
    pins = Pins()
    for model, nbytes in wishes:
        before = pins.all()
        refused = pins.place(model, Pin(nbytes), most)
        assert sum(pin.nbytes for pin in pins.all().values()) <= most
        if refused is not None:
            assert refused > most
            assert pins.all() == before
