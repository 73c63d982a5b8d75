"""Jobs that were cancelled and may still come: they wait in the broker, for a model that loads or is busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from qworker.errors import JobCancelled, JobError
from qworker.wire.control import read_cancel
from qworker.worker.hot_zone import Clock

KEPT_SECONDS = 3600.0
MOST_KEPT = 20_000


class Tenant(Protocol):
    """A model with jobs in hand."""

    def cancel(self, job_ids: AbstractSet[str], why: JobError) -> tuple[set[str], set[str]]:
        """End those that have not begun. The ids that ended so, and those that run."""
        ...


class Cancelled:
    """The ids, each for an hour; when there are too many, the oldest are forgotten and their jobs run.

    Owner: the event loop. Serving asks for each job, so that nothing may cost anything while it is empty.
    """

    def __init__(self, clock: Clock) -> None:
        self.ids: OrderedDict[str, float] = OrderedDict()
        self._clock = clock

    def add(self, job_ids: Iterable[str]) -> None:
        now = self._clock()
        for job_id in job_ids:
            self.ids[job_id] = now + KEPT_SECONDS
            self.ids.move_to_end(job_id)
        while self.ids and (len(self.ids) > MOST_KEPT or next(iter(self.ids.values())) < now):
            self.ids.popitem(last=False)

    def check(self, job_id: str) -> None:
        """Raises JobCancelled for a job that is not to run."""
        until = self.ids.get(job_id)
        if until is not None and until >= self._clock():
            raise cancelled()

    def carry_out(self, arguments: Mapping[str, Any], tenants: Mapping[str, Tenant]) -> Mapping[str, Any]:
        """The verb ``cancel``: end those in hand that have not begun, and those that come, when they come.

        A model that loads for one of them goes on loading: others may want it, and nobody can tell.
        """
        asked = read_cancel(arguments)
        jobs = frozenset(asked.jobs)
        self.add(jobs)
        ended: set[str] = set()
        running: set[str] = set()
        for model, tenant in tenants.items():
            if asked.model in (None, model):
                gone, left = tenant.cancel(jobs, cancelled())
                ended |= gone
                running |= left
        return {"cancelled": sorted(ended), "running": sorted(running)}


def cancelled() -> JobCancelled:
    """The failure of a job that its requester does not want any more."""
    return JobCancelled("the job was cancelled before it ran: publish it again if its result is wanted after all")
