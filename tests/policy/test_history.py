"""Histories and journals: whole ones come back, damaged ones do no harm."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.eviction import Usage
from qworker.policy.history import (
    JOURNAL_HEADER,
    CorruptHistory,
    Minute,
    Tally,
    as_trace,
    dump_history,
    journal_line,
    parse_history,
    parse_journal,
)

number = st.floats(0.0, 1e15, allow_nan=False).map(lambda x: float(f"{x:.9g}"))
usages = st.dictionaries(
    st.text("abcxyz0189._-/", min_size=1, max_size=12),
    st.builds(Usage, number, number, number, number, st.lists(number, max_size=2).map(tuple)),
    max_size=8,
)
SAMPLE = {"a": Usage(3.5, 60.0, 2.25, 1e8, (1.5, 2.5)), "b/c": Usage(1.0, 0.0, 0.0, 0.0)}


@given(usages)
def test_a_history_comes_back_whole(kept: dict[str, Usage]) -> None:
    """What was stored is what is read."""
    stored = parse_history(dump_history(kept, 1_000.5))
    assert stored.saved_at == 1_000.5
    assert stored.usages == kept


def test_ages_go_on_while_it_is_stored() -> None:
    """Time that passed on disk counts; a clock that was set back does not make anything younger."""
    stored = parse_history(dump_history(SAMPLE, 1_000.0))
    assert stored.at(1_090.0)["a"].age == 150.0
    assert stored.at(10.0)["a"].age == 60.0


def test_any_damage_is_told() -> None:
    """Cut anywhere, or with any digit changed, a history is refused and never misread."""
    text = dump_history(SAMPLE, 1_000.0)
    for end in range(len(text) - 2):
        with pytest.raises(CorruptHistory):
            parse_history(text[:end])
    begin = text.index('"models"')
    for at in range(begin, len(text) - 1):
        if text[at].isdigit():
            changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
            with pytest.raises(CorruptHistory):
                parse_history(changed)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "nonsense", "[" * 100_000, "null", '{"format":"qworker-history","version":99,"models":{}}', "{}"],
)
def test_what_is_no_history_is_refused(text: str) -> None:
    """Other files, other releases and nested nonsense get one typed error."""
    with pytest.raises(CorruptHistory):
        parse_history(text)


def test_noise_is_refused() -> None:
    """Random bytes are no history."""
    chance = random.Random(4)
    for _ in range(200):
        with pytest.raises(CorruptHistory):
            parse_history(bytes(chance.randrange(256) for _ in range(60)).decode("latin-1"))


def test_history_is_small() -> None:
    """A thousand models take less than 100 kB."""
    many = {f"model-{i:04d}": Usage(i / 7, i * 3.3, 12.345678, 1e9 / 3) for i in range(1_000)}
    assert len(dump_history(many, 1.7e9)) < 100_000


def test_a_tally_sums_up_by_minute() -> None:
    """Rows are of whole minutes that are over; the open one is kept until the end."""
    tally = Tally()
    for at in (0.0, 10.0, 59.9, 60.0):
        tally.used("a", at)
    tally.loaded("a", 2.5, 1_000, 12.0)
    tally.waited("a", 2.5, 12.5)
    assert tally.take(60.5) == [Minute(0, "a", 3, 1, 2.5, 2.5, 1_000)]
    assert tally.take(61.0) == []
    assert tally.take(61.0, all_of_it=True) == [Minute(1, "a", 1, 0, 0.0, 0.0, 0)]


def test_a_journal_survives_a_crash() -> None:
    """Lines that were cut short or damaged are skipped and counted; the rest is read."""
    good = [Minute(5, "a", 2, 1, 1.5, 3.0, 99), Minute(4, "b", 1, 0, 0.0, 0.0, 0)]
    lines = [JOURNAL_HEADER, journal_line(good[0]), "6,a,x,0,0,0,0", "7,a,1,0,inf,0,0", journal_line(good[1]), "8,a,1"]
    journal = parse_journal(lines)
    assert journal.rows == [good[1], good[0]]
    assert journal.skipped == 3


@pytest.mark.parametrize("lines", [[], [""], ["timestamp_s,model_id"]])
def test_another_file_is_no_journal(lines: list[str]) -> None:
    """A first line of another kind is refused instead of giving an empty journal."""
    with pytest.raises(CorruptHistory, match="expected a journal"):
        parse_journal(lines)


def test_a_journal_becomes_a_trace() -> None:
    """Requests are spread over their minute, in order; costs hold until a later load says otherwise."""
    rows = [
        Minute(1, "b", 1, 0, 0.0, 0.0, 0),
        Minute(0, "a", 2, 1, 3.0, 3.0, 100),
        Minute(2, "b", 1, 2, 8.0, 9.0, 50),
        Minute(2, "a", 1, 1, 5.0, 5.0, 120),
    ]
    trace = [(r.at, r.model, r.nbytes, r.load_seconds) for r in as_trace(rows)]
    assert trace == [
        (15.0, "a", 100, 3.0),
        (45.0, "a", 100, 3.0),
        (90.0, "b", 50, 4.0),
        (150.0, "a", 120, 5.0),
        (150.0, "b", 50, 4.0),
    ]
