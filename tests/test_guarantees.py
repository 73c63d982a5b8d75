"""docs/guarantees.md: every promise has a mechanism and tests, and the tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| Promise"))
]


def names_of(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_there_are_rows() -> None:
    """The page is read as it is meant."""
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_each_promise_has_a_mechanism_and_tests_that_exist(row: list[str]) -> None:
    """Three cells, and each name in the last one is a test of that file."""
    assert len(row) == 3, row
    promise, mechanism, proof = row
    assert promise
    assert mechanism
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", proof)
    assert named, "no test is named"
    assert re.sub(r"`[^`]+`", "", proof).replace(",", "").strip() == "", "something else than tests is named"
    for file, name in named:
        assert name in names_of(ROOT / file), f"{file} has no {name}"


def test_links_lead_somewhere() -> None:
    """Each relative link is a file of the repository."""
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
