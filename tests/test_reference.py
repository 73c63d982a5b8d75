"""The documentation: reference pages are what the code says, the index is complete, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from qworker.config import Settings
from qworker.telemetry.metrics import METRICS
from tests import reference

ROOT = reference.ROOT
MADE = reference.pages()


def documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.parametrize("name", sorted(MADE))
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    """If not: python -m tests.reference"""
    path = reference.PAGES / name
    assert path.exists(), "run python -m tests.reference"
    assert path.read_text(encoding="utf-8") == MADE[name], f"{name} is out of date: run python -m tests.reference"


def test_no_page_is_left_over() -> None:
    """What is not written any more is removed."""
    assert {path.name for path in reference.PAGES.iterdir()} == set(MADE)


def test_every_metric_and_setting_is_documented() -> None:
    """With words of its own, not only its name."""
    for metric in METRICS:
        assert metric.help.endswith("."), metric.name
        assert f"| `{metric.name}` |" in MADE["metrics.md"]
    told = [row for _, rows in reference.settings_by_section() for row in rows]
    assert [name for name, _ in told] == list(Settings.model_fields)
    flags = reference.worker_flags()
    assert [name for name, text in told if not text and not flags.get(name)] == [], "say what it is, in config.py"


def test_every_command_says_what_it_does() -> None:
    """And each of its options."""
    for words, command in reference.commands().items():
        assert command.help, words
        for param in command.params:
            assert param.param_type_name == "argument" or param.help, f"{words}: {param.name}"


def test_what_lists_and_shows_takes_json() -> None:
    """For programs: the commands that only tell something."""
    telling = [words for words in reference.commands() if words.split()[-1] in ("ls", "list", "show", "why", "top")]
    assert len(telling) > 8
    for words in telling:
        assert any("--json" in param.opts for param in reference.commands()[words].params), words


def test_the_index_names_every_page() -> None:
    """Those in docs/, and those elsewhere that are for users."""
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text)}
    pages = {path for path in documents() if (ROOT / "docs") in path.parents} - {ROOT / "docs/README.md"}
    assert pages - linked == set()


def test_links_lead_somewhere() -> None:
    """Files exist, and headings with the anchors that are named."""
    for path in documents():
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            found = (path.parent / file).resolve() if file else path
            assert found.exists(), f"{path.relative_to(ROOT)} links to {target}"
            if anchor:
                assert anchor in anchors(found), f"{path.relative_to(ROOT)} links to {target}"


def anchors(path: Path) -> set[str]:
    """As GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
