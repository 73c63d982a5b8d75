"""What a worker remembers over restarts: its history as one small file, and beside it a journal of its minutes.

The history makes a worker that starts rank models as the one before it did; the journal is what ``qworker history``
makes traces and plans from. Neither is worth a job: where they cannot be written, the worker says so once and goes on.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from qworker.policy.history import (
    JOURNAL_HEADER,
    CorruptHistory,
    Minute,
    StoredHistory,
    dump_history,
    journal_line,
    parse_history,
)
from qworker.worker.hot_zone import HotZone

log = structlog.get_logger(__name__)

JOURNAL_BYTES = 16 << 20
"""At this size a journal becomes ``.1``, and the former ``.1`` goes: some weeks of a busy worker."""


class HistoryFile:
    """Reads the history into the zone and writes it back. Owned here: whether the last write went well."""

    def __init__(self, path: Path | None, zone: HotZone, wall: Callable[[], float] = time.time) -> None:
        """``path`` None: nothing is kept."""
        self._path = path
        self._zone = zone
        self._wall = wall
        self._trouble: str | None = None

    async def restore(self) -> int:
        """Take over what was kept, if anything; how many models that were. A damaged file counts as none."""
        if self._path is None:
            return 0
        try:
            stored = await asyncio.to_thread(_read, self._path)
        except CorruptHistory as error:
            log.warning("history.corrupt", path=str(self._path), reason=str(error), advice="starting without one")
            return 0
        except OSError as error:
            log.warning("history.unreadable", path=str(self._path), reason=str(error), advice="starting without one")
            return 0
        if stored is None:
            return 0
        usages = stored.at(self._wall())
        self._zone.remember(usages)
        log.info("history.restored", path=str(self._path), models=len(usages))
        return len(usages)

    async def save(self, minutes: Sequence[Minute] = ()) -> None:
        """Write the history as it is now, and append ``minutes`` to the journal."""
        path = self._path
        if path is None:
            return
        text = dump_history(self._zone.history(), self._wall())  # on the loop: nobody else changes it meanwhile
        try:
            await asyncio.to_thread(_write, path, text, minutes)
        except OSError as error:
            if str(error) != self._trouble:
                log.warning("history.unwritable", path=str(path), reason=str(error), advice="set history to a file")
            self._trouble = str(error)
        else:
            self._trouble = None


def journal_of(path: Path) -> Path:
    """The journal beside a history file."""
    return path.with_suffix(".minutes.csv")


def journals_of(path: Path) -> list[Path]:
    """The journals that are there beside a history file, the older one first."""
    journal = journal_of(path)
    return [each for each in (_older(journal), journal) if each.exists()]


def plan_of(path: Path) -> Path:
    """The plan of preloads beside a history file."""
    return path.with_suffix(".plan.toml")


def _older(journal: Path) -> Path:
    return journal.with_suffix(".csv.1")


def _read(path: Path) -> StoredHistory | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise CorruptHistory("expected text in UTF-8, found other bytes: the file was damaged") from error
    return parse_history(text)


def _write(path: Path, text: str, minutes: Sequence[Minute]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.new")  # workers of one name must not write into one another's
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    if minutes:
        _append(journal_of(path), minutes)


def _append(journal: Path, minutes: Sequence[Minute]) -> None:
    if journal.exists() and journal.stat().st_size >= JOURNAL_BYTES:
        journal.replace(_older(journal))
    lines = "".join(journal_line(row) + "\n" for row in minutes)
    with journal.open("a", encoding="utf-8") as file:
        file.write(lines if file.tell() else f"{JOURNAL_HEADER}\n{lines}")
