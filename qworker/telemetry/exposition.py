"""``/metrics``: what the worker has measured, in Prometheus' text format.

``Exposition.take`` copies plain numbers, on the event loop; ``Taken.text`` makes text of them, in any thread.
Models beyond the busiest are added up as ``other``, and no count is ever taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from qworker.telemetry.measures import Histogram, Measures, ModelMeasures
from qworker.telemetry.metrics import METRICS, OTHER, Metric

FORGET: Final = 3600.0
"""Seconds without a job after which a model gives its label to one that has jobs."""
STATES: Final = ("waiting", "loading", "hot", "draining")

Sample = tuple[tuple[str, ...], float | Histogram]
"""Label values and what they stand for."""


class TopModels:
    """Which models have a label of their own, and the counts of all of them.

    Owned here: ``_shown`` (model → when it last had jobs) and the sums by label. Counts are moved into a sum as they
    come: a model that gets a label later starts there at zero, and ``other`` keeps what it has.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._shown: dict[str, float] = {}
        self._seen: dict[str, ModelMeasures] = {}
        self.sums: dict[str, ModelMeasures] = {}

    def label(self, model: str) -> str:
        return model if model in self._shown else OTHER

    def most_of(self, values: Mapping[str, int]) -> frozenset[str]:
        """The models with the largest values, as many as may be named. For gauges: nothing has to be kept of them."""
        return frozenset(sorted(values, key=lambda model: (-values[model], model))[: self._most])

    def take(self, models: Mapping[str, ModelMeasures], now: float) -> None:
        """Add what is new since the last time."""
        changed = [name for name, each in models.items() if each.jobs != self._jobs_seen(name)]
        for name in changed:
            if name in self._shown:
                self._shown[name] = now
        self._show([name for name in changed if name not in self._shown], models, now)
        for name in changed:
            before = self._seen.get(name)
            _add(self.sums.setdefault(self.label(name), ModelMeasures()), models[name], before)
            self._seen[name] = _copy(models[name])

    def _show(self, wanting: Sequence[str], models: Mapping[str, ModelMeasures], now: float) -> None:
        for name in sorted(wanting, key=lambda each: -models[each].jobs):
            if len(self._shown) >= self._most:
                quiet = min(self._shown, key=lambda each: self._shown[each], default=None)
                if quiet is None or now - self._shown[quiet] < FORGET:
                    return
                del self._shown[quiet], self.sums[quiet]
            self._shown[name] = now

    def _jobs_seen(self, name: str) -> int:
        seen = self._seen.get(name)
        return 0 if seen is None else seen.jobs


@dataclass(frozen=True, slots=True)
class Taken:
    """The metrics as of one moment."""

    samples: Mapping[str, Sequence[Sample]]

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, as the ``Accept`` header asks. Takes milliseconds: not for the event loop."""
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self.samples))
        return encode(registry), content_type


class Exposition:
    """Takes the metrics of one worker. Owner: the event loop."""

    def __init__(self, measures: Measures, *, worker: str, version: str, load_slots: int, most_models: int) -> None:
        self._measures = measures
        self._info = (worker, version)
        self._load_slots = load_slots
        self._top = TopModels(most_models)

    def take(self, state: Mapping[str, Any], measured: Mapping[str, int], now: float) -> Taken:
        """``state``: the page of that name. ``measured``: bytes grown by, by kind of memory. ``now``: monotonic."""
        self._top.take(self._measures.models, now)
        samples: dict[str, list[Sample]] = {}
        for part in (
            self._jobs(state),
            self._hot_zone(state, measured),
            self._loads(state),
            self._claims(state),
            self._worker(state),
        ):
            for name, found in part.items():
                samples[f"qworker_{name}"] = found if isinstance(found, list) else [((), found)]
        return Taken(samples)

    def _jobs(self, state: Mapping[str, Any]) -> dict[str, float | Histogram | list[Sample]]:
        counters, measures, sums = state["counters"], self._measures, self._top.sums
        wait, cold = Histogram(), Histogram(measures.loads.bounds)
        for each in sums.values():
            wait.add(each.wait)
            cold.add(each.cold)
        in_hand = self._by_model((row["model"], row["in_hand"]) for row in state["models"])
        return {
            "jobs_total": [
                ((outcome,), counters[f"jobs_{outcome}"])
                for outcome in ("answered", "failed", "dead_lettered", "given_back")
            ],
            "job_failures_total": _by(measures.failures),
            "dead_letters_total": _by(measures.dead_letters),
            "redeliveries_total": counters["redeliveries"],
            "model_jobs_total": [((model,), float(each.jobs)) for model, each in sums.items()],
            "jobs_in_hand": in_hand,
            "backlog_seconds": self._backlog(state),
            "job_queue_wait_seconds": [((model,), each.queue.copy()) for model, each in sums.items()],
            "job_batch_wait_seconds": wait,
            "job_run_seconds": [((model,), each.run.copy()) for model, each in sums.items()],
            "job_publish_seconds": measures.publish.copy(),
            "job_cold_wait_seconds": cold,
            "guards_total": [
                (("tried_alone",), counters.get("jobs_tried_alone", 0)),
                (("convicted",), counters.get("jobs_convicted", 0)),
                (("unwanted",), counters.get("jobs_unwanted", 0)),
                (("repeated",), counters.get("jobs_repeated", 0)),
                (("load_quarantined",), counters.get("loads_quarantined", 0)),
            ],
            "progress_messages_total": _by(measures.progress),
            "replies_unconfirmed": measures.unconfirmed,
            "runs_total": counters["runs"],
            "jobs_together_total": counters["jobs_together"],
            "batches_split_total": counters["batches_split"],
            "batch_rows": measures.rows.copy(),
            "batch_fill_ratio": measures.fill.copy(),
        }

    def _hot_zone(
        self, state: Mapping[str, Any], measured: Mapping[str, int]
    ) -> dict[str, float | Histogram | list[Sample]]:
        counters, measures, ledgers, rows = state["counters"], self._measures, state["ledgers"], state["models"]
        hot = [row for row in rows if row["state"] == "hot"]
        first_to_go = min((row for row in hot if not row["pinned"]), key=lambda row: row["key"], default=None)
        memory = {kind: kind or "host" for kind in ledgers}
        return {
            "models": [((name,), sum(row["state"] == name for row in rows)) for name in STATES],
            "models_bytes": [((name,), sum(row["nbytes"] for row in rows if row["state"] == name)) for name in STATES],
            "model_hot": self._by_model((row["model"], 1) for row in hot),
            "models_refusing": len(state["refusing"]),
            "memory_budget_bytes": [((memory[kind],), each["budget"]) for kind, each in ledgers.items()],
            "memory_held_bytes": [((memory[kind],), each["held"]) for kind, each in ledgers.items()],
            "memory_peak_bytes": [((memory[kind],), each["peak"]) for kind, each in ledgers.items()],
            "memory_measured_bytes": [((memory[kind],), measured.get(kind, 0)) for kind in ledgers],
            "memory_drift_bytes": [
                ((memory[kind],), measured.get(kind, 0) - each["held"]) for kind, each in ledgers.items()
            ],
            "model_loads_total": counters["loads"],
            "model_unloads_total": counters["unloads"],
            "evictions_total": counters["evictions"],
            "evicted_bytes_total": counters["evicted_bytes"],
            "revivals_total": counters["revivals"],
            "reloads_total": measures.reloads,
            "reload_seconds_total": measures.reload_seconds,
            "preloads_total": [
                (("used",), counters["preloads_used"]),
                (("unused",), counters["preloads_unused"]),
            ],
            "preloads_waiting": counters["preloads"] - counters["preloads_used"] - counters["preloads_unused"],
            "least_valuable_age_seconds": 0.0 if first_to_go is None else first_to_go["seconds"],
            "room_wait_seconds": max((each["seconds"] for each in state["waiting"]), default=0.0),
        }

    def _loads(self, state: Mapping[str, Any]) -> dict[str, float | Histogram | list[Sample]]:
        del state
        measures = self._measures
        return {
            "load_seconds": measures.loads.copy(),
            "load_stage_seconds": [((stage,), each.copy()) for stage, each in measures.stages.items()],
            "load_failures_total": _by(measures.load_failures),
            "eta_error_seconds": [((of,), each.copy()) for of, each in measures.eta_errors.items()],
            "loads_in_progress": measures.loading,
            "load_slots": self._load_slots,
        }

    def _claims(self, state: Mapping[str, Any]) -> dict[str, float | Histogram | list[Sample]]:
        counters, measures = state["counters"], self._measures
        ready = {model: sum(jobs for jobs, _ in lanes) for model, lanes in measures.depths.items()}
        consumers = {model: sum(count for _, count in lanes) for model, lanes in measures.depths.items()}
        unserved = [sum(jobs for jobs, count in lanes if not count) for lanes in measures.depths.values()]
        swept, longest = measures.sweeping, self._top.most_of(ready)
        return {
            "claims": _by(Counter(cast("dict[str, str]", state["claims"]).values())),
            "leases_total": _by(measures.leases),
            "hints_total": [
                (("claimed",), counters["hints"] - counters["hints_stale"]),
                (("stale",), counters["hints_stale"]),
            ],
            "wakes_total": counters["wakes"],
            "sweeper_elected": int(swept),
            "sweeps_total": measures.sweeps,
            "sweep_seconds_total": measures.sweep_seconds,
            "queue_ready_jobs": self._by_model(ready.items(), longest),
            "queue_consumers": self._by_model(consumers.items(), longest),
            "unserved_models": [((), sum(1 for jobs in unserved if jobs))] if swept else [],
            "unserved_jobs": [((), sum(unserved))] if swept else [],
        }

    def _worker(self, state: Mapping[str, Any]) -> dict[str, float | Histogram | list[Sample]]:
        broker, counters, consumers = state["broker"], state["counters"], state["consumers"].values()
        return {
            "worker_info": [(self._info, 1)],
            "ready": int(state["ready"]),
            "draining": int(state["draining"]),
            "broker_connected": int(broker["connected"]),
            "broker_blocked": int(broker["blocked"]),
            "broker_blocked_seconds": broker["blocked_seconds"],
            "broker_blocks_total": counters["blocked"],
            "outbox_messages": broker["outbox_messages"],
            "outbox_bytes": broker["outbox_bytes"],
            "broker_reconnects_total": counters["reconnects"],
            "consumers_expected": sum(each["expected"] for each in consumers),
            "consumers_missing": sum(
                1 for each in consumers if each["counted"] and sum(each["counted"].values()) < each["expected"]
            ),
            "consumers_lost_total": counters["consumers_lost"],
            "event_loop_stalls_total": state["loop"]["stalls"],
            "event_loop_lag_seconds": self._measures.loop_lag.copy(),
        }

    def _backlog(self, state: Mapping[str, Any]) -> list[Sample]:
        sums: dict[str, float] = {}
        for row in state["models"]:
            measured = self._measures.models.get(row["model"])
            if row["state"] != "hot" or measured is None or not measured.jobs:
                continue
            jobs = row["in_hand"] + sum(ready for ready, _ in self._measures.depths.get(row["model"], ()))
            label = self._top.label(row["model"])
            sums[label] = sums.get(label, 0.0) + jobs * measured.run.sum / measured.jobs
        return [((label,), seconds) for label, seconds in sums.items()]

    def _by_model(self, values: Iterable[tuple[str, int]], shown: Container[str] | None = None) -> list[Sample]:
        """Those of ``shown`` (or with a label of their own) by name, the others added up."""
        sums: Counter[str] = Counter()
        for model, value in values:
            named = model if shown is not None and model in shown else OTHER
            sums[self._top.label(model) if shown is None else named] += value
        return _by(sums)


class _Families(Collector):
    def __init__(self, samples: Mapping[str, Sequence[Sample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for metric in METRICS:
            yield _family(metric, self._samples[metric.name])


def _family(
    metric: Metric, samples: Sequence[Sample]
) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in samples:
            assert isinstance(value, Histogram), metric.name
            histograms.add_metric(labels, _cumulative(value), value.sum)
        return histograms
    family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    numbers = family(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        assert not isinstance(value, Histogram), metric.name
        numbers.add_metric(labels, value)
    return numbers


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def _by(counts: Mapping[str, int]) -> list[Sample]:
    return [((name,), count) for name, count in counts.items()]


def _add(into: ModelMeasures, new: ModelMeasures, before: ModelMeasures | None) -> None:
    into.jobs += new.jobs - (0 if before is None else before.jobs)
    into.queue.add(new.queue, less=None if before is None else before.queue)
    into.wait.add(new.wait, less=None if before is None else before.wait)
    into.run.add(new.run, less=None if before is None else before.run)
    into.cold.add(new.cold, less=None if before is None else before.cold)


def _copy(measured: ModelMeasures) -> ModelMeasures:
    other = ModelMeasures()
    other.jobs = measured.jobs
    other.queue, other.wait = measured.queue.copy(), measured.wait.copy()
    other.run, other.cold = measured.run.copy(), measured.cold.copy()
    return other
