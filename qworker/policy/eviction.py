"""How dear each resident model is: the one with the lowest key leaves first.

Pure: no clock. Times are seconds on any clock that never runs backwards; every call of one object uses
the same clock. Histories cross restarts as ages, so that the clock may start anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

HALF_LIFE = 7 * 86_400.0
"""Seconds after which a use counts half. Shorter forgets weekly patterns, longer lets one burst rule."""

_MEASURED_WEIGHT = 0.3
"""Weight of a new measurement in the moving average: one slow disk must not decide alone."""

MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Usage:
    """What is worth keeping of one model over restarts."""

    count: float
    """Decayed number of uses."""
    age: float
    """Seconds since the last use."""
    load_seconds: float
    nbytes: float
    rates: tuple[float, ...] = ()
    """Counts that decay faster, for policies that keep some; in the order of their half-lives."""


class Eviction(Protocol):
    """Ranks models for eviction, from their history. Called by one owner, synchronously."""

    def used(self, model: str, now: float) -> None:
        """One request for ``model``, resident or not."""
        ...

    def cost(self, model: str, load_seconds: float, nbytes: int) -> None:
        """A load was measured."""
        ...

    def key(self, model: str, now: float) -> float:
        """Lower leaves first. Models never seen rank lowest."""
        ...

    def keys(self, models: Sequence[str], now: float) -> list[float]:
        """The keys of ``models``: one call where there are many to rank."""
        ...

    def explain(self, model: str, now: float) -> str:
        """Why ``model`` ranks where it does, for a person: uses, recency and what a reload costs."""
        ...

    def evicted(self, model: str, now: float) -> None:
        """``model`` was chosen to make room for another (not: stopped for reasons of its own)."""
        ...

    def history(self, now: float) -> dict[str, Usage]:
        """All that is known, to be stored."""
        ...

    def restore(self, history: Mapping[str, Usage], now: float) -> None:
        """Take a stored history over, in place of what was known of those models.

        Ages count up to ``now``: the caller adds the seconds that passed while it was stored.
        """
        ...


@dataclass(slots=True)
class Known:
    """What a policy holds of one model, resident or not."""

    count: float = 0.0
    last: float = 0.0
    level: float = 0.0  # Gdsf: the inflation when it was last used
    load_seconds: float = 0.0
    nbytes: float = 0.0
    price: float = 0.0
    """Load seconds that a reload costs for each MiB it holds; 0 until a load was measured."""

    def touch(self, now: float) -> None:
        # A clock that stands still is fine; one that runs back must not make counts grow.
        if now > self.last:
            self.count = self.count * 2.0 ** ((self.last - now) / HALF_LIFE) + 1.0
            self.last = now
        else:
            self.count += 1.0

    def measure(self, load_seconds: float, nbytes: int) -> None:
        if self.nbytes <= 0.0:
            self.load_seconds, self.nbytes = load_seconds, float(nbytes)
        else:
            self.load_seconds += _MEASURED_WEIGHT * (load_seconds - self.load_seconds)
            self.nbytes += _MEASURED_WEIGHT * (nbytes - self.nbytes)
        self.reprice()

    def reprice(self) -> None:
        self.price = self.load_seconds * MIB / self.nbytes if self.nbytes > 0.0 else 0.0


_NEVER_SEEN = Known()


class Remembering:
    """The memory that all policies share: uses and costs of every model ever seen, over restarts.

    A model that left keeps its row: that is where most of the gain over plain recency comes from.
    """

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}

    def used(self, model: str, now: float) -> None:
        if (known := self._known.get(model)) is None:
            known = self._known[model] = Known(last=now)
        known.touch(now)

    def cost(self, model: str, load_seconds: float, nbytes: int) -> None:
        self._known.setdefault(model, Known()).measure(load_seconds, nbytes)

    def evicted(self, model: str, now: float) -> None:  # noqa: ARG002  # most policies learn nothing from it
        return

    def explain(self, model: str, now: float) -> str:
        known = self._known.get(model)
        if known is None or known.count <= 0.0:
            return "never used"
        reload = (
            f"reload {known.load_seconds:.3g} s for {known.nbytes / MIB:.0f} MiB" if known.nbytes else "not measured"
        )
        return f"{known.count:.3g} uses of late, the last {_ago(now - known.last)} ago, {reload}"

    def history(self, now: float) -> dict[str, Usage]:
        return {
            model: Usage(known.count, max(0.0, now - known.last), known.load_seconds, known.nbytes)
            for model, known in self._known.items()
        }

    def restore(self, history: Mapping[str, Usage], now: float) -> None:
        # Levels start at 0 again for all: they compare lives of one process only.
        for model, usage in history.items():
            known = Known(usage.count, now - usage.age, 0.0, usage.load_seconds, usage.nbytes)
            known.reprice()
            self._known[model] = known


class Gdsf(Remembering):
    """GreedyDual-Size-Frequency, with a count that outlives eviction.

    On each use of m:  ``f = f * 2^((last - now) / 7 d) + 1``,  ``level = L``
    Key of m:          ``level + f * load_seconds / MiB``
    On evicting v:     ``L = max(L, key(v))``

    L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy",
    HP Laboratories, 1998. Two changes: the count is kept when the model leaves (resetting it loses
    half of the gain over LRU) and decays over a week. ``L`` rises with each eviction, so models that
    are not used sink in comparison, without any key being touched: a key changes only on use.
    Load seconds and bytes are moving averages of what was measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self._level = 0.0

    @property
    def level(self) -> float:
        """The inflation L. Never falls."""
        return self._level

    def used(self, model: str, now: float) -> None:
        if (known := self._known.get(model)) is None:
            known = self._known[model] = Known(last=now)
        known.touch(now)
        known.level = self._level

    def key(self, model: str, now: float) -> float:  # noqa: ARG002  # keys change only on use
        known = self._known.get(model, _NEVER_SEEN)
        return known.level + known.count * known.price

    def keys(self, models: Sequence[str], now: float) -> list[float]:  # noqa: ARG002
        get = self._known.get
        return [known.level + known.count * known.price for known in [get(model, _NEVER_SEEN) for model in models]]

    def evicted(self, model: str, now: float) -> None:
        self._level = max(self._level, self.key(model, now))


class Lru(Remembering):
    """Least recently used: the baseline, and a choice where all loads cost about the same."""

    def key(self, model: str, now: float) -> float:  # noqa: ARG002  # keys change only on use
        known = self._known.get(model)
        return known.last if known is not None and known.count > 0.0 else float("-inf")

    def keys(self, models: Sequence[str], now: float) -> list[float]:
        return [self.key(model, now) for model in models]


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.1f} s"
