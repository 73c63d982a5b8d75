"""What a worker remembers over restarts, and the journal from which a trace of its own traffic is made.

Pure: text in, text out; the owner writes files (aside, then renamed) and knows the wall clock. Two forms:

- the **history**: one row a model (uses, ages, costs), so that a policy starts where it left off. A file
  that is damaged raises :class:`CorruptHistory`; the owner warns and starts afresh, for a worker without
  memory is slow for an hour and a worker that does not start is down.
- the **journal**: one row a model and minute, appended. Enough to replay, to forecast and to sum up a
  fleet; a thousandth of a log of single requests. A row that is damaged is skipped and counted: the last
  one is cut short after each crash.
"""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from math import isfinite
from typing import Any, ClassVar, cast

from qworker.errors import QworkerError
from qworker.policy.eviction import Usage

FORMAT, VERSION = "qworker-history", 1
MINUTE = 60.0


class CorruptHistory(QworkerError):
    """A history that cannot be read. Start without one: it only costs loads."""

    code: ClassVar[str] = "corrupt_history"


# --- history ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """Usages as they were at ``saved_at`` (wall clock, unix seconds)."""

    saved_at: float
    usages: Mapping[str, Usage]

    def at(self, wall: float) -> dict[str, Usage]:
        """The usages with their ages brought up to ``wall``. A clock that was set back adds nothing."""
        passed = max(0.0, wall - self.saved_at)
        return {
            model: Usage(u.count, u.age + passed, u.load_seconds, u.nbytes, u.rates) for model, u in self.usages.items()
        }


def dump_history(usages: Mapping[str, Usage], saved_at: float) -> str:
    """The text of a history file: JSON, with a checksum over the rows."""
    rows = {
        model: [_short(u.count), _short(u.age), _short(u.load_seconds), _short(u.nbytes), *map(_short, u.rates)]
        for model, u in sorted(usages.items())
    }
    body = _canonical(rows)
    head = f'{{"format":"{FORMAT}","version":{VERSION},"saved_at":{saved_at!r},"crc32":{zlib.crc32(body.encode())}'
    return f'{head},"models":{body}}}\n'


def parse_history(text: str) -> StoredHistory:
    """The history in ``text``. Raises CorruptHistory for anything but a whole one of a known version."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptHistory(f"expected a history file in JSON, found {len(text)} characters that are none") from error
    if not isinstance(found, dict):
        raise CorruptHistory(f"expected a JSON object, found {type(found).__name__}")
    head = cast("dict[str, Any]", found)
    if head.get("format") != FORMAT or head.get("version") != VERSION:
        was = f"{head.get('format')!r} version {head.get('version')!r}"
        raise CorruptHistory(f"expected {FORMAT!r} version {VERSION}, found {was}: another release wrote it")
    saved_at, rows = head.get("saved_at"), head.get("models")
    if not isinstance(saved_at, int | float) or not isfinite(saved_at) or not isinstance(rows, dict):
        raise CorruptHistory("expected saved_at and models, found a history without one of them")
    table = cast("dict[str, Any]", rows)
    if zlib.crc32(_canonical(table).encode()) != head.get("crc32"):
        raise CorruptHistory("expected rows that match their checksum, found others: the file was damaged or edited")
    return StoredHistory(float(saved_at), {model: _usage(model, row) for model, row in table.items()})


def _usage(model: str, row: Any) -> Usage:
    numbers = cast("list[Any]", row) if isinstance(row, list) else []
    if len(numbers) < 4 or not all(_is_number(n) and n >= 0 for n in numbers):
        raise CorruptHistory(f"expected four or more numbers >= 0 for {model!r}, found {row!r}")
    count, age, load_seconds, nbytes, *rates = (float(n) for n in numbers)
    return Usage(count, age, load_seconds, nbytes, tuple(rates))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _short(value: float) -> float:
    return float(f"{value:.9g}")


def _canonical(rows: Mapping[str, Any]) -> str:
    return json.dumps(rows, sort_keys=True, separators=(",", ":"))


# --- journal ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Minute:
    """One model in one minute. ``minute``: unix seconds / 60, whole."""

    minute: int
    model: str
    requests: int
    loads: int
    load_seconds: float
    """Of all loads in that minute."""
    wait_seconds: float
    """Of all requests that had to wait for a load, together."""
    nbytes: int
    """As last measured; 0 when it was not loaded in that minute."""


JOURNAL_HEADER = ",".join(field.name for field in fields(Minute))


def journal_line(row: Minute) -> str:
    """One line of a journal file, without its end. Model ids hold no commas and no quotes."""
    return ",".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in astuple(row))


@dataclass(slots=True)
class Journal:
    """What a journal file held."""

    rows: list[Minute]
    skipped: int
    """Lines that could not be read."""


def parse_journal(lines: Iterable[str]) -> Journal:
    """All rows that can be read, in the order of time. Raises CorruptHistory for a file of another kind."""
    reader = csv.reader(lines)
    empty: list[str] = []
    first = next(reader, empty)
    if ",".join(first) != JOURNAL_HEADER:
        raise CorruptHistory(f"expected a journal that begins with {JOURNAL_HEADER!r}, found another first line")
    journal = Journal([], 0)
    for cells in reader:
        try:
            minute, model, requests, loads, load_seconds, wait_seconds, nbytes = cells
            row = Minute(
                int(minute), model, int(requests), int(loads), float(load_seconds), float(wait_seconds), int(nbytes)
            )
        except ValueError:
            journal.skipped += 1
            continue
        sound = row.requests >= 0 and row.loads >= 0 and isfinite(row.load_seconds) and isfinite(row.wait_seconds)
        if sound and row.model and row.nbytes >= 0:
            journal.rows.append(row)
        else:
            journal.skipped += 1
    journal.rows.sort(key=lambda row: row.minute)
    return journal


class Tally:
    """Sums up what happens into rows of a journal. ``wall`` is unix seconds."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], list[float]] = {}  # requests, loads, load s, wait s, bytes

    def used(self, model: str, wall: float) -> None:
        """A request arrived."""
        self._sums(model, wall)[0] += 1

    def used_often(self, model: str, requests: int, wall: float) -> None:
        """So many requests arrived."""
        self._sums(model, wall)[0] += requests

    def loaded(self, model: str, load_seconds: float, nbytes: int, wall: float) -> None:
        sums = self._sums(model, wall)
        sums[1] += 1
        sums[2] += load_seconds
        sums[4] = nbytes

    def waited(self, model: str, seconds: float, wall: float) -> None:
        """A request had to wait for a load."""
        self._sums(model, wall)[3] += seconds

    def take(self, wall: float, *, all_of_it: bool = False) -> list[Minute]:
        """The rows of the minutes that are over at ``wall`` (of the open one too, at a stop)."""
        current = int(wall // MINUTE)
        over = sorted(at for at in self._open if all_of_it or at[0] < current)
        return [_row(at, self._open.pop(at)) for at in over]

    def _sums(self, model: str, wall: float) -> list[float]:
        return self._open.setdefault((int(wall // MINUTE), model), [0, 0, 0.0, 0.0, 0])


def _row(at: tuple[int, str], sums: list[float]) -> Minute:
    requests, loads, load_seconds, wait_seconds, nbytes = sums
    return Minute(at[0], at[1], int(requests), int(loads), load_seconds, wait_seconds, int(nbytes))


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    at: float
    model: str
    nbytes: int
    load_seconds: float


def as_trace(rows: Iterable[Minute]) -> Iterator[Request]:
    """The requests of a journal, in the order of time, spread evenly over their minutes.

    Sizes and load seconds are those of the model's last load before, or of its first one after.
    """
    ordered = sorted(rows, key=lambda row: (row.minute, row.model))
    costs: dict[str, tuple[int, float]] = {}
    for row in reversed(ordered):
        if row.loads and row.nbytes:
            costs[row.model] = (row.nbytes, row.load_seconds / row.loads)
    by_minute: dict[int, list[Minute]] = {}
    for row in ordered:
        by_minute.setdefault(row.minute, []).append(row)
    for minute, together in by_minute.items():
        requests: list[Request] = []
        for row in together:
            if row.loads and row.nbytes:
                costs[row.model] = (row.nbytes, row.load_seconds / row.loads)
            nbytes, seconds = costs.get(row.model, (0, 0.0))
            step = MINUTE / max(1, row.requests)
            requests += (
                Request(minute * MINUTE + (i + 0.5) * step, row.model, nbytes, seconds) for i in range(row.requests)
            )
        yield from sorted(requests, key=lambda request: request.at)
