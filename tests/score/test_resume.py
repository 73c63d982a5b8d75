"""Killed at any moment, a run goes on: every row once, nothing mixed, nothing half-written."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from qworker.build.register import register
from qworker.errors import OutputUnusable
from qworker.score.journal import Journal
from qworker.score.prepare import Ask, finished_already, prepare
from qworker.store.local import LocalStore
from tests.e2e.fleet import Fleet, queue_depths
from tests.score.scoring import Scoring, check_rows, read, write_rows
from tests.support.models import identity
from tests.support.waiting import wait_until_sync

pytestmark = [pytest.mark.e2e, pytest.mark.chaos]


def journal_of(folder: Path, output: str) -> Path:
    return folder / f"{output}.score" / "journal.jsonl"


def kill_when_it_has(process: subprocess.Popen[str], journal: Path, nbytes: int) -> None:
    """SIGKILL once the journal has grown to so many bytes, or the process has ended by itself."""
    wait_until_sync(
        lambda: process.poll() is not None or (journal.exists() and journal.stat().st_size >= nbytes),
        60,
        what=f"{nbytes} bytes in {journal}",
    )
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ordered", [False, True])
def test_the_client_is_killed_again_and_again(fleet: Fleet, scoring: Scoring, tmp_path: Path, ordered: bool) -> None:
    """Ten times at random points of its life: little is computed twice, the output is that of a quiet run."""
    fleet.start(1)
    count, jobs, kills = 3000, 600, 10
    write_rows(tmp_path / "in.parquet", count)
    command = ["-i", "in.parquet", "-o", "out.parquet", "-m", "echo", "--columns", "id", "--batch-rows", count // jobs]
    command += ["--in-flight", 8, "--resume", *(["--ordered"] if ordered else [])]
    chance, journal = random.Random(6 + ordered), journal_of(tmp_path, "out.parquet")
    for _ in range(kills):
        process = scoring.start(*command)
        size = journal.stat().st_size if journal.exists() else 0
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0, 2))  # whatever it does then: starting, reading what was done
            process.kill()
            process.communicate()
        else:
            kill_when_it_has(process, journal, size + chance.randrange(1, 900))
        assert not (tmp_path / "out.parquet").exists() or not journal.exists()
    ended = scoring.run(*command)
    assert ended.code == 0, ended
    found = read(tmp_path / "out.parquet")
    check_rows(found, count, ordered=ordered)
    assert all(row["id"] == f"r{row['row']}" for row in found)
    answered = fleet.counter("jobs_answered")
    assert answered <= jobs + (kills + 1) * 8, f"{answered} jobs for {jobs}"
    fleet.finish()


def test_killed_while_the_output_is_written(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """There is no output yet, and the next process writes it without computing anything again."""
    fleet.start(1)
    write_rows(tmp_path / "in.parquet", 200)
    command = ["-i", "in.parquet", "-o", "out.jsonl", "-m", "echo", "--batch-rows", 20, "--resume"]
    folder = tmp_path / "out.jsonl.score"
    folder.mkdir()
    aside = folder / "output.jsonl"
    os.mkfifo(aside)
    reader = os.open(aside, os.O_RDONLY | os.O_NONBLOCK)
    process = scoring.start(*command)
    wait_until_sync(lambda: select.select([reader], [], [], 0)[0] and os.read(reader, 10), 60, what="it writes")
    process.kill()
    process.communicate()
    os.close(reader)
    assert not (tmp_path / "out.jsonl").exists()
    aside.unlink()
    before = fleet.counter("jobs_answered")
    assert scoring.run(*command).code == 0
    check_rows(read(tmp_path / "out.jsonl"), 200)
    assert fleet.counter("jobs_answered") == before
    fleet.finish()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_are_killed_again_and_again(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """Twenty of them, one after another, while rows are scored: every row is there once."""
    fleet.start(2)
    count, kills = 8000, 20
    write_rows(tmp_path / "in.parquet", count)
    process = scoring.start("-i", "in.parquet", "-o", "out.parquet", "-m", "echo", "--batch-rows", 2, "--in-flight", 4)
    journal, chance = journal_of(tmp_path, "out.parquet"), random.Random(7)
    for number in range(kills):
        mark = journal.stat().st_size if journal.exists() else 0
        wait_until_sync(
            lambda mark=mark: process.poll() is not None or (journal.exists() and journal.stat().st_size > mark),
            60,
            what="it goes on",
        )
        victim = chance.choice(fleet.live())
        fleet.start(1, wait=number % 3 == 0)
        victim.kill()
    ended = scoring.ended(process, 110)
    assert ended.code == 0, ended
    check_rows(read(tmp_path / "out.parquet"), count)
    fleet.stop()


def test_interrupted_it_says_how_to_go_on(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """Ctrl-C ends it cleanly; without --resume nothing is touched, with it the rest is done."""
    write_rows(tmp_path / "in.parquet", 100)  # no worker yet: nothing is answered
    command = ["-i", "in.parquet", "-o", "out.parquet", "-m", "echo", "--batch-rows", 10]
    process = scoring.start(*command)
    journal = journal_of(tmp_path, "out.parquet")
    wait_until_sync(lambda: journal.exists() and '"sent"' in journal.read_text(), 40, what="it has sent something")
    process.send_signal(signal.SIGINT)
    ended = scoring.ended(process)
    assert (ended.code, ended.error) == (130, "interrupted")
    assert "--resume" in ended.message
    ended = scoring.run(*command)
    assert (ended.code, ended.error) == (1, "run_changed")
    assert "--resume" in ended.message
    fleet.start(1)
    assert scoring.run(*command, "--resume").code == 0
    check_rows(read(tmp_path / "out.parquet"), 100)
    fleet.finish()


def test_another_model_another_input_other_options_are_refused(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """The error says what differs; an output of another run is not overwritten either."""
    write_rows(tmp_path / "in.parquet", 100)
    command = ["-i", "in.parquet", "-o", "out.parquet", "-m", "echo", "--batch-rows", 10]
    process = scoring.start(*command)
    journal = journal_of(tmp_path, "out.parquet")
    wait_until_sync(lambda: journal.exists() and '"sent"' in journal.read_text(), 40, what="it has sent something")
    second = scoring.run(*command, "--resume")
    assert (second.code, second.error) == (1, "run_busy")
    process.kill()
    process.communicate()
    assert "batch_rows was" in scoring.run(*command[:-1], 20, "--resume").message
    content = (tmp_path / "in.parquet").read_bytes()
    write_rows(tmp_path / "in.parquet", 99)
    assert "input's content" in scoring.run(*command, "--resume").message
    (tmp_path / "in.parquet").write_bytes(content)
    other = tmp_path / "other.onnx"
    other.write_bytes(identity(shape=(None, 3)))
    register(LocalStore(fleet.store), other, "echo")
    ended = scoring.run(*command, "--resume")
    assert (ended.code, ended.error) == (1, "run_changed")
    assert "version 1" in ended.message
    assert "version 2" in ended.message
    LocalStore(fleet.store).remove("echo", "2")
    fleet.start(1)
    assert scoring.run(*command, "--resume").code == 0
    ended = scoring.run(*command[:-1], 20)
    assert (ended.code, ended.error) == (1, "output_unusable")
    fleet.finish()


def test_a_torn_journal_and_a_damaged_one(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """A last line that was being written is no harm; a changed result is found."""
    fleet.start(1)
    write_rows(tmp_path / "in.parquet", 100)
    command = ["-i", "in.parquet", "-o", "out.parquet", "-m", "echo", "--batch-rows", 10, "--resume"]
    (tmp_path / "out.parquet.score").mkdir()
    (tmp_path / "out.parquet.score" / "output.parquet").mkdir()  # so that it ends before its output is in place
    assert scoring.run(*command).error == "output_unusable"
    (tmp_path / "out.parquet.score" / "output.parquet").rmdir()
    journal = journal_of(tmp_path, "out.parquet")
    run = json.loads(journal.read_text().splitlines()[0])["run"]
    assert list(queue_depths(fleet.url, [f"qworker.score.{run}"])) == [f"qworker.score.{run}"]
    with journal.open("a") as file:
        file.write('{"sent":[0,')
    results = next((tmp_path / "out.parquet.score").glob("results-1.bin"))
    whole = results.read_bytes()
    results.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    assert scoring.run(*command).error == "run_changed"
    results.write_bytes(whole)
    assert scoring.run(*command).code == 0
    check_rows(read(tmp_path / "out.parquet"), 100)
    assert queue_depths(fleet.url, [f"qworker.score.{run}"]) == {}
    fleet.finish()


def test_a_full_disk(fleet: Fleet, scoring: Scoring, tmp_path: Path) -> None:
    """It says so, nothing is half-written, and with room again the run goes on."""
    fleet.start(1)
    write_rows(tmp_path / "in.parquet", 300)
    command = ["-i", "in.parquet", "-o", "out.parquet", "-m", "echo", "--batch-rows", 10, "--resume"]
    folder = tmp_path / "out.parquet.score"
    folder.mkdir()
    (folder / "results-1.bin").symlink_to("/dev/full")
    ended = scoring.run(*command)
    assert (ended.code, ended.error) == (1, "output_unusable")
    assert "disk is full" in ended.message
    assert "--resume" in ended.message
    assert not (tmp_path / "out.parquet").exists()
    (folder / "results-1.bin").unlink()
    assert scoring.run(*command).code == 0
    check_rows(read(tmp_path / "out.parquet"), 300)
    fleet.finish()


def test_killed_between_the_output_and_the_word_that_it_is_done(tmp_path: Path, score_store: Path) -> None:
    """An output beside a journal is of that run, and no stranger's file: the run goes on."""
    write_rows(tmp_path / "in.parquet", 10)
    ask = Ask(str(tmp_path / "in.parquet"), tmp_path / "out.parquet", models=("echo",), resume=True)
    prepared = prepare(ask, LocalStore(score_store).card)
    (tmp_path / "out.parquet").write_bytes(b"complete")
    with pytest.raises(OutputUnusable, match="there already"):
        finished_already(prepared)
    with Journal(ask.output) as journal:
        journal.begin({"run": "x", **prepared.head})
    assert not finished_already(prepared)
