"""Whether a job can still be done in its time.

Pure. A job that cannot is refused before anything is spent on it: its requester learns sooner, and those behind
it gain what it would have taken.

Asked of jobs in hand, so no load is part of it. Those of a cold model stay with the broker, which watches their
deadlines, and the load goes on for whoever comes after them: a model that takes longer to load than its callers have
would otherwise never be there for any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

CAUTION = 0.8
"""Of an estimate: what is expected is a mean, and a job that would just have made it is not to be refused."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that a job is expected to take from now on, by what was measured."""

    queue: float = 0.0
    """Until those before it have run."""
    run: float = 0.0

    @property
    def total(self) -> float:
        return self.queue + self.run


def hopeless(left: float, estimate: Estimate) -> str | None:
    """Why a job with ``left`` seconds until its deadline cannot be done in time, with the estimate; else None."""
    if estimate.total * CAUTION <= left:
        return None
    parts = [("queue", estimate.queue), ("run", estimate.run)]
    told = " + ".join(f"{name} {seconds:.3g}" for name, seconds in parts if seconds > 0.0)
    return (
        f"the job has {max(left, 0.0):.3g} s until its deadline and is expected to take {estimate.total:.3g} s "
        f"({told}): allow more time, or send it when the model has less to do"
    )
