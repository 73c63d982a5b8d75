"""Logs: one list of events, one format, nothing that does not belong there, and no storm of repeats."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from qworker.telemetry.events import EVENTS, FORBIDDEN_FIELDS
from qworker.telemetry.log import BURST, WINDOW, Repeats, trace_of

PACKAGE = Path(__file__).resolve().parents[2] / "qworker"
METHODS = {"debug", "info", "warning", "error", "critical", "exception"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Each call of a structlog logger in the package, with where it is."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "structlog.get_logger" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in METHODS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "log"
            ):
                yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}", node


def test_every_logged_event_is_in_the_list() -> None:
    """By its name, as plain text, and at its level. A new one: add it to qworker/telemetry/events.py."""
    for where, call in calls():
        name = call.args[0]
        assert len(call.args) == 1, f"{where}: an event has fields, and no arguments"
        assert isinstance(name, ast.Constant), f"{where}: an event's name is plain text"
        assert name.value in EVENTS, f"{where}: {name.value} is not in qworker/telemetry/events.py: add it there"
        assert isinstance(call.func, ast.Attribute)
        assert call.func.attr == EVENTS[name.value].level, f"{where}: the list has it at another level"


def test_every_event_in_the_list_is_logged() -> None:
    """What nobody logs any more leaves the list."""
    logged = {call.args[0].value for _, call in calls() if isinstance(call.args[0], ast.Constant)}
    assert set(EVENTS) - logged == set()


def test_events_are_named_noun_verb_and_carry_no_payload() -> None:
    """Fields are named in the code, so that nobody logs a mapping of unknown things."""
    for name, event in EVENTS.items():
        assert re.fullmatch(r"[a-z_]+\.[a-z_]+", name), name
        assert event.text.endswith("."), name
    for where, call in calls():
        fields = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        assert not fields & FORBIDDEN_FIELDS, where
        spread = {ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None}
        assert spread <= {"trace", "trace_of(asked.headers)"}, f"{where}: {spread} hides what is logged"


def test_repeats_are_counted_and_left_out() -> None:
    """A storm of one event about one model; others, and errors, go their way."""
    now = 0.0
    repeats = Repeats(lambda: now)

    def passes(event: str, model: str, method: str = "warning") -> dict[str, Any] | None:
        try:
            return repeats(None, method, {"event": event, "model": model})
        except structlog.DropEvent:
            return None

    assert sum(passes("job.failed", "a") is not None for _ in range(BURST + 7)) == BURST
    assert passes("job.failed", "b") == {"event": "job.failed", "model": "b"}
    assert passes("model.load_failed", "a", "error") is not None
    now = WINDOW
    assert passes("job.failed", "a") == {"event": "job.failed", "model": "a", "left_out": 7}
    assert passes("job.failed", "a") == {"event": "job.failed", "model": "a"}


@pytest.mark.parametrize(
    ("header", "fields"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", {"trace_id": "0af7651916cd43dd8448eb211c80319c"}),
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", {"trace_id": "0af7651916cd43dd8448eb211c80319c"}),
        ("nonsense", {}),
        (7, {}),
        (None, {}),
    ],
)
def test_the_trace_of_a_job_is_on_its_lines(header: object, fields: dict[str, str]) -> None:
    """From the header alone: nothing of OpenTelemetry need be installed."""
    assert trace_of({"traceparent": header}) == fields


LOGS = """
import logging, structlog
from qworker.telemetry.log import configure_logging
configure_logging("info", "json", "w-1")
structlog.get_logger("x").warning("broker.lost", reason="r")
logging.getLogger("library").warning("words of %s", "others")
structlog.get_logger("x").debug("news.lost", reason="not shown")
"""


def test_every_line_is_json_and_tells_the_worker() -> None:
    """Ours, and those of libraries."""
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=True)
    ours, theirs = [json.loads(line) for line in done.stderr.splitlines()]
    assert (ours["event"], ours["level"], ours["worker"], ours["reason"]) == ("broker.lost", "warning", "w-1", "r")
    assert (theirs["event"], theirs["worker"]) == ("words of others", "w-1")
