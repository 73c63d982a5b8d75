"""Tells when a worker reloads what it has just dropped, and how hard to brake.

Pure. A load is a *reload* when its model left within ``REGRET_FACTOR`` times its own load seconds: the
memory it gave back was not worth the load that it costs now. When reloads keep the load slots busy for
more than ``TRIP_SHARE`` of a window, the brake goes on: claims that would evict are held (see
``grouping``) until reloads take no more than ``TARGET_SHARE`` of the slots' time. It comes off when the
share has fallen, after a window at least, so that it does not flap. What it costs is latency of cold jobs,
at most ``max_hold`` more for each.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

REGRET_FACTOR = 10.0
TRIP_SHARE = 0.2
TARGET_SHARE = 0.1
RELEASE_SHARE = 0.05
FEWEST_RELOADS = 4
"""Fewer reloads in a window are an accident."""


@dataclass(frozen=True, slots=True)
class Thrash:
    """The brake went on or came off: an event for the operator."""

    braking: bool
    hold: float
    """Seconds that a claim which evicts is held now."""
    models: tuple[str, ...]
    """Who was reloaded, the most often first."""
    reloads: int
    share: float
    """Share of the load slots' time that went into reloads."""
    working_set: int
    """Bytes of the models asked for within the window."""
    budget: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Load:
    at: float
    model: str
    seconds: float


class ThrashDetector:
    """Watches the loads of one worker. Called by the owner of its residency, synchronously."""

    def __init__(self, budget: int, *, slots: int, window: float = 300.0, max_hold: float = 30.0) -> None:
        self._budget = budget
        self._slots = slots
        self._window = window
        self._max_hold = max_hold
        self._used: dict[str, float] = {}  # last use; of those asked for within a window
        self._bytes: dict[str, int] = {}
        self._left: dict[str, float] = {}
        self._reloads: deque[_Load] = deque()
        self._reload_seconds = 0.0
        self._hold = 0.0
        self._since = 0.0  # when the brake last changed

    @property
    def hold(self) -> float:
        """Seconds that a claim which evicts is to be held; 0 while all is well."""
        return self._hold

    def used(self, model: str, now: float) -> None:
        """One request for ``model``."""
        self._used[model] = now

    def evicted(self, model: str, now: float) -> None:
        """``model`` left to make room for another."""
        self._left[model] = now

    def loaded(self, model: str, load_seconds: float, nbytes: int, now: float) -> Thrash | None:
        """A load ended that took ``load_seconds``; a Thrash when the brake changes with it."""
        self._bytes[model] = nbytes
        left = self._left.pop(model, None)
        # While the brake is on, what it delays still counts: else it would lift itself, and all begin anew.
        if left is not None and now - load_seconds - left <= REGRET_FACTOR * load_seconds + self._hold:
            self._reloads.append(_Load(now, model, load_seconds))
            self._reload_seconds += load_seconds
        return self.tick(now)

    def tick(self, now: float) -> Thrash | None:
        """Time passed. Call it now and then, so that the brake comes off when nothing loads any more."""
        while self._reloads and self._reloads[0].at <= now - self._window:
            self._reload_seconds -= self._reloads.popleft().seconds
        share = self._reload_seconds / (self._window * self._slots)
        if self._hold <= 0.0 and len(self._reloads) >= FEWEST_RELOADS and share > TRIP_SHARE:
            return self._brake(share, now)
        if self._hold > 0.0 and now >= self._since + self._window and share < RELEASE_SHARE:
            self._hold, self._since = 0.0, now
            return self._event(share, now, "reloads have become rare: claims evict at once again")
        return None

    def _brake(self, share: float, now: float) -> Thrash:
        # Each of the models that push each other out loads once a hold at most: so many seconds of
        # loading within the hold must be no more than the target share of the slots' time.
        one_each = sum({load.model: load.seconds for load in self._reloads}.values())
        self._hold = min(self._max_hold, one_each / (TARGET_SHARE * self._slots))
        self._since = now
        models = len({load.model for load in self._reloads})
        return self._event(
            share,
            now,
            f"{models} models push each other out: {len(self._reloads)} loads within {self._window:.0f} s of models "
            f"that had just left, {share:.0%} of the load slots' time; claims that evict now wait {self._hold:.1f} s",
        )

    def _event(self, share: float, now: float, why: str) -> Thrash:
        self._used = {model: at for model, at in self._used.items() if at > now - self._window}
        working_set = sum(self._bytes.get(model, 0) for model in self._used)
        often = Counter(load.model for load in self._reloads)
        models = tuple(model for model, _ in sorted(often.items(), key=lambda pair: (-pair[1], pair[0])))
        reason = f"{why}; asked for lately {_mib(working_set)}, budget {_mib(self._budget)}"
        if self._hold > 0.0 and working_set > self._budget:
            reason += f": a budget of {_mib(working_set)} would end it"
        return Thrash(
            self._hold > 0.0, self._hold, models, len(self._reloads), share, working_set, self._budget, reason
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"
