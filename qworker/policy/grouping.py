"""How long a cold model's claim is held, so that its jobs come in runs and not one by one.

Pure. A hold trades the wait of a few cold jobs for fewer loads: what comes in while a model is held is
served by the same load. It never holds back a model that needs nobody's bytes, never past a deadline, and
never longer than its window after the oldest job came, however long that job waited before.
"""

from __future__ import annotations

from dataclasses import dataclass

DEADLINE_MARGIN = 1.5
"""Factor on the expected load seconds when a deadline is near: loads vary."""


@dataclass(frozen=True, slots=True)
class Want:
    """A cold model with jobs. Times are seconds on the caller's clock."""

    oldest: float
    """When its oldest waiting job came."""
    load_seconds: float
    """What a load of it is expected to take."""
    fits_free: bool
    """Whether it fits without evicting anybody."""
    deadline: float | None = None
    """The earliest one of its waiting jobs, where known."""


def claim_at(want: Want, window: float) -> float:
    """When the claim may go on; a time in the past means now."""
    if want.fits_free or window <= 0.0:
        return want.oldest
    at = want.oldest + window
    if want.deadline is not None:
        at = min(at, want.deadline - DEADLINE_MARGIN * want.load_seconds)
    return max(want.oldest, at)
