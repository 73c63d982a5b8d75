"""Whether preloading would have paid, on the history that was recorded.

Pure. The requests are replayed hour by hour through the same residency and eviction code, once without
preloads and once for each way of preloading, with a forecast that knows only what came before. A preload
that is asked for saves its load seconds from a request's wait; one that is not asked for before it leaves
wasted them. Preloading may act only where what it saves less what it wastes is worth it *in both halves*
of the history: a gain that shows in one half only is chance. On daily habits alone it mostly is not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from qworker.policy.eviction import Eviction, Gdsf
from qworker.policy.forecast import HOUR, Fates, Forecast, Tier
from qworker.policy.residency import Residency, State

MARGINS = (1.5, 3.0)
"""How much more than its victims a preload must be worth, where it may evict."""
FREE_MARGINS = (1.5, 4.0, 19.0)
"""How much more a preload into free bytes must be expected to save than to waste: likely by 60, 80 or 95 %."""
LEAST_PROBABILITY = 0.6
LEAST_GAIN = 0.05
"""Share of the load seconds without preloads that must be gained in each half."""
FEWEST_DAYS = 4.0
_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Tried:
    """One way of preloading on the recorded history."""

    tier: Tier
    margin: float
    preloads: int
    used: int
    gain: tuple[float, float]
    """Load seconds saved less wasted, as a share of those without preloads, by half of the history."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What preloading may do."""

    tier: Tier
    margin: float
    why: str
    tried: tuple[Tried, ...] = ()

    @property
    def least_probability(self) -> float:
        """How likely a model must be for a preload."""
        return _least_probability(self.tier, self.margin)


def backtest(
    requests: Sequence[tuple[float, str]],
    costs: Mapping[str, tuple[int, float]],
    budget: int,
    make_eviction: Callable[[], Eviction] = Gdsf,
    *,
    allowed: Container[Tier] = ("free", "evict"),
) -> Verdict:
    """The way of preloading that paid on ``requests``, which are ``(unix seconds, model)`` in order.

    ``costs``: bytes and load seconds by model. All ways are tried and told of; one that is ``allowed`` can act.
    """
    days = (requests[-1][0] - requests[0][0]) / _DAY if requests else 0.0
    if days < FEWEST_DAYS:
        return Verdict("off", 0.0, f"{days:.1f} days of history: at least {FEWEST_DAYS:g} are needed to judge")
    half = (requests[0][0] + requests[-1][0]) / 2.0
    base = _Shelf(costs, budget, make_eviction, half).run(requests, "off", 0.0)
    free: list[tuple[Tier, float]] = [("free", margin) for margin in FREE_MARGINS]
    ways: list[tuple[Tier, float]] = [*free, *(("evict", margin) for margin in MARGINS)]
    tried = tuple(_tried(base, requests, costs, budget, make_eviction, half, way) for way in ways)
    best = max((t for t in tried if t.tier in allowed), key=lambda t: min(t.gain))
    told = "; ".join(f"{t.tier} x{t.margin:g}: {_told(t)}" for t in tried)
    if min(best.gain) < LEAST_GAIN:
        return Verdict("off", 0.0, f"no preload would have paid in {days:.0f} days ({told})", tried)
    return Verdict(best.tier, best.margin, f"it would have paid in {days:.0f} days ({told})", tried)


def _tried(
    base: _Shelf,
    requests: Sequence[tuple[float, str]],
    costs: Mapping[str, tuple[int, float]],
    budget: int,
    make_eviction: Callable[[], Eviction],
    half: float,
    way: tuple[Tier, float],
) -> Tried:
    tier, margin = way
    with_it = _Shelf(costs, budget, make_eviction, half).run(requests, tier, margin)
    gain = [
        (without - waited - wasted) / without if without > 0.0 else 0.0
        for without, waited, wasted in zip(base.waited, with_it.waited, with_it.wasted, strict=True)
    ]
    return Tried(tier, margin, with_it.fates.made, with_it.fates.used, (gain[0], gain[1]))


def _least_probability(tier: Tier, margin: float) -> float:
    """Into free bytes, a preload saves with p and wastes with 1 - p: p / (1 - p) is to be ``margin`` at least."""
    return margin / (1.0 + margin) if tier == "free" else LEAST_PROBABILITY


def _told(tried: Tried) -> str:
    used = f"{tried.used} of {tried.preloads} used" if tried.preloads else "none made"
    return f"{tried.gain[0]:+.1%} and {tried.gain[1]:+.1%} of load seconds by half, {used}"


class _Shelf:
    """A hot zone in which loads take no time. What a load costs is counted, by half of the history."""

    def __init__(
        self,
        costs: Mapping[str, tuple[int, float]],
        budget: int,
        make_eviction: Callable[[], Eviction],
        half: float,
    ) -> None:
        self._costs = costs
        self._residency = Residency(budget, make_eviction(), min_residency=0.0, max_cold_wait=0.0)
        self._half = half
        self._resident: set[str] = set()
        self.fates = Fates()
        self._worth: dict[str, float] = {}  # load seconds that each model is expected to save, this hour
        self._wanted: dict[str, str] = {}  # preloads of this hour that were not made yet, each with its why
        self.waited = [0.0, 0.0]
        self.wasted = [0.0, 0.0]

    def run(self, requests: Sequence[tuple[float, str]], tier: Tier, margin: float) -> _Shelf:
        forecast = Forecast()
        hour = int(requests[0][0] // HOUR)
        for now, model in requests:
            while tier != "off" and hour < int(now // HOUR):
                hour += 1
                self._plan(forecast, _least_probability(tier, margin), hour * HOUR)
                self._preload(tier, margin, hour * HOUR)
            if model not in self._resident and self._load(model, now):
                self.waited[now >= self._half] += self._costs[model][1]
                if self._wanted:  # it may have pushed out more than it takes
                    self._preload("free", margin, now)
            self.fates.asked(model)
            self._residency.used(model, now)
            forecast.observe(model, now)
        return self

    def _plan(self, forecast: Forecast, least_probability: float, now: float) -> None:
        """What this hour's preloads are to be, each once."""
        self._worth.clear()
        self._wanted.clear()
        whys: dict[str, str] = {}
        for model in forecast.models():
            expected = forecast.expect(model, now)
            self._worth[model] = expected.probability * self._costs[model][1]
            if expected.probability >= least_probability and model not in self._resident:
                whys[model] = expected.why
        for model in sorted(whys, key=lambda m: (-self._worth[m] / self._costs[m][0], m)):
            self._wanted[model] = whys[model]

    def _preload(self, tier: Tier, margin: float, now: float) -> None:
        worth = self._worth
        for model in list(self._wanted):
            victims = [] if model in self._resident else self._victims(model, worth, now)
            if victims is None or (victims and tier == "free"):
                continue
            if margin * sum(worth.get(victim, 0.0) for victim in victims) > worth[model]:
                continue
            why = self._wanted.pop(model)
            if model in self._resident:
                continue
            for victim in victims:
                self._residency.leaving(victim, now)
                self._drop(victim, now)
            if self._load(model, now):
                self.fates.preloaded(model, why)

    def _victims(self, model: str, worth: Mapping[str, float], now: float) -> list[str] | None:
        """Who would have to go, the least likely first; None when nothing is enough."""
        short = self._costs[model][0] - self._residency.free
        rows = [row for row in self._residency.snapshot(now) if row.state is State.HOT]
        chosen: list[str] = []
        for row in sorted(rows, key=lambda row: (worth.get(row.model, 0.0) / max(1, row.nbytes), row.key)):
            if short <= 0:
                break
            if row.model not in self.fates.open:  # preloads do not push each other out
                chosen.append(row.model)
                short -= row.nbytes
        return None if short > 0 else chosen

    def _load(self, model: str, now: float) -> bool:
        nbytes, seconds = self._costs[model]
        decision = self._residency.want(model, nbytes, now)
        if decision.refuse:
            return False
        for evict in decision.evict:
            self._drop(evict.model, now)
        self._residency.loaded(model, seconds, now)
        self._resident.add(model)
        return True

    def _drop(self, model: str, now: float) -> None:
        if model in self.fates.open:
            self.wasted[now >= self._half] += self._costs[model][1]
        self.fates.left(model)
        self._resident.discard(model)
        self._residency.gone(model, now)
