"""The chaos run's own parts: the schedule, the book and the mutations do what the verdict relies on."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import InvalidInput
from qworker.wire.codec import decode_job
from tests.chaos.book import Book
from tests.chaos.mutate import malformed, seeds
from tests.chaos.schedule import PLATFORM_FAULTS, WORKER_FAULTS, plan
from tests.chaos.verdict import harmed

SOURCES = seeds()


@given(st.integers(), st.integers(1, 60))
def test_a_seed_is_one_schedule(seed: int, count: int) -> None:
    """The same seed draws the same faults, and a longer run begins as a shorter one does."""
    planned = plan(seed, "lane", WORKER_FAULTS, count, 1.0, 2.0)
    assert planned == plan(seed, "lane", WORKER_FAULTS, count + 7, 1.0, 2.0)[:count]
    assert all(1.0 <= fault.pause <= 2.0 for fault in planned)


@given(st.integers())
def test_every_fault_has_its_turn(seed: int) -> None:
    """No kind comes again before each has come once."""
    kinds = [fault.kind for fault in plan(seed, "lane", PLATFORM_FAULTS, 3 * len(PLATFORM_FAULTS), 0, 1)]
    assert set(Counter(kinds).values()) == {3}
    assert set(kinds[: len(PLATFORM_FAULTS)]) == set(PLATFORM_FAULTS)


@given(st.integers())
def test_codec_answers_whatever_the_mutations_make(seed: int) -> None:
    """Each broken message is a job all the same, or bad input: nothing else comes out of the codec."""
    message = malformed(random.Random(seed), SOURCES)
    assert message == malformed(random.Random(seed), SOURCES)
    try:
        job = decode_job(message.body, message.content_type, model="vision/mnist-8", job_id="j")
    except InvalidInput:
        return
    assert job.model == "vision/mnist-8"


def test_most_mutations_break_their_message() -> None:
    """Good jobs in disguise are few: the run would prove little otherwise."""
    chance, broken = random.Random(1), 0
    for _ in range(500):
        message = malformed(chance, SOURCES)
        try:
            decode_job(message.body, message.content_type, model="vision/mnist-8", job_id="j")
        except InvalidInput:
            broken += 1
    assert broken > 400


def test_the_book_tells_lost_doubled_and_unsure_jobs() -> None:
    """Each of the ways in which a job can end counts once, and those in which it must not end are seen."""
    book = Book()
    for job in ("result", "failed", "doubled", "kept", "both", "lost", "unsure", "unconfirmed"):
        book.publishing(job, "m", 1)
        if job not in ("unsure", "unconfirmed"):
            book.confirmed(job)
    assert len(book.waiting()) == 6
    for job, code in (("result", "ok"), ("failed", "invalid_input"), ("doubled", "ok"), ("doubled", "ok")):
        book.answer(job, code)
    book.answer("unconfirmed", "ok")  # its confirm was lost, and the broker had it all the same
    book.letter("kept", "invalid_input")
    book.answer("both", "unknown_model")
    book.letter("both", "unknown_model")
    book.answer("nobody's", "ok")
    tally = book.tally()
    assert book.waiting() == ["lost"]
    assert (tally.accepted, tally.results, tally.failures, tally.dead_letters, tally.lost) == (7, 3, 2, 1, 1)
    assert (tally.duplicates, tally.unsure, tally.strays, tally.answer_and_letter) == (1, 1, 1, 0)
    assert tally.balanced


def test_good_jobs_that_fail_are_excused_only_where_kills_explain_them() -> None:
    """Nearly all are answered with results, whatever is killed; in most scenarios all of them."""
    book = Book()
    for n in range(200):
        book.publishing(f"j{n}", "m", 0)
        book.confirmed(f"j{n}")
        book.answer(f"j{n}", "model_unavailable" if n < 2 else "ok")
    assert harmed("kills", book.tally()) == harmed("mixed", book.tally()) == []
    assert "2 good jobs failed" in harmed("restarts", book.tally())[0]
    book.publishing("late", "m", 0)
    book.answer("late", "model_unavailable")
    assert "3 good jobs failed" in harmed("kills", book.tally())[0]
