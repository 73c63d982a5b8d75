"""``qworker simulate`` and ``qworker history`` as a person types them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from qworker.cli import history, simulate
from qworker.policy.eviction import Usage
from qworker.policy.history import JOURNAL_HEADER, Minute, dump_history, journal_line
from tests.simulate.workloads import clockwork, zipf


def command(*arguments: object) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    simulate.register(app)
    history.register(app)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp_s,model_id\n" + "".join(f"{at},{m}\n" for at, m in zipf(1, requests=2_000)))
    return path


def test_simulate_prints_a_table_and_a_suggestion(trace: Path, tmp_path: Path) -> None:
    """Each policy on a line, the drawn sizes told, the page written."""
    page = tmp_path / "out.html"
    result = command("simulate", trace, "--budget-share", "0.2", "--policy", "gdsf,s3fifo", "--report", page)
    assert result.exit_code == 0, result.output
    for word in ("gdsf", "s3fifo", "lru", "clairvoyant", "were drawn", "would save"):
        assert word in result.output
    assert page.read_text().endswith("</html>\n")


def test_simulate_gives_json(trace: Path) -> None:
    """The whole output is one object keyed by policy."""
    result = command("simulate", trace, "--json", "--memory", "40GiB", "--policy", "rate", "--workers", "2")
    told = json.loads(result.output)
    assert set(told) == {"rate", "lru", "clairvoyant", "belady"}
    assert told["rate"]["budget_bytes"] == 40 * 2**30
    assert told["rate"]["workers"] == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--memory", "lots"], "expected a size like 24GiB"),
        (["--memory", "1GiB", "--budget-share", "0.5"], "found both"),
        (["--budget-share", "0"], "above 0"),
        (["--budget-share", "nan"], "above 0"),
        (["--policy", "mru"], "found mru"),
        (["--report", "/no/such/folder/x.html"], "report cannot be written"),
        (["--sizes", "/no/such/file"], "cannot be opened"),
    ],
)
def test_simulate_says_what_is_wrong(trace: Path, flags: list[str], says: str) -> None:
    """Wrong flags end with 1 and one line, never with a traceback."""
    result = command("simulate", trace, *flags)
    assert result.exit_code == 1
    assert says in result.output


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.csv"
    rows = [Minute(int(at // 60), model, 1, 1, 10.0, 10.0, 100) for at, model in clockwork(days=8, per_day=6)]
    path.write_text("\n".join([JOURNAL_HEADER, *map(journal_line, rows), "damaged"]) + "\n")
    return path


def test_a_journal_becomes_a_trace_that_can_be_simulated(journal: Path, tmp_path: Path) -> None:
    """export → simulate, with sizes and load seconds from the journal."""
    out = tmp_path / "own.csv"
    result = command("history", "export", journal, "--out", out)
    assert result.exit_code == 0, result.output
    assert "1 lines could not be read" in result.output
    told = json.loads(command("simulate", out, "--json", "--memory", "600").output)
    assert told["gdsf"]["requests"] == 8 * 24 * 6
    assert "were drawn" not in command("simulate", out, "--memory", "600").output


def test_a_plan_says_why_it_acts(tmp_path: Path) -> None:
    """A large model leaves a gap each day, and small ones come at their hour: the plan fills it, unless refused."""
    path = tmp_path / "daily.csv"
    first = int(time.time() // 86_400 - 8) * 1_440
    rows: list[Minute] = []
    for day in range(first, first + 8 * 1_440, 1_440):
        rows.append(Minute(day + 180, "large", 1, 1, 10.0, 10.0, 500))
        rows += (Minute(day + 480 + 2 * i, f"m{i}", 1, 1, 10.0, 10.0, 100) for i in range(5))
    path.write_text("\n".join([JOURNAL_HEADER, *map(journal_line, rows)]) + "\n")
    result = command("history", "plan", path, "--memory", "600")
    assert result.exit_code == 0, result.output
    assert "\nact = true" in result.output
    assert "it would have paid" in result.output
    out = tmp_path / "plan.toml"
    assert command("history", "plan", path, "--memory", "600", "--out", out).exit_code == 0
    out.write_text(out.read_text().replace("\nact = true", "\nact = false"))
    again = command("history", "plan", path, "--memory", "600", "--out", out)
    assert "was refused, and stays off" in again.output
    assert "\nact = false" in out.read_text()
    assert "[[preload]]" in out.read_text()  # what it would do, for the person who refused


def test_history_is_shown(tmp_path: Path) -> None:
    """The most used model first; a damaged file is told."""
    path = tmp_path / "history.json"
    path.write_text(dump_history({"rare": Usage(1, 9, 2, 3e6), "often": Usage(50, 9, 2, 3e6)}, 1.7e9))
    assert list(json.loads(command("history", "show", path, "--json").output)) == ["often", "rare"]
    assert "often" in command("history", "show", path).output
    path.write_text(path.read_text()[:-9])
    broken = command("history", "show", path)
    assert broken.exit_code == 1
    assert "expected a history file" in broken.output
