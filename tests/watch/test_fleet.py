"""What is shown of the fleet is what its workers told: rates, quantiles, the cold ones, and who is silent."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.telemetry.measures import SECONDS, Measures
from qworker.watch.fleet import Fleet, quantile, reloaded
from tests.watch.snapshots import row, told


def test_rates_are_those_of_the_last_seconds() -> None:
    """Jobs by the worker's own clock; what was done before the first look is no rate."""
    fleet, measures = Fleet(), Measures()
    measured = measures.of("m")
    measured.jobs = 1000
    fleet.take(told("w", 50.0, measures, row("m")), 0.0)
    assert fleet.view(0.0)["models"][0]["rate"] == 0
    for _ in range(40):
        measured.job(0.001, 0.0, 0.02, cold=False)
    fleet.take(told("w", 52.0, measures, row("m")), 2.2)
    [shown] = fleet.view(2.2)["models"]
    assert shown["rate"] == 20.0
    assert 0.01 < shown["p50"] <= 0.025
    assert fleet.view(2.2)["workers"][0]["rate"] == 20.0


def test_batch_fill_is_that_of_the_last_seconds() -> None:
    """Of each model: a share of the rows that it takes; the past where nothing ran, nothing where it is not batched."""
    fleet, measures = Fleet(), Measures()
    measures.of("m").job(0.0, 0.0, 0.01, cold=False)
    measures.of("n").job(0.0, 0.0, 0.01, cold=False)
    measures.of("m").batch(1.0)
    fleet.take(told("w", 50.0, measures, row("m"), row("n")), 0.0)
    assert [each["fill"] for each in fleet.view(0.0)["models"]] == [1.0, None]
    for share in (0.25, 0.75):
        measures.of("m").batch(share)
    fleet.take(told("w", 52.0, measures, row("m"), row("n")), 2.0)
    assert [each["fill"] for each in fleet.view(2.0)["models"]] == [0.5, None]


def test_a_snapshot_that_comes_late_is_not_taken_back_to() -> None:
    """An answer to an order may overtake, or be overtaken by, what comes over the events."""
    fleet, measures = Fleet(), Measures()
    fleet.take(told("w", 52.0, measures, row("m")), 1.0)
    fleet.take(told("w", 51.0, measures), 1.1)
    assert [each["model"] for each in fleet.view(1.1)["models"]] == ["m"]


def test_notes_are_told_once_and_in_order() -> None:
    """Each snapshot repeats the last notes; a worker that starts anew counts from one again."""
    fleet, first, second = Fleet(), Measures(), Measures()
    first.chronicle.note("loaded", "a", seconds=0.5)
    fleet.take(told("w", 1.0, first), 1.0)
    first.chronicle.note("evicted", "a", "makes room for b")
    fleet.take(told("w", 2.0, first), 2.0)
    second.chronicle.note("failed", "c", "corrupt")
    fleet.take(told("v", 2.0, second), 2.0)
    shown = fleet.view(2.0)
    assert [note["kind"] for note in shown["timeline"] if note["worker"] == "w"] == ["loaded", "evicted"]
    assert [note["kind"] for note in shown["timeline"] if note["worker"] == "v"] == ["failed"]
    assert [note["reason"] for note in shown["evictions"]] == ["makes room for b"]
    fleet.take(told("w", 3.0, second) | {"started": 1.0}, 3.0)
    kinds = [note["kind"] for note in fleet.view(3.0)["timeline"] if note["worker"] == "w"]
    assert sorted(kinds) == ["evicted", "failed", "loaded"]


def test_what_is_loaded_again_and_again() -> None:
    """Of the last minute, over all workers, the most often first; what was loaded once, or never left, is none."""
    notes = [
        {"at": at, "kind": kind, "model": model, "worker": worker, "reason": f"at {at}", "seconds": 0.5}
        for at, kind, model, worker in (
            (10.0, "loaded", "long-ago", "w"),
            (11.0, "evicted", "long-ago", "w"),
            (39.0, "loaded", "long-ago", "w"),
            (40.0, "loaded", "a", "w"),
            (41.0, "evicted", "a", "w"),
            (42.0, "loaded", "a", "v"),
            (43.0, "loaded", "once", "w"),
            (44.0, "loaded", "b", "w"),
            (45.0, "evicted", "b", "w"),
            (46.0, "loaded", "b", "w"),
            (47.0, "evicted", "b", "w"),
            (48.0, "loaded", "b", "w"),
            (49.0, "loaded", "replica", "w"),
            (50.0, "loaded", "replica", "v"),
        )
    ]
    often = reloaded(notes, 95.0)
    assert [(row["model"], row["loads"], row["evictions"]) for row in often] == [("b", 3, 2), ("a", 2, 1)]
    assert (often[1]["workers"], often[1]["seconds"], often[1]["why"]) == (["v", "w"], 1.0, "at 41.0")


def test_why_a_model_that_found_no_room_is_cold() -> None:
    """What its last claim said stays in sight until another one does better."""
    fleet, measures = Fleet(), Measures()
    measures.depths = {"m": [(2, 0)]}
    measures.chronicle.note("no_room", "m", "pinned models keep the rest")
    fleet.take(told("w", 1.0, measures), 1.0)
    assert [row["why"] for row in fleet.view(1.0)["cold"]] == ["pinned models keep the rest"]
    measures.chronicle.note("loaded", "m", seconds=1.0)
    fleet.take(told("w", 2.0, measures), 2.0)
    assert [row["why"] for row in fleet.view(2.0)["cold"]] == [None]


def test_cold_models_with_jobs() -> None:
    """From the sweeper's look at the queues, with what a claim waits for where there is one."""
    fleet, measures = Fleet(), Measures()
    measures.depths = {"hot": [(3, 1)], "waits": [(2, 0)], "cold": [(7, 0), (1, 0)], "empty": [(0, 0)]}
    waiting = [{"model": "waits", "seconds": 4.0, "why": "needs 9 MiB"}]
    measures.chronicle.enter("waits", "room", 2.5)
    fleet.take(told("w", 1.0, measures, row("hot"), row("waits", "waiting"), waiting=waiting), 1.0)
    cold = {each["model"]: each for each in fleet.view(1.0)["cold"]}
    assert {model: each["ready"] for model, each in cold.items()} == {"waits": 2, "cold": 8}
    assert (cold["waits"]["worker"], cold["waits"]["why"]) == ("w", "needs 9 MiB")
    assert (cold["waits"]["load_seconds"], cold["cold"]["load_seconds"]) == (2.5, None)


def test_who_is_silent_and_who_has_gone() -> None:
    """One that does not answer stays in sight with its old figures; one that has gone does not."""
    fleet, measures = Fleet(), Measures()
    for worker in ("a", "b", "c"):
        fleet.take(told(worker, 1.0, measures), 1.0)
    fleet.called(["a"], {"b": 3.0, "never-heard": None})
    shown = fleet.view(20.0)
    assert {each["worker"]: each["state"] for each in shown["workers"]} == {"a": "ready", "b": "silent"}
    assert [each["late"] for each in shown["workers"]] == [True, True]
    assert [each["worker"] for each in shown["silent"]] == ["never-heard"]


@given(st.lists(st.floats(0, 29), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    """That is all that a histogram can tell."""
    counts = [0] * (len(SECONDS) + 1)
    for value in values:
        counts[bisect_left(SECONDS, value)] += 1
    found = quantile(SECONDS, counts, share)
    at = next(n for n in range(len(values)) if n + 1 >= share * len(values) - 1e-9)
    true = sorted(values)[at]
    assert found is not None
    bucket = bisect_left(SECONDS, true)
    low = SECONDS[bucket - 1] if bucket else 0.0
    assert low <= found <= SECONDS[bucket] * (1 + 1e-9)


@pytest.mark.parametrize("counts", [[], [0] * 16])
def test_no_quantile_of_nothing(counts: list[int]) -> None:
    """Rather than a zero that looks like a measurement."""
    assert quantile(SECONDS, counts, 0.5) is None
