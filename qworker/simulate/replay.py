"""One replay: a trace, a fleet and a policy, on a virtual clock.

The decisions are those of ``policy.residency`` and of the eviction policy, called as a worker calls them;
this plays the rest of a worker: hints wait in one queue and go around the workers that have a load slot
free, a slot is held from the hint until the model is loaded or the claim is over, a load takes its load
seconds, a victim drains what it has in hand. Requests for a model that is not ready wait for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf

from qworker.policy.eviction import HALF_LIFE, Eviction, Usage
from qworker.policy.grouping import Want, claim_at
from qworker.policy.residency import Decision, Residency
from qworker.policy.thrash import Thrash, ThrashDetector
from qworker.simulate.fleet import Fleet, ModelTotals, Outcome
from qworker.simulate.trace import Trace

KEPT_REASONS = 50


def replay(
    trace: Trace,
    fleet: Fleet,
    make_eviction: Callable[[], Eviction],
    policy: str = "",
    history: Mapping[str, Usage] | None = None,
) -> Outcome:
    """What comes of ``trace`` on ``fleet``. Each has a policy of its own, and starts with ``history``."""
    return _Replay(trace, fleet, make_eviction, policy, history or {}).run()


def arrivals(trace: Trace) -> list[array[float]]:
    """The times of the requests of each model, in the order of ``trace.models``."""
    times = [array("d") for _ in trace.models]
    for at, model in zip(trace.times, trace.which, strict=True):
        times[model].append(at)
    return times


@dataclass(slots=True, eq=False)
class _Worker:
    residency: Residency
    detector: ThrashDetector | None
    slots: int
    tick_at: float = inf
    on_the_way: int = 0  # victims that are gone within this instant


@dataclass(slots=True, eq=False)
class _Model:
    name: str
    nbytes: int
    load_seconds: float
    arrivals: Sequence[float]
    home: _Worker | None = None  # who has claimed it
    hot: bool = False  # its queue is consumed
    hinted: bool = False
    waiting: bool = False  # for bytes
    refused: bool = False
    leaving: bool | None = None  # None, or whether the drain is final
    claims: int = 0
    in_hand: int = 0
    served: bool = False  # since it became hot
    served_before: int = 0  # requests before its present load
    backlog: deque[_Job] = field(default_factory=deque["_Job"])
    totals: ModelTotals = field(default_factory=ModelTotals)


_Job = tuple[float, float, bool]
"""When it came, how long it runs, and whether it found its model cold."""
_Event = tuple[float, int, Callable[[float], None]]


class _Replay:
    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        make_eviction: Callable[[], Eviction],
        policy: str,
        history: Mapping[str, Usage],
    ) -> None:
        self._trace = trace
        self._fleet = fleet
        self._models = [
            _Model(name, trace.costs[name].nbytes, trace.costs[name].load_seconds, times)
            for name, times in zip(trace.models, arrivals(trace), strict=True)
        ]
        self._by_name = {model.name: model for model in self._models}
        self._workers = [_Worker(*_parts(fleet, make_eviction()), fleet.load_slots) for _ in range(fleet.workers)]
        self._turn = 0
        self._cold_now = 0  # models that have jobs and are not ready
        self._hints: deque[_Model] = deque()
        self._events: list[_Event] = []
        self._seq = 0
        self._cold_waits, self._queue_waits = array("d"), array("d")
        self._load_times, self._load_costs = array("d"), array("d")
        self._end = trace.times[-1] if trace.times else 0.0
        self._reasons: deque[tuple[float, str, str]] = deque(maxlen=KEPT_REASONS)
        self._outcome = Outcome(policy, fleet, trace.seconds, len(trace.times))
        if history:
            self._start_warm(history, trace.times[0] if trace.times else 0.0)

    # --- the clock -------------------------------------------------------------------------------

    def run(self) -> Outcome:
        if self._trace.run_seconds is None:
            self._run_instant()
        else:
            self._run_busy(self._trace.run_seconds)
        self._advance(inf)
        return self._told()

    def _run_instant(self) -> None:
        """Requests that take no time: a hot one is a use and nothing else. This loop is most of the time."""
        events, models, arrive = self._events, self._models, self._arrive
        for now, index in zip(self._trace.times, self._trace.which, strict=True):
            while events and events[0][0] <= now:
                at, _, happen = heappop(events)
                happen(at)
            model = models[index]
            if model.hot and model.served and (home := model.home) is not None:
                home.residency.used(model.name, now)
                if home.detector is not None:
                    home.detector.used(model.name, now)
            else:
                arrive(model, now, 0.0)

    def _run_busy(self, runs: Sequence[float]) -> None:
        for now, index, run in zip(self._trace.times, self._trace.which, runs, strict=True):
            self._advance(now)
            self._arrive(self._models[index], now, run)

    def _advance(self, until: float) -> None:
        events = self._events
        while events and events[0][0] <= until:
            at, _, happen = heappop(events)
            happen(at)

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        self._seq += 1
        heappush(self._events, (time, self._seq, happen))

    # --- requests --------------------------------------------------------------------------------

    def _arrive(self, model: _Model, now: float, run: float) -> None:
        if model.hot:
            model.backlog.append((now, run, False))
            self._deliver(model, now)
            return
        model.totals.misses += 1
        if model.refused:
            self._outcome.refused += 1
            return
        if not model.backlog:
            self._cold_now += 1
            self._outcome.most_cold = max(self._outcome.most_cold, self._cold_now)
        model.backlog.append((now, run, True))
        if model.home is None and not model.hinted:
            self._hint(model, now)

    def _deliver(self, model: _Model, now: float) -> None:
        """Start what waits, as far as the prefetch goes."""
        home, backlog, prefetch = model.home, model.backlog, self._fleet.prefetch
        assert home is not None, "a hot model has a worker"
        while backlog and model.in_hand < prefetch:
            arrived, run, cold = backlog.popleft()
            if cold:
                self._cold_waits.append(now - arrived)
            elif now > arrived:
                self._queue_waits.append(now - arrived)
            home.residency.used(model.name, now)
            home.residency.started(model.name)
            model.in_hand += 1
            if home.detector is not None:
                home.detector.used(model.name, now)
            if run > 0.0:
                self._at(now + run, partial(self._finished, model))
            else:
                self._finish(model, home, now)

    def _finish(self, model: _Model, home: _Worker, now: float) -> None:
        model.in_hand -= 1
        model.served = True
        home.residency.finished(model.name, now)
        self._outcome.late += now > self._end

    def _finished(self, model: _Model, now: float) -> None:
        home = model.home
        assert home is not None, "it does not leave with jobs in hand"
        self._finish(model, home, now)
        if model.hot:
            self._deliver(model, now)
        elif model.in_hand == 0:
            self._drained(model, now)
        self._look(home, now)

    # --- claims ----------------------------------------------------------------------------------

    def _hint(self, model: _Model, now: float) -> None:
        model.hinted = True
        self._hints.append(model)
        self._hand_out(now)

    def _hand_out(self, now: float) -> None:
        """Hints go around the workers that have a slot free, one each; to those that are readiest where that counts."""
        by_level = self._fleet.placement == "ready"
        while self._hints and any(worker.slots for worker in self._workers):
            best = max(each.residency.ready_level for each in self._workers if each.slots) if by_level else 0
            worker = self._workers[self._turn]
            self._turn = (self._turn + 1) % len(self._workers)
            if worker.slots == 0 or worker.residency.ready_level < best:
                continue
            model = self._hints.popleft()
            worker.slots -= 1
            model.hinted, model.home = False, worker
            self._at(now + self._fleet.claim_seconds, partial(self._claim, model))

    def _claim(self, model: _Model, now: float) -> None:
        worker = model.home
        assert worker is not None, "a claim is a worker's"
        window = self._fleet.group_window
        if worker.detector is not None:
            self._note(worker.detector.tick(now), now)
            window = max(window, worker.detector.hold)
        if window > 0.0:
            fits_free = model.nbytes <= worker.residency.free
            at = claim_at(Want(model.backlog[0][0], model.load_seconds, fits_free), window)
            if at > now:
                self._at(at, partial(self._claim, model))
                return
        model.claims += 1
        model.waiting = True
        decision = worker.residency.want(model.name, model.nbytes, now)
        if decision.refuse:
            self._refuse(model, worker, now)
        self._obey(worker, decision, now)
        if model.waiting:
            self._at(now + self._fleet.claim_timeout, partial(self._timed_out, model, model.claims))

    def _refuse(self, model: _Model, worker: _Worker, now: float) -> None:
        model.refused, model.waiting, model.home = True, False, None
        self._outcome.refused += len(model.backlog)
        model.backlog.clear()
        self._cold_now -= 1
        worker.slots += 1
        self._hand_out(now)

    def _timed_out(self, model: _Model, claim: int, now: float) -> None:
        worker = model.home
        if not model.waiting or model.claims != claim or worker is None:
            return
        self._outcome.timeouts += 1
        model.waiting, model.home, model.hinted = False, None, True
        decision = worker.residency.abandon(model.name, now)
        worker.slots += 1
        self._at(now + self._fleet.retry_seconds, partial(self._hint, model))
        self._obey(worker, decision, now)
        self._hand_out(now)

    def _loaded(self, model: _Model, now: float) -> None:
        worker = model.home
        assert worker is not None, "a load is a worker's"
        worker.slots += 1
        totals, outcome = model.totals, self._outcome
        totals.loads += 1
        totals.load_seconds += model.load_seconds
        outcome.loads += 1
        outcome.load_seconds += model.load_seconds
        self._load_times.append(now)
        self._load_costs.append(model.load_seconds)
        model.served_before = bisect_right(model.arrivals, now) - len(model.backlog)
        model.hot, model.served = True, False
        self._cold_now -= bool(model.backlog)
        self._obey(worker, worker.residency.loaded(model.name, model.load_seconds, now), now)
        if worker.detector is not None:
            self._note(worker.detector.loaded(model.name, model.load_seconds, model.nbytes, now), now)
        if model.hot:
            self._deliver(model, now)
        self._look(worker, now)
        self._hand_out(now)

    # --- a warm start ----------------------------------------------------------------------------

    def _start_warm(self, history: Mapping[str, Usage], now: float) -> None:
        """Take over what is known, and fill free bytes with the dearest, as ``worker.warm_start`` does."""
        for worker in self._workers:
            worker.residency.eviction.restore(history, now)
            known = [name for name in self._by_name if name in history and history[name].age <= HALF_LIFE]
            keys = dict(zip(known, worker.residency.eviction.keys(known, now), strict=True))
            ranked = deque(sorted(known, key=lambda name, keys=keys: -keys[name]))
            self._at(now, partial(self._preload, worker, ranked))

    def _preload(self, worker: _Worker, ranked: deque[str], now: float) -> None:
        if worker.slots < self._fleet.load_slots or worker.residency.crowded:
            if self._outcome.evictions == 0 and now < self._end:
                self._at(now + 1.0, partial(self._preload, worker, ranked))
            return
        most = self._fleet.warm_share * worker.residency.budget
        while ranked and self._outcome.evictions == 0:
            model = self._by_name[ranked.popleft()]
            is_free = model.home is None and not model.hinted
            if not is_free or worker.residency.held + model.nbytes > most:
                continue
            if worker.residency.want_spare(model.name, model.nbytes, now):
                model.home, worker.slots = worker, worker.slots - 1
                self._outcome.preloads += 1
                self._outcome.preload_seconds += model.load_seconds
                self._at(now + model.load_seconds, partial(self._loaded, model))
                self._at(now + model.load_seconds, partial(self._preload, worker, ranked))
                return

    # --- leaving ---------------------------------------------------------------------------------

    def _obey(self, worker: _Worker, decision: Decision, now: float) -> None:
        for name in decision.admit:
            model = self._by_name[name]
            model.waiting = False
            self._at(now + model.load_seconds, partial(self._loaded, model))
        for evict in decision.evict:
            model = self._by_name[evict.model]
            again = model.leaving is not None
            model.leaving = evict.forced
            if again:
                continue
            self._reasons.append((now, evict.model, evict.reason))
            model.hot = False
            self._cold_now += bool(model.backlog)
            model.totals.evictions += 1
            self._outcome.evictions += 1
            self._outcome.evicted_bytes += model.nbytes
            if worker.detector is not None:
                worker.detector.evicted(evict.model, now)
            if model.in_hand == 0:
                worker.on_the_way += 1
                self._at(now, partial(self._idle_drained, model))
        self._look(worker, now)

    def _look(self, worker: _Worker, now: float) -> None:
        """Call the policy again when it asks for it."""
        if worker.on_the_way:  # more events of this instant come, and each asks again
            return
        due = worker.residency.next_tick(now)
        if due is None or (due > now and worker.tick_at <= due):
            return
        if due <= now:
            self._obey(worker, worker.residency.tick(now), now)
            return
        worker.tick_at = due
        self._at(due, partial(self._tick, worker))

    def _tick(self, worker: _Worker, now: float) -> None:
        worker.tick_at = inf
        self._obey(worker, worker.residency.tick(now), now)

    def _idle_drained(self, model: _Model, now: float) -> None:
        worker = model.home
        assert worker is not None, "it holds bytes"
        worker.on_the_way -= 1
        self._drained(model, now)

    def _drained(self, model: _Model, now: float) -> None:
        """Nothing in hand any more: stay if jobs came and it may, else go."""
        worker = model.home
        assert worker is not None, "it holds bytes"
        if model.backlog and worker.residency.may_revive(model.name):
            self._outcome.revivals += 1
            model.leaving, model.hot = None, True
            self._cold_now -= 1
            self._obey(worker, worker.residency.revived(model.name, now), now)
            if model.hot:
                self._deliver(model, now)
                self._look(worker, now)
            return
        if self._fleet.unload_seconds > 0.0:
            self._at(now + self._fleet.unload_seconds, partial(self._gone, model))
        else:
            self._gone(model, now)

    def _gone(self, model: _Model, now: float) -> None:
        worker = model.home
        assert worker is not None, "it holds bytes"
        served = bisect_right(model.arrivals, now) - len(model.backlog) - model.served_before
        self._outcome.single_use += served <= 1
        model.home, model.leaving = None, None
        self._obey(worker, worker.residency.gone(model.name, now), now)
        if model.backlog:
            self._hint(model, now)

    # --- telling ---------------------------------------------------------------------------------

    def _note(self, thrash: Thrash | None, now: float) -> None:
        if thrash is not None:
            self._outcome.thrash.append((now, thrash))

    def _told(self) -> Outcome:
        outcome = self._outcome
        stuck = [model.name for model in self._models if model.backlog]
        if stuck:
            raise AssertionError(f"the replay ended with requests that nobody serves, of {', '.join(stuck[:5])}")
        for model in self._models:
            model.totals.requests = len(model.arrivals)
            outcome.misses += model.totals.misses
            outcome.models[model.name] = model.totals
        outcome.peak = max(worker.residency.peak for worker in self._workers)
        outcome.cold_waits, outcome.queue_waits = self._cold_waits, self._queue_waits
        outcome.load_times, outcome.load_costs = self._load_times, self._load_costs
        outcome.reasons = list(self._reasons)
        return outcome


def _parts(fleet: Fleet, eviction: Eviction) -> tuple[Residency, ThrashDetector | None]:
    residency = Residency(fleet.budget, eviction, min_residency=fleet.min_residency, max_cold_wait=fleet.max_cold_wait)
    detector = None
    if fleet.brake:
        detector = ThrashDetector(fleet.budget, slots=fleet.load_slots, max_hold=fleet.max_cold_wait)
    return residency, detector
