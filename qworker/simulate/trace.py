"""Traces: who asked for which model when, and what each model weighs and costs to load."""

from __future__ import annotations

import csv
import gzip
import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, isfinite, log
from pathlib import Path
from typing import ClassVar, TextIO

from qworker.errors import QworkerError

TIME, MODEL, BYTES, LOAD, RUN = "timestamp_s", "model_id", "size_bytes", "load_seconds", "run_seconds"

# What public reports say of real loads: a tenth take less than 2.6 s, a tenth more than 42 s.
_LOAD_MEDIAN, _LOAD_SPREAD = 10.4, 1.09
_BYTES_MEDIAN, _BYTES_SPREAD = 4.0 * (1 << 30), 0.8


class BadTrace(QworkerError):
    """A trace or a table of sizes that cannot be read; the message says where."""

    code: ClassVar[str] = "bad_trace"


@dataclass(frozen=True, slots=True)
class Cost:
    """What one model takes."""

    nbytes: int
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of time. ``models[which[i]]`` was asked for at ``times[i]``."""

    times: Sequence[float]
    which: Sequence[int]
    models: tuple[str, ...]
    costs: Mapping[str, Cost]
    run_seconds: Sequence[float] | None = None
    """How long each request keeps its model busy; None: no time worth counting."""
    drawn: tuple[str, ...] = ()
    """Models whose size or load time was not given and had to be drawn."""
    skipped: int = 0
    """Rows without a model id."""

    @property
    def total_bytes(self) -> int:
        """All models together."""
        return sum(self.costs[model].nbytes for model in self.models)

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0


def make_trace(
    requests: Iterable[tuple[float, str]],
    costs: Mapping[str, Cost] | None = None,
    *,
    run_seconds: float = 0.0,
    seed: int = 0,
) -> Trace:
    """A trace of ``(time, model)`` pairs in any order; costs that are not given are drawn."""
    ordered = sorted(requests, key=lambda request: request[0])
    index: dict[str, int] = {}
    which = array("l", (index.setdefault(model, len(index)) for _, model in ordered))
    known, drawn = complete_costs(index, costs or {}, seed=seed)
    times = array("d", (at for at, _ in ordered))
    runs = array("d", [run_seconds]) * len(times) if run_seconds > 0.0 else None
    return Trace(times, which, tuple(index), known, runs, drawn)


def read_trace(path: Path, *, sizes: Path | None = None, seed: int = 0) -> Trace:
    """The trace in a CSV file (``.gz`` too): ``timestamp_s,model_id[,size_bytes,load_seconds,run_seconds]``.

    Other columns are left alone, rows may come in any order. Costs come from ``sizes``
    (``model_id,size_bytes,load_seconds``), else from the last row of the model that has them, else they are
    drawn from ``seed``. Raises BadTrace.
    """
    given = read_costs(sizes) if sizes is not None else {}
    times, which, runs = array("d"), array("l"), array("d")
    index: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    seconds: dict[str, float] = {}
    skipped = 0
    with _opened(path) as file:
        reader = csv.reader(file)
        columns = _columns(path, reader, (TIME, MODEL))
        at, name = columns[TIME], columns[MODEL]
        size_at, load_at, run_at = columns.get(BYTES), columns.get(LOAD), columns.get(RUN)
        try:
            for cells in reader:
                if not cells:
                    continue
                model = cells[name]
                if not model:  # real records have such: jobs that ended before they had a model
                    skipped += 1
                    continue
                times.append(float(cells[at]))
                which.append(index.setdefault(model, len(index)))
                if size_at is not None and cells[size_at]:
                    nbytes[model] = int(float(cells[size_at]))
                if load_at is not None and cells[load_at]:
                    seconds[model] = float(cells[load_at])
                if run_at is not None:
                    runs.append(float(cells[run_at] or 0.0))
        except (ValueError, IndexError, OverflowError, csv.Error) as error:
            raise BadTrace(
                f"{path}, line {reader.line_num}: expected numbers in the columns named {_NAMES}: {error}"
            ) from error
        except (OSError, EOFError) as error:
            raise BadTrace(f"{path} cannot be read to its end: {error}") from error
    _check(path, times, runs)
    found: dict[str, Cost | tuple[int | None, float | None]] = {m: (nbytes.get(m), seconds.get(m)) for m in index}
    costs, drawn = complete_costs(index, {**found, **given}, seed=seed)
    return _sorted(Trace(times, which, tuple(index), costs, runs if any(runs) else None, drawn, skipped))


_NAMES = f"{TIME}, {BYTES}, {LOAD} and {RUN}"


def read_costs(path: Path) -> dict[str, Cost]:
    """The table ``model_id,size_bytes,load_seconds`` in a CSV file. Raises BadTrace."""
    costs: dict[str, Cost] = {}
    with _opened(path) as file:
        reader = csv.reader(file)
        columns = _columns(path, reader, (MODEL, BYTES, LOAD))
        for cells in reader:
            if not cells:
                continue
            try:
                cost = Cost(int(float(cells[columns[BYTES]])), float(cells[columns[LOAD]]))
            except (ValueError, IndexError, OverflowError) as error:
                raise BadTrace(f"{path}, line {reader.line_num}: expected a size and load seconds: {error}") from error
            costs[cells[columns[MODEL]]] = _sound(cost, f"{path}, line {reader.line_num}")
    return costs


def complete_costs(
    models: Iterable[str], given: Mapping[str, Cost | tuple[int | None, float | None]], *, seed: int
) -> tuple[dict[str, Cost], tuple[str, ...]]:
    """A cost for each model, and the names of those for which some of it was drawn.

    A draw depends on the model's name and the seed alone, so that adding a model changes no other.
    """
    costs: dict[str, Cost] = {}
    drawn: list[str] = []
    for model in models:
        known = given.get(model)
        if isinstance(known, Cost):
            costs[model] = _sound(known, model)
            continue
        nbytes, seconds = known if known is not None else (None, None)
        if nbytes is None or seconds is None:
            drawn.append(model)
        fallback = draw_cost(model, seed)
        cost = Cost(
            fallback.nbytes if nbytes is None else nbytes, fallback.load_seconds if seconds is None else seconds
        )
        costs[model] = _sound(cost, model)
    return costs, tuple(drawn)


def draw_cost(model: str, seed: int) -> Cost:
    """A size and load seconds as real models have them: log-normal, spread over more than a decade."""
    digest = hashlib.blake2b(f"{seed}:{model}".encode(), digest_size=8).digest()
    chance = random.Random(int.from_bytes(digest, "little"))  # noqa: S311  # no secret
    nbytes = exp(chance.gauss(log(_BYTES_MEDIAN), _BYTES_SPREAD))
    return Cost(int(nbytes), exp(chance.gauss(log(_LOAD_MEDIAN), _LOAD_SPREAD)))


def _opened(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", newline="")
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise BadTrace(f"{path} cannot be opened: {error.strerror or error}") from error


def _columns(path: Path, rows: Iterator[list[str]], needed: tuple[str, ...]) -> dict[str, int]:
    empty: list[str] = []
    header = next(rows, empty)
    columns = {name.strip().lstrip("\ufeff"): i for i, name in enumerate(header)}
    missing = [name for name in needed if name not in columns]
    if missing:
        raise BadTrace(
            f"{path}: expected a first line that names {', '.join(needed)}, found {','.join(header)[:200]!r}; "
            f"missing: {', '.join(missing)}"
        )
    return columns


def _check(path: Path, times: Sequence[float], runs: Sequence[float]) -> None:
    if not times:
        raise BadTrace(f"{path}: expected at least one request, found none")
    if not all(map(isfinite, times)):
        raise BadTrace(f"{path}: expected times in seconds, found one that is not finite")
    if any(not isfinite(run) or run < 0.0 for run in runs):
        raise BadTrace(f"{path}: expected {RUN} >= 0, found one that is not")


def _sound(cost: Cost, where: str) -> Cost:
    if cost.nbytes <= 0 or not isfinite(cost.load_seconds) or cost.load_seconds < 0.0:
        raise BadTrace(f"{where}: expected a size > 0 and load seconds >= 0, found {cost.nbytes}, {cost.load_seconds}")
    return cost


def _sorted(trace: Trace) -> Trace:
    times, which, runs = trace.times, trace.which, trace.run_seconds
    if all(a <= b for a, b in pairwise(times)):
        return trace
    order = sorted(range(len(times)), key=times.__getitem__)
    return Trace(
        array("d", (times[i] for i in order)),
        array("l", (which[i] for i in order)),
        trace.models,
        trace.costs,
        array("d", (runs[i] for i in order)) if runs is not None else None,
        trace.drawn,
        trace.skipped,
    )
