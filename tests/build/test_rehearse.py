"""A model is loaded in a process of its own first: what ends that process is told, and ends nobody else."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from qworker.build.rehearse import Rehearsal
from qworker.errors import LoadFailed, StoreError
from tests.e2e.models import model_file, put, replace
from tests.support import deadly
from tests.support.models import identity, missing_op


async def test_a_good_model_passes(tmp_path: Path) -> None:
    """Nothing is said of it, and nothing is left behind."""
    await Rehearsal(tmp_path, 1, 60)(put(tmp_path, "good", identity()))


async def test_what_does_not_load_is_told_with_the_reason(tmp_path: Path) -> None:
    """In the library's words."""
    with pytest.raises(LoadFailed, match=r"bad fails in a process of its own.*Levitate"):
        await Rehearsal(tmp_path, 1, 60)(put(tmp_path, "bad", missing_op(), loads=False))


async def test_what_ends_its_process_is_told_with_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real SIGKILL, in the child."""
    switch = tmp_path / "switch"
    switch.touch()
    for name, text in deadly.environment(switch).items():
        monkeypatch.setenv(name, text)
    card = put(tmp_path / "store", "deadly", identity())
    with pytest.raises(LoadFailed, match=signal.SIGKILL.name):
        await Rehearsal(tmp_path / "store", 1, 60)(card)
    switch.unlink()
    await Rehearsal(tmp_path / "store", 1, 60)(card)


async def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    """No Python starts in a millisecond; the child is gone with its time."""
    card = put(tmp_path, "good", identity())
    with pytest.raises(LoadFailed, match=r"within 0\.001 s"):
        await Rehearsal(tmp_path, 1, 0.001)(card)
    assert not [each for each in psutil.Process().children() if "rehearse" in " ".join(each.cmdline())]


async def test_bytes_that_are_not_those_of_the_card_are_not_loaded(tmp_path: Path) -> None:
    """They are no fault of the model's: nothing was loaded of them."""
    card = put(tmp_path, "good", identity())
    replace(model_file(tmp_path, "good"), identity()[:-1])
    with pytest.raises(StoreError, match="could not be read"):
        await Rehearsal(tmp_path, 1, 60)(card)
