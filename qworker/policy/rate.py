"""``rate``: what is asked for most often of late stays, by what a reload costs for its bytes.

Pure. Key of m: ``(uses of the last hours / 1 h + uses of the last days / 24 h) * load_seconds / MiB``, each
use fading with its half-life.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qworker.policy.eviction import HALF_LIFE, Remembering, Usage

HALF_LIVES = (3_600.0, 86_400.0)
"""Two, because one fails: a short one forgets the model of every morning, a long one keeps the model of
one burst for days."""


class Rate(Remembering):
    """Rates of two half-lives, added. Unlike ``gdsf`` its keys fall with time, so a burst is forgotten."""

    def __init__(self, half_lives: Sequence[float] = HALF_LIVES) -> None:
        super().__init__()
        self._half_lives = tuple(half_lives)
        self._rates: dict[str, list[float]] = {}  # as of the last use

    def used(self, model: str, now: float) -> None:
        known, rates = self._known.get(model), self._rates.get(model)
        if known is None or rates is None:
            self._rates[model] = [1.0] * len(self._half_lives)
        else:
            for i, faded in enumerate(self._faded(known.last, now)):
                rates[i] = rates[i] * faded + 1.0
        super().used(model, now)

    def key(self, model: str, now: float) -> float:
        known, rates = self._known.get(model), self._rates.get(model)
        if known is None or rates is None:
            return 0.0
        faded = self._faded(known.last, now)
        per_second = sum(rate * f / life for rate, f, life in zip(rates, faded, self._half_lives, strict=True))
        return per_second * known.price

    def history(self, now: float) -> dict[str, Usage]:
        kept: dict[str, Usage] = {}
        for model, usage in super().history(now).items():
            rates = tuple(self._rates.get(model, ()))
            kept[model] = Usage(usage.count, usage.age, usage.load_seconds, usage.nbytes, rates)
        return kept

    def restore(self, history: Mapping[str, Usage], now: float) -> None:
        super().restore(history, now)
        for model, usage in history.items():
            if len(usage.rates) == len(self._half_lives):
                self._rates[model] = list(usage.rates)
            else:  # kept by another policy: spread its count evenly over the week that it counts
                self._rates[model] = [usage.count * life / HALF_LIFE for life in self._half_lives]

    def _faded(self, last: float, now: float) -> list[float]:
        return [2.0 ** (min(0.0, last - now) / life) for life in self._half_lives]
