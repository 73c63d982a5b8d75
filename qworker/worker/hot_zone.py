"""The hot zone: the one owner of the residency table, which carries out what the policy decides.

``policy.residency`` decides which model may take bytes and which one must leave; this turns *admit* into
a woken load and *evict* into a tenant that is told to leave. It does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from qworker.errors import ModelTooLarge
from qworker.policy.eviction import Usage
from qworker.policy.residency import Decision, Residency, Row
from qworker.telemetry.counters import Counters

Clock = Callable[[], float]

SPARE = -9
"""The urgency of a model that nobody waits for: it gets bytes that are free while nobody waits for any."""
REPLICA = -5
"""That of one more replica: it gets bytes that are free, or those of a model that was not called lately."""
KEPT_OUT_SECONDS = 5.0
"""So long a claim waits for bytes that pinned models keep: meanwhile no other worker can have the model."""
LOOK_SECONDS = 0.5


class Tenant(Protocol):
    """A model that lives in the zone."""

    def evicted(self, *, forced: bool, reason: str) -> None:
        """Stop taking jobs and go. Unforced, it may stay when jobs turn up meanwhile."""
        ...


class HotZone:
    """Bytes of one worker. Enter every change through here, on the event loop, without an await inside.

    Memory of different kinds (a device's, the host's) has a table each, by the name of the backend that uses it.
    Owned here: ``_tables`` (who holds what), ``_table_of`` (in which of them a model was last), ``_waiting``
    (loads that wait for bytes), ``_tenants``.
    """

    def __init__(self, residency: Residency | Mapping[str, Residency], clock: Clock, counters: Counters) -> None:
        self._tables = {"": residency} if isinstance(residency, Residency) else dict(residency)
        self._first = next(iter(self._tables.values()))
        self._table_of: dict[str, Residency] = {}
        self._clock = clock
        self._counters = counters
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._tenants: dict[str, Tenant] = {}
        self._stirred = asyncio.Event()
        self.online = 0
        """Online jobs in hand, of all models."""
        self.on_quiet: Callable[[], None] = _nobody
        """Called when the last of them is done."""
        self.on_loaded: Callable[[str, float, int], None] = _nobody_loads
        """Called with each model that is loaded, its load seconds and its bytes."""
        self.on_evicted: Callable[[str], None] = _nobody_leaves
        """Called with each model that is told to leave for another."""

    # --- what a tenant reports -------------------------------------------------------------------

    def enter(self, model: str, tenant: Tenant) -> None:
        """``tenant`` is who will be told to leave when ``model`` is evicted."""
        self._tenants[model] = tenant

    async def room(self, model: str, nbytes: int, *, within: float, kind: str = "", urgency: int = 0) -> bool:
        """Wait until ``nbytes`` are booked for ``model``; False when they were not within ``within`` seconds, or pins
        have kept them for a few.

        ``kind`` names the memory, where there is more than one. From True on, the bytes are held until
        :meth:`gone`. Raises ModelTooLarge when it can never fit. With ``urgency`` SPARE it is now or not at all.
        """
        self._table_of[model] = self._tables.get(kind, self._first)
        if urgency == SPARE:
            return self._of(model).want_spare(model, nbytes, self._clock())
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[model] = admitted
        self._obey(self._of(model).want(model, nbytes, self._clock(), urgency=urgency))
        try:
            if urgency != REPLICA or admitted.done() or self._of(model).is_coming(model):
                await self._admission(admitted, model, nbytes, within)
        except asyncio.CancelledError:
            self._withdraw(model, admitted)
            raise
        finally:
            self._waiting.pop(model, None)
        if admitted.done():
            return admitted.result()  # False from give_up; raises what _obey put there
        self._withdraw(model, admitted)
        return False

    async def _admission(self, admitted: asyncio.Future[bool], model: str, nbytes: int, within: float) -> None:
        now = asyncio.get_running_loop().time
        last = now() + within
        kept_out: float | None = None
        while not admitted.done() and now() < last:
            if not self._of(model).kept_out(nbytes):
                kept_out = None
            elif kept_out is None:
                kept_out = now()
            elif now() >= kept_out + KEPT_OUT_SECONDS:
                return
            await asyncio.wait({admitted}, timeout=min(last - now(), LOOK_SECONDS))

    def kept_out(self, nbytes: int, kind: str = "") -> str:
        """Why so many bytes of that memory cannot become free while the pins stand; "" when they can."""
        return self._tables.get(kind, self._first).kept_out(nbytes)

    def give_up(self, model: str) -> None:
        """If a load of ``model`` waits for bytes, it waits no longer."""
        waiter = self._waiting.get(model)
        if waiter is not None and not waiter.done():
            self._obey(self._of(model).abandon(model, self._clock()))
            waiter.set_result(False)

    def grow(self, model: str, nbytes: int) -> bool:
        """Book what a model was measured to take; False when that does not fit."""
        return self._of(model).grow(model, nbytes, self._clock())

    def loaded(self, model: str, load_seconds: float) -> None:
        self._obey(self._of(model).loaded(model, load_seconds, self._clock()))
        self.on_loaded(model, load_seconds, self._of(model).holds(model))

    def used(self, model: str) -> None:
        """A job for ``model`` arrived."""
        self._of(model).used(model, self._clock())

    def started(self, model: str) -> None:
        self.online += 1
        self._of(model).started(model)

    def finished(self, model: str) -> None:
        self._of(model).finished(model, self._clock())
        if self._waiting:
            self._stirred.set()  # an idle model may be what somebody waits for
        self.online -= 1
        if not self.online:
            self.on_quiet()

    def offline_started(self, model: str) -> None:
        self._of(model).offline_started(model)

    def offline_finished(self, model: str) -> None:
        self._of(model).offline_finished(model)
        if self._waiting:
            self._stirred.set()

    def hurry(self, model: str) -> None:
        """Online jobs came for a model whose load waits for bytes."""
        self._obey(self._of(model).hurry(model, self._clock()))

    def revived(self, model: str) -> None:
        self._counters.revivals += 1
        self._obey(self._of(model).revived(model, self._clock()))

    def leaving(self, model: str) -> None:
        """The model leaves on its own account (shutdown, lost lease)."""
        self._obey(self._of(model).leaving(model, self._clock()))

    def gone(self, model: str) -> None:
        """The bytes are back: unloaded, or the load failed."""
        self._obey(self._of(model).gone(model, self._clock()))

    def left(self, model: str) -> None:
        """The tenant has ended."""
        self._tenants.pop(model, None)

    # --- what is kept over restarts ----------------------------------------------------------------

    def history(self) -> dict[str, Usage]:
        """Uses and costs of every model ever seen. Where two tables know one, the later use counts."""
        now, found = self._clock(), dict[str, Usage]()
        for table in self._tables.values():
            for model, usage in table.eviction.history(now).items():
                if model not in found or usage.age < found[model].age:
                    found[model] = usage
        return found

    def remember(self, usages: Mapping[str, Usage]) -> None:
        """Take over what was kept, in place of what is known of those models."""
        for table in self._tables.values():  # in which memory a model will be is told by its card, when it comes
            table.eviction.restore(usages, self._clock())

    def dearest(self) -> list[tuple[str, Usage]]:
        """All models with a cost that is known, those first which are the last to leave."""
        known = {model: usage for model, usage in self.history().items() if usage.nbytes > 0 and usage.count > 0}
        models = list(known)
        keys = dict(zip(models, self._first.eviction.keys(models, self._clock()), strict=True))
        return [(model, known[model]) for model in sorted(models, key=lambda model: -keys[model])]

    def fits_free(self, nbytes: int, kind: str = "") -> bool:
        """Whether ``nbytes`` of that memory are free, and nobody waits for them."""
        table = self._tables.get(kind, self._first)
        return not table.crowded and nbytes <= table.free

    @property
    def ready_level(self) -> int:
        """How ready this worker is for one more model; see ``policy.placement``."""
        return self._first.ready_level

    @property
    def crowded(self) -> bool:
        """Whether somebody waits for bytes."""
        return any(table.crowded for table in self._tables.values())

    # --- the operator's view ---------------------------------------------------------------------

    @property
    def budget(self) -> int:
        return sum(table.budget for table in self._tables.values())

    @property
    def held(self) -> int:
        return sum(table.held for table in self._tables.values())

    @property
    def peak(self) -> int:
        return sum(table.peak for table in self._tables.values())

    def ledgers(self) -> dict[str, dict[str, int]]:
        """Budget, held and peak bytes of each kind of memory."""
        return {
            kind: {"budget": table.budget, "held": table.held, "peak": table.peak}
            for kind, table in self._tables.items()
        }

    def rows(self) -> tuple[Row, ...]:
        return tuple(row for table in self._tables.values() for row in table.snapshot(self._clock()))

    def standing(self, model: str) -> tuple[float, str]:
        """The eviction key of ``model``, hot or not, and why it is that."""
        return self._of(model).standing(model, self._clock())

    def pin(self, model: str) -> None:
        for table in self._tables.values():
            table.pin(model)

    def unpin(self, model: str) -> None:
        for table in self._tables.values():
            table.unpin(model)
        self._stirred.set()  # it may be what somebody waits for

    def blocked(self) -> list[tuple[str, float, str]]:
        """Who waits for bytes, since how many seconds, and why."""
        return [each for table in self._tables.values() for each in table.blocked(self._clock())]

    # --- carrying out decisions ------------------------------------------------------------------

    async def run(self) -> None:
        """Look again whenever time alone can change something. Runs until cancelled."""
        while True:
            dues = [table.next_tick(self._clock()) for table in self._tables.values()]
            due = min((each for each in dues if each is not None), default=None)
            self._stirred.clear()
            if due is None:
                await self._stirred.wait()
            else:
                await wait_at_most(self._stirred, max(0.0, due - self._clock()))
            for table in self._tables.values():
                self._obey(table.tick(self._clock()))

    def _of(self, model: str) -> Residency:
        return self._table_of.get(model, self._first)

    def _obey(self, decision: Decision) -> None:
        for model in decision.refuse:
            self._settle_waiter(
                model,
                ModelTooLarge(
                    f"{model} needs more memory than this worker's whole budget of {self._of(model).budget} bytes: "
                    "give the worker a larger --memory, or serve the model elsewhere"
                ),
            )
        for model in decision.admit:
            self._settle_waiter(model, None)
        for eviction in decision.evict:
            self.on_evicted(eviction.model)
            self._tenants[eviction.model].evicted(forced=eviction.forced, reason=eviction.reason)
        self._stirred.set()

    def _settle_waiter(self, model: str, error: ModelTooLarge | None) -> None:
        waiter = self._waiting[model]
        if error is None:
            waiter.set_result(True)
        else:
            waiter.set_exception(error)

    def _withdraw(self, model: str, admitted: asyncio.Future[bool]) -> None:
        """Undo a wait that ends without a load, also when the admission came at the last moment."""
        now = self._clock()
        if not admitted.done():
            self._obey(self._of(model).abandon(model, now))
        elif admitted.exception() is None and admitted.result():
            self._obey(self._of(model).gone(model, now))


def _nobody() -> None:
    return


def _nobody_leaves(model: str) -> None:  # noqa: ARG001
    return


def _nobody_loads(model: str, load_seconds: float, nbytes: int) -> None:  # noqa: ARG001
    return


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait for ``event``, but not longer than ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
