"""``rate``: what is asked for most often of late stays, by what a reload costs for its bytes.

Pure. Key of m: ``(uses of the last hours / 1 h + uses of the last days / 24 h) * load_seconds / MiB``, each
use fading with its half-life.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qworker.policy.eviction import HALF_LIFE, Remembering, Usage

SHORT, LONG = 3_600.0, 86_400.0
"""Half-lives in seconds. Two, because one fails: a short one forgets the model of every morning, a long one
keeps the model of one burst for days."""


@dataclass(slots=True)
class _Rates:
    short: float  # faded counts as of the last use
    long: float


class Rate(Remembering):
    """Rates of two half-lives, added. Unlike ``gdsf`` its keys fall with time, so a burst is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self._rates: dict[str, _Rates] = {}

    def used(self, model: str, now: float) -> None:
        known, rates = self._known.get(model), self._rates.get(model)
        if known is None or rates is None:
            self._rates[model] = _Rates(1.0, 1.0)
        else:
            age = min(0.0, known.last - now)
            rates.short = rates.short * 2.0 ** (age / SHORT) + 1.0
            rates.long = rates.long * 2.0 ** (age / LONG) + 1.0
        super().used(model, now)

    def key(self, model: str, now: float) -> float:
        return self.keys((model,), now)[0]

    def keys(self, models: Sequence[str], now: float) -> list[float]:
        found: list[float] = []
        for model in models:
            known, rates = self._known.get(model), self._rates.get(model)
            if known is None or rates is None:
                found.append(0.0)
                continue
            age = known.last - now
            short, long = rates.short * 2.0 ** (age / SHORT), rates.long * 2.0 ** (age / LONG)
            found.append((short / SHORT + long / LONG) * known.price)
        return found

    def history(self, now: float) -> dict[str, Usage]:
        kept = super().history(now)
        for model, rates in self._rates.items():
            kept[model] = replace(kept[model], rates=(rates.short, rates.long))
        return kept

    def restore(self, history: Mapping[str, Usage], now: float) -> None:
        super().restore(history, now)
        for model, usage in history.items():
            if len(usage.rates) == 2:
                self._rates[model] = _Rates(*usage.rates)
            else:  # kept by another policy: spread its count evenly over the week that it counts
                self._rates[model] = _Rates(usage.count * SHORT / HALF_LIFE, usage.count * LONG / HALF_LIFE)
