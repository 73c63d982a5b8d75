"""What could be had by knowing the future: two offline policies, run like any other.

They are feasible, not proofs of a bound: with sizes and costs the best schedule is hard to find. The
better of the two is what ``regret`` is measured against.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import inf

from qworker.policy.eviction import Eviction, Usage
from qworker.simulate.replay import arrivals
from qworker.simulate.trace import Cost, Trace

_SOON = 1e-3
"""Seconds. Two uses at one instant are no infinite gain."""


class Clairvoyant:
    """Evicts what is used again last (L. A. Belady, 1966), or what saves the fewest load seconds for its bytes
    and the time until then."""

    def __init__(self, uses: Mapping[str, Sequence[float]], costs: Mapping[str, Cost], *, weighted: bool) -> None:
        self._uses = uses
        self._costs = costs
        self._weighted = weighted

    def used(self, model: str, now: float) -> None:
        """It knows."""

    def cost(self, model: str, load_seconds: float, nbytes: int) -> None:
        """It knows."""

    def key(self, model: str, now: float) -> float:
        until = max(_SOON, self._next_use(model, now) - now)
        if not self._weighted:
            return -until
        cost = self._costs[model]
        return cost.load_seconds / cost.nbytes / until

    def keys(self, models: Sequence[str], now: float) -> list[float]:
        return [self.key(model, now) for model in models]

    def explain(self, model: str, now: float) -> str:
        at = self._next_use(model, now)
        return f"next used in {at - now:.1f} s" if at < inf else "never used again"

    def evicted(self, model: str, now: float) -> None:
        """Nothing to learn."""

    def history(self, now: float) -> dict[str, Usage]:  # noqa: ARG002
        return {}

    def restore(self, history: Mapping[str, Usage], now: float) -> None:
        """The future needs no history."""

    def _next_use(self, model: str, now: float) -> float:
        uses = self._uses[model]
        at = bisect_right(uses, now)
        return uses[at] if at < len(uses) else inf


BOUNDS = ("clairvoyant", "belady")


def make_bound(name: str, trace: Trace) -> Callable[[], Eviction]:
    """The offline policy ``name`` for a trace."""
    uses = dict(zip(trace.models, arrivals(trace), strict=True))
    return lambda: Clairvoyant(uses, trace.costs, weighted=name == "clairvoyant")
