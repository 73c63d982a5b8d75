"""What a fleet's minutes say of each model: so that a new worker ranks models as those do that were there.

Pure. Minutes come from many workers, about in the order of time, and may come twice after a crash: a count that is
some per cent too high ranks no model wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qworker.policy.eviction import HALF_LIFE, Usage
from qworker.policy.history import MINUTE, Minute

MOST_MODELS = 100_000
"""Rows for more of them are left out: nobody has that many, and whoever can write to the stream could fill memory."""


@dataclass(slots=True)
class _Sum:
    count: float = 0.0
    last: float = 0.0
    load_seconds: float = 0.0
    nbytes: float = 0.0


class FleetUse:
    """Adds up minutes. Times are unix seconds."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}
        self.rows = 0

    def add(self, row: Minute) -> None:
        """One model in one minute on one worker."""
        found = self._sums.get(row.model)
        if found is None:
            if len(self._sums) >= MOST_MODELS:
                return
            found = self._sums[row.model] = _Sum(last=-math.inf)
        self.rows += 1
        if row.requests:
            at = (row.minute + 0.5) * MINUTE
            apart = at - found.last
            if apart >= 0:
                found.count = found.count * 2.0 ** (-apart / HALF_LIFE) + row.requests
                found.last = at
            else:
                found.count += row.requests * 2.0 ** (apart / HALF_LIFE)
        if row.loads and row.nbytes:
            found.load_seconds, found.nbytes = row.load_seconds / row.loads, float(row.nbytes)

    def usages(self, wall: float) -> dict[str, Usage]:
        """Of the models that were called, at ``wall``. Minutes of a clock that is ahead count as of now."""
        return {
            model: Usage(each.count, max(0.0, wall - each.last), each.load_seconds, each.nbytes)
            for model, each in self._sums.items()
            if each.count > 0
        }


def merged(own: Mapping[str, Usage], fleet: Mapping[str, Usage]) -> dict[str, Usage]:
    """What the fleet knows, with this worker's own measures of cost where it has some: its disk is not another's."""
    found: dict[str, Usage] = {}
    for model, theirs in fleet.items():
        mine = own.get(model)
        if mine is None:
            found[model] = theirs
            continue
        cost = mine if mine.nbytes > 0 else theirs
        rates = mine.rates if mine.count >= theirs.count else ()
        count, age = max(mine.count, theirs.count), min(mine.age, theirs.age)
        found[model] = Usage(count, age, cost.load_seconds, cost.nbytes, rates)
    return found
