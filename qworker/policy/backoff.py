"""When a model that would not load may be tried again, and when its jobs are told so.

Kept by digest: new bytes under an old name start afresh. Pure: times are seconds on one clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FIRST_WAIT = 1.0
LONGEST_WAIT = 300.0
KILLS_BEFORE_WAITS = 2
FIRST_AFTER_KILLS, FIRST_WHEN_REFUSED = 1.0, 30.0
LONGEST_AFTER_KILLS = 3600.0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """What is known of a digest that failed to load."""

    attempts: int
    retry_at: float
    refusing: bool
    """Jobs get a failure until a load goes well."""
    reason: str


@dataclass(frozen=True, slots=True)
class PutOff:
    """Bytes are not loaded for so long; ``refusing``: their jobs get a failure meanwhile, else they wait."""

    seconds: float
    refusing: bool


class LoadHistory:
    """Failed loads by digest: attempts, growing waits, and the last reason.

    A claim asks in this order: ``may_try`` → load; else ``refused`` → answer the jobs with a typed
    failure; else leave them waiting. Every failure is tried again for ever, at ever longer intervals: a
    store that was away for an hour heals by itself, and so does a file that somebody repairs. What differs
    is the jobs: they wait while a failure may pass by itself and attempts are left, and are answered at
    once when the bytes themselves are at fault.
    """

    def __init__(self, max_attempts: int = 3) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, found {max_attempts}")
        self._max_attempts = max_attempts
        self._failed: dict[str, Quarantine] = {}
        self._in_a_row, self._last = 0, 0.0  # failures since the last load that went well, and when the last one was
        self._held: dict[str, tuple[float, str]] = {}  # by order: until when, and what jobs are told

    def failed(self, digest: str, now: float, *, refuse: bool, reason: str = "") -> Quarantine:
        """A load of ``digest`` failed; ``refuse`` when the bytes are at fault, so that waiting is no use."""
        before = self._failed.get(digest)
        attempts = (before.attempts if before else 0) + 1
        refusing = refuse or attempts >= self._max_attempts or (before is not None and before.refusing)
        quarantine = Quarantine(attempts, now + wait_after(attempts), refusing, reason)
        self._failed[digest] = quarantine
        self._in_a_row, self._last = self._in_a_row + 1, now
        return quarantine

    def succeeded(self, digest: str) -> None:
        """A load of ``digest`` went well: forget its quarantine."""
        self._failed.pop(digest, None)
        self._in_a_row = 0

    def failing(self, now: float) -> bool:
        """Whether loads fail here, whatever they are of: none went well since the last failure, which is not long ago.

        30 s, the double with each failure more, up to five minutes: one bad model does not count for ever.
        """
        pause = min(LONGEST_WAIT, FIRST_WHEN_REFUSED * 2.0 ** min(self._in_a_row - 1, 16))
        return self._in_a_row > 0 and now < self._last + pause

    def may_try(self, digest: str, now: float) -> bool:
        """True when a load may start now."""
        quarantine = self._failed.get(digest)
        return quarantine is None or now >= quarantine.retry_at

    def refused(self, digest: str) -> bool:
        """True when jobs of this digest get a failure, unless ``may_try`` says to load it first."""
        quarantine = self._failed.get(digest)
        return quarantine is not None and quarantine.refusing

    def hold(self, model: str, until: float, reason: str) -> None:
        """An operator's order: ``model`` is not loaded until then, whichever build; its jobs are told ``reason``."""
        self._held[model] = until, reason

    def held(self, model: str, now: float) -> str | None:
        """Why ``model`` is not to be loaded by order, or None."""
        until, reason = self._held.get(model, (now, ""))
        if now < until:
            return reason
        self._held.pop(model, None)
        return None

    def holds(self, now: float) -> dict[str, tuple[float, str]]:
        """Models that are held by order: for how many seconds more, and why."""
        return {model: (until - now, reason) for model, (until, reason) in self._held.items() if until > now}

    def lift(self, model: str, digests: Iterable[str]) -> bool:
        """Forget what keeps ``model``, and those builds of it, from being loaded; False when nothing did."""
        lifted = [self._held.pop(model, None), *(self._failed.pop(digest, None) for digest in digests)]
        self._in_a_row = 0
        return any(each is not None for each in lifted)

    def all(self) -> dict[str, Quarantine]:
        """Everything that has failed and not been loaded since, for the operator."""
        return dict(self._failed)

    def quarantine(self, digest: str) -> Quarantine | None:
        """What is known, for messages and the operator; None when the digest has not failed."""
        return self._failed.get(digest)


def after_kills(kills: int, allowed: int) -> PutOff:
    """How bytes are put off after the ``kills``-th worker in a row that ended while it loaded them.

    Workers are killed for many reasons (memory, a drained node), and a load is merely what they were at. So not after
    the first, as another worker takes over at once; then for 1 s, 4, 16, ... in which jobs wait. ``allowed`` deaths in
    a row are the bytes' own doing: jobs are refused, and each try may cost one more worker, so it comes after 30 s, 2
    minutes, 8, ... an hour.
    """
    if kills < KILLS_BEFORE_WAITS:
        return PutOff(0.0, refusing=False)
    waiting = FIRST_AFTER_KILLS * 4.0 ** min(kills - KILLS_BEFORE_WAITS, 16)
    if kills < allowed:
        return PutOff(min(LONGEST_AFTER_KILLS, waiting), refusing=False)
    refusing = FIRST_WHEN_REFUSED * 4.0 ** min(kills - allowed, 16)
    return PutOff(min(LONGEST_AFTER_KILLS, max(waiting, refusing)), refusing=True)


def wait_after(attempts: int) -> float:
    """Seconds to wait after the ``attempts``-th failure in a row: 1, 2, 4, ... 300."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(attempts - 1, 32))
