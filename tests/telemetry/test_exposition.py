"""``/metrics``: every metric of the table and no other, with counts that never go back and labels that are bounded."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from qworker.telemetry.counters import Counters
from qworker.telemetry.exposition import FORGET, Exposition, TopModels
from qworker.telemetry.measures import Histogram, ModelMeasures
from qworker.telemetry.metrics import METRICS, OTHER

Samples = dict[str, dict[tuple[str, ...], float]]


def row(model: str, state: str = "hot", **more: Any) -> dict[str, Any]:
    fields = {"nbytes": 10, "key": 1.0, "in_hand": 0, "pinned": False, "seconds": 5.0}
    return {"model": model, "state": state, **fields, **more}


def state_of(counters: Counters, *rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A page as ``Worker.state`` makes it."""
    return {
        "ready": True,
        "draining": False,
        "broker": {
            "connected": True,
            "blocked": False,
            "blocked_seconds": 0.0,
            "outbox_messages": 0,
            "outbox_bytes": 0,
        },
        "consumers": {each["model"]: {"expected": 2, "counted": {"jobs": 1, "batch": 1}} for each in rows},
        "loop": {"stalls": 0},
        "models": list(rows),
        "claims": {each["model"]: "serve" for each in rows},
        "refusing": [],
        "waiting": [],
        "ledgers": {"": {"budget": 100, "held": 10 * len(rows), "peak": 50}},
        "counters": counters.as_dict(),
        **more,
    }


def page(counters: Counters, state: dict[str, Any], measured: int = 0, most_models: int = 3) -> Samples:
    """The samples of a page by name and label values."""
    exposition = Exposition(counters.measures, worker="w", version="1", load_slots=2, most_models=most_models)
    return parsed(exposition.take(state, {"": measured}, 0.0).text()[0])


def parsed(body: bytes) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = tuple(value for name, value in sample.labels.items() if name != "le")
            if sample.name.endswith("_bucket"):
                labels = (*labels, sample.labels["le"])
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_the_page_has_the_metrics_of_the_table_and_no_other() -> None:
    """Names, kinds and texts, also of a worker that has done nothing yet."""
    counters = Counters()
    exposition = Exposition(counters.measures, worker="w", version="1", load_slots=2, most_models=3)
    body, content_type = exposition.take(state_of(counters), {}, 0.0).text()
    families = list(text_string_to_metric_families(body.decode()))
    names = {f.name + ("_total" if f.type == "counter" else ""): (f.type, f.documentation) for f in families}
    assert names == {metric.name: (metric.kind, metric.help) for metric in METRICS}
    assert content_type.startswith("text/plain")


def test_samples_have_the_labels_of_the_table() -> None:
    """For each metric with samples: these names and no other."""
    counters = Counters()
    counters.measures.of("a").job(0.1, 0.1, 0.1, cold=True)
    counters.measures.failures["invalid_input"] += 1
    exposition = Exposition(counters.measures, worker="w", version="1", load_slots=2, most_models=3)
    body, _ = exposition.take(state_of(counters, row("a")), {}, 0.0).text()
    wanted = {metric.name.removesuffix("_total"): set(metric.labels) for metric in METRICS}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == wanted[family.name], sample


def test_openmetrics_is_spoken_to_who_asks_for_it() -> None:
    """Prometheus asks so when it may choose."""
    counters = Counters()
    exposition = Exposition(counters.measures, worker="w", version="1", load_slots=2, most_models=3)
    body, content_type = exposition.take(state_of(counters), {}, 0.0).text(
        "application/openmetrics-text; version=1.0.0"
    )
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_a_histogram_is_cumulative() -> None:
    """Each bucket holds those before it, and the last one all."""
    counters = Counters()
    for seconds in (0.001, 0.02, 0.02, 99.0):
        counters.measures.publish.observe(seconds)
    found = page(counters, state_of(counters))
    buckets = found["qworker_job_publish_seconds_bucket"]
    assert (buckets[("0.001",)], buckets[("0.025",)], buckets[("30.0",)], buckets[("+Inf",)]) == (1, 3, 3, 4)
    assert found["qworker_job_publish_seconds_count"][()] == 4


def test_memory_tells_what_the_ledger_does_not_know() -> None:
    """Drift is what was measured less what is booked."""
    counters = Counters()
    found = page(counters, state_of(counters, row("a"), row("b")), measured=33)
    assert found["qworker_memory_held_bytes"] == {("host",): 20}
    assert found["qworker_memory_measured_bytes"] == {("host",): 33}
    assert found["qworker_memory_drift_bytes"] == {("host",): 13}


def test_the_least_valuable_is_the_hot_one_with_the_smallest_key() -> None:
    """Pinned models and those that load are not in the running."""
    counters = Counters()
    rows = (
        row("a", key=3.0, seconds=1.0),
        row("b", key=2.0, seconds=77.0),
        row("c", key=0.1, pinned=True),
        row("d", state="loading", key=0.0),
    )
    found = page(counters, state_of(counters, *rows))
    assert found["qworker_least_valuable_age_seconds"] == {(): 77.0}
    assert found["qworker_models"] == {("waiting",): 0, ("loading",): 1, ("hot",): 3, ("draining",): 0}


def test_only_the_sweeper_tells_what_nobody_serves() -> None:
    """A lane with jobs and no consumer counts; who does not sweep says nothing rather than zero."""
    counters = Counters()
    assert "qworker_unserved_models" not in page(counters, state_of(counters))
    counters.measures.sweeping = True
    counters.measures.depths = {"a": [(5, 0), (2, 1)], "b": [(7, 1)], "c": [(0, 0)]}
    found = page(counters, state_of(counters))
    assert found["qworker_unserved_models"] == {(): 1}
    assert found["qworker_unserved_jobs"] == {(): 5}
    assert found["qworker_queue_ready_jobs"] == {("a",): 7, ("b",): 7, ("c",): 0}


def test_backlog_is_told_in_seconds_of_hot_models() -> None:
    """Jobs in hand and ready ones, times the mean run; who has not run yet, or is not hot, is not told."""
    counters = Counters()
    for run in (0.5, 1.5):
        counters.measures.of("a").job(0.0, 0.0, run, cold=False)
    counters.measures.of("leaving").job(0.0, 0.0, 9.0, cold=False)
    counters.measures.sweeping = True
    counters.measures.depths = {"a": [(5, 1), (1, 1)], "new": [(7, 1)]}
    rows = row("a", in_hand=2), row("leaving", "draining", in_hand=3), row("new", in_hand=1)
    assert page(counters, state_of(counters, *rows))["qworker_backlog_seconds"] == {("a",): 8.0}


def test_the_longest_queues_are_named_whoever_serves_them() -> None:
    """The sweeper need not have run a job of theirs: the rules join its depths with the run times of other workers."""
    counters = Counters()
    counters.measures.sweeping = True
    counters.measures.depths = {f"m{k}": [(k, 1), (0, 1)] for k in range(6)}
    found = page(counters, state_of(counters), most_models=2)
    assert found["qworker_queue_ready_jobs"] == {("m5",): 5, ("m4",): 4, (OTHER,): 6}
    assert found["qworker_queue_consumers"] == {("m5",): 2, ("m4",): 2, (OTHER,): 8}


def test_gauges_of_models_without_a_label_are_added_up() -> None:
    """Also where the counts have one."""
    counters = Counters()
    for model, jobs in (("a", 9), ("b", 8), ("c", 1), ("d", 2)):
        for _ in range(jobs):
            counters.measures.of(model).job(0.1, 0.1, 0.1, cold=False)
    rows = [row(model, in_hand=place) for place, model in enumerate("abcd", 1)]
    found = page(counters, state_of(counters, *rows), most_models=2)
    assert found["qworker_jobs_in_hand"] == {("a",): 1, ("b",): 2, (OTHER,): 7}
    assert found["qworker_model_jobs_total"] == {("a",): 9, ("b",): 8, (OTHER,): 3}


STEPS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5)), st.sampled_from([1.0, FORGET + 1])),
    max_size=12,
)


@given(STEPS, st.integers(0, 4))
@settings(deadline=None)
def test_no_count_is_lost_or_taken_back(steps: list[tuple[dict[str, int], float]], most: int) -> None:
    """Whatever comes when: labels are bounded, no sum falls while its label stands, and each job is in one of them."""
    top, models, now, done, gone = TopModels(most), dict[str, ModelMeasures](), 0.0, 0, 0
    for jobs, pause in steps:
        before = {label: each.jobs for label, each in top.sums.items()}
        for model, count in jobs.items():
            for _ in range(count):
                models.setdefault(model, ModelMeasures()).job(0.01, 0.0, 0.5, cold=False)
            done += count
        now += pause
        top.take(models, now)
        after = {label: each.jobs for label, each in top.sums.items()}
        # a label that was given up takes its count along: it may be back for another model at once
        gone += sum(count for label, count in before.items() if after.get(label, 0) < count)
        assert len(set(after) - {OTHER}) <= most
        assert after.get(OTHER, 0) >= before.get(OTHER, 0)
        assert sum(after.values()) + gone == done
        for each in top.sums.values():
            assert each.run.count == each.queue.count == each.jobs


def test_a_sum_is_the_sum_of_its_parts() -> None:
    """``add`` with ``less`` is what came in between."""
    first, second = Histogram(), Histogram()
    first.observe(0.2)
    second.add(first)
    first.observe(7.0)
    total = Histogram()
    total.add(first, less=second)
    assert (total.count, total.sum) == (1, 7.0)
