"""How rows become jobs, in which order models come, what a failure leads to, and how many jobs fly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.policy.flow import Window
from qworker.policy.offline import After, Group, after_failure, pieces, rows_per_job, turns


@given(st.integers(1, 512), st.floats(1e-7, 10), st.integers(0, 1 << 26))
def test_jobs_are_whole_runs_within_bytes(max_rows: int, seconds: float, row_bytes: int) -> None:
    """Never empty, never above the bytes unless a single row is, and whole runs whenever one fits."""
    rows = rows_per_job(max_rows, [(max_rows, seconds)], row_bytes, job_bytes=1 << 20)
    assert rows >= 1
    assert rows == 1 or rows * row_bytes <= 1 << 20
    if max_rows * row_bytes <= 1 << 20:
        assert rows % max_rows == 0


def test_small_rows_travel_in_thousands_and_large_ones_alone() -> None:
    """A job is worth about 50 ms of a thread."""
    assert rows_per_job(16, [(1, 2e-5), (16, 16e-5)], 40) == 312 * 16
    assert rows_per_job(1, [(1, 0.08)], 600_000) == 1
    assert rows_per_job(8, [], None) == 8


def test_hot_models_come_first_and_each_once() -> None:
    """Cold ones keep the order of the file."""
    groups = [Group("a", 5, False), Group("b", 5, True), Group("c", 0, True), Group("d", 5, False)]
    assert turns(groups) == ["b", "a", "d"]


@given(st.integers(0, 1000), st.integers(2, 1000))
def test_pieces_cover_the_stretch(lo: int, rows: int) -> None:
    """In order, without a gap, each smaller than the whole."""
    found = pieces(lo, lo + rows)
    assert [row for a, b in found for row in range(a, b)] == list(range(lo, lo + rows))
    assert all(0 < b - a < rows for a, b in found)


@given(
    st.sampled_from(["invalid_input", "inference_failed", "poison_job", "model_unavailable", "publish_failed", "new"]),
    st.booleans(),
    st.integers(1, 100),
)
def test_every_failure_comes_to_an_end(code: str, retryable: bool, rows: int) -> None:
    """However often it fails: a job is refused, split or stopped at last, and never split when it is one row."""
    tries = 1
    while (after := after_failure(code, retryable=retryable, rows=rows, tries=tries)) is After.AGAIN:
        tries += 1
        assert tries < 20
    assert after is not After.SPLIT or rows > 1


def test_who_is_gone_stops_the_run() -> None:
    """An unknown model is told at once, one that cannot be loaded after a while."""
    assert after_failure("unknown_model", retryable=False, rows=9, tries=1) is After.STOP
    assert after_failure("model_unavailable", retryable=True, rows=9, tries=1) is After.AGAIN
    assert after_failure("model_unavailable", retryable=False, rows=9, tries=1) is After.STOP


def _settled(workers: int, seconds: float, most: int = 128) -> int:
    """Where the window settles with so many workers that take so long for a job."""
    window = Window(most=most)
    for _ in range(400):
        size = window.size
        for _ in range(size):
            window.answered(0, 8, seconds * max(1.0, size / workers))
    return window.size


@pytest.mark.parametrize(("workers", "least", "most"), [(1, 4, 20), (8, 9, 32), (40, 41, 80)])
def test_the_window_finds_its_size(workers: int, least: int, most: int) -> None:
    """A few more jobs than are worked on, whatever the fleet; never all that it may have."""
    assert least <= _settled(workers, 0.05) <= most


def test_a_fixed_window_stays_and_a_choked_one_shrinks() -> None:
    """What the user asked for is kept; an alarm halves what we found ourselves."""
    window = Window(fixed=7)
    for _ in range(100):
        window.answered(0, 8, 1.0)
    window.choked()
    assert window.size == 7
    window = Window(first=32)
    window.choked()
    assert window.size == 16
