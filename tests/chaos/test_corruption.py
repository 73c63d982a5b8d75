"""Whatever is wrong with a model, at whatever stage of its load it shows: a typed failure, and every byte is back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import models
from tests.e2e.caller import Caller
from tests.e2e.conftest import caller, fleet, made_up_store
from tests.e2e.fleet import Fleet
from tests.e2e.models import MIB, inputs_of, model_file, put, replace
from tests.support.models import missing_op
from tests.support.waiting import wait_until_sync

__all__ = ["caller", "fleet", "made_up_store"]
pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

BUDGET = 64 * MIB


def _file(store: Path, name: str) -> tuple[Path, bytes]:
    put(store, name, models.adding(len(name)))
    path = model_file(store, name)
    return path, path.read_bytes()


def card_that_is_no_json(store: Path, name: str) -> None:
    path, _ = _file(store, name)
    replace(path.with_name("card.json"), b'{"model": "')


def card_of_another_model(store: Path, name: str) -> None:
    path, _ = _file(store, name)
    card = path.with_name("card.json")
    replace(card, card.read_bytes().replace(name.encode(), b"another"))


def file_that_is_missing(store: Path, name: str) -> None:
    path, _ = _file(store, name)
    path.unlink()


def file_that_is_cut(store: Path, name: str) -> None:
    path, content = _file(store, name)
    replace(path, content[:-5])


def file_that_is_too_long(store: Path, name: str) -> None:
    path, content = _file(store, name)
    replace(path, content + b"x")


def file_with_a_flipped_bit(store: Path, name: str) -> None:
    path, content = _file(store, name)
    replace(path, content[:40] + bytes([content[40] ^ 1]) + content[41:])


def file_that_is_a_pipe(store: Path, name: str) -> None:
    path, _ = _file(store, name)
    path.unlink()
    os.mkfifo(path)


def bytes_that_are_no_model(store: Path, name: str) -> None:
    put(store, name, b"as the card says, and no model" * 20, loads=False)


def model_that_does_not_load(store: Path, name: str) -> None:
    put(store, name, missing_op(), loads=False)


def model_larger_than_the_budget(store: Path, name: str) -> None:
    put(store, name, models.adding(3), resident_bytes=BUDGET + 1)


STAGES: list[Callable[[Path, str], None]] = [
    card_that_is_no_json,
    card_of_another_model,
    file_that_is_missing,
    file_that_is_cut,
    file_that_is_too_long,
    file_with_a_flipped_bit,
    file_that_is_a_pipe,
    bytes_that_are_no_model,
    model_that_does_not_load,
    model_larger_than_the_budget,
]
CODES = {"model_larger_than_the_budget": "model_too_large"}


def test_corruption_at_every_stage_of_a_load_returns_every_byte(fleet: Fleet, caller: Caller) -> None:
    """Each broken model is answered for by name; none leaves a byte booked, and a good one is served at the end."""
    names = {breaks.__name__.replace("_", "-"): breaks for breaks in STAGES}
    for name, breaks in names.items():
        breaks(fleet.store, name)
    fleet.start(1, memory=str(BUDGET))
    (worker,) = fleet.workers
    jobs = {name: caller.job(name, inputs_of("echo", 1)) for name in names}
    replies = caller.wait(jobs.values(), 60)
    found = {name: replies[job].code for name, job in jobs.items()}
    assert found == {name: CODES.get(breaks.__name__, "model_unavailable") for name, breaks in names.items()}
    ledger: dict[str, Any] = wait_until_sync(
        lambda: (state := worker.state())["ledger"]["held"] == 0 and not state["models"] and state["ledger"],
        what=f"no byte is booked: {worker.state()['ledger']}",
    )
    assert ledger["peak"] <= BUDGET
    assert caller.call("echo", inputs_of("echo", 2)).code == "ok"
    fleet.finish(errors_allowed=["model.load_failed", "model.refused"])
