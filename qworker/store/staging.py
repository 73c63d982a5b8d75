"""Publishing a version: everything is written out of sight, the card last, and shown by one rename."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from qworker.errors import StoreError
from qworker.store.card import Card, FileEntry
from qworker.store.files import copy_in, disk_errors, hash_and_flush, sync_folder, write_new

if TYPE_CHECKING:
    from qworker.store.local import LocalStore

_CARD: Final = "card.json"
_TRIES: Final = 20


class Published(NamedTuple):
    """A version that the store has now; ``fresh`` is False when it had the same files before."""

    card: Card
    fresh: bool


class Staging:
    """A folder of one publish. Whatever is in it at the end of the ``with`` block is deleted.

    The lock beside it tells the living from the dead: what a killed process left behind is deleted by the
    next one that stages.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._folder: Path | None = None
        self._lock = -1

    @property
    def folder(self) -> Path:
        assert self._folder is not None, "enter the staging first"
        return self._folder

    def __enter__(self) -> Staging:
        incoming = self._store.incoming
        with disk_errors(f"the store {self._store.root} cannot be written"):
            incoming.mkdir(parents=True, exist_ok=True)
            _clear_leftovers(incoming)
            folder, self._lock = _locked_name(incoming)
            self._folder = folder
            try:
                folder.mkdir()
            except OSError:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            _lock_path(self.folder).unlink()
        os.close(self._lock)

    def add(self, name: str, source: Path) -> FileEntry:
        """Copy a file in. Raises StoreError (full, read-only, the source cannot be read)."""
        return copy_in(source, self.folder / name)

    def adopt(self, name: str) -> FileEntry:
        """The entry of a file that somebody else wrote into the folder."""
        return hash_and_flush(self.folder / name)

    def publish(self, draft: Card, *, choose_version: bool = False) -> Published:
        """Show the staged files as a version of ``draft.model``; ``created`` is set here.

        The version is the draft's, or with ``choose_version`` the next free number. When the draft's
        version is there already with the same files, nothing changes. With other files: StoreError.
        """
        with disk_errors(f"the store {self._store.root} cannot be written"):
            for _ in range(_TRIES):
                version = self._store.next_version(draft.model) if choose_version else draft.version
                card = self._write_card(draft, version)
                if self._show(card):
                    return Published(card, fresh=True)
                if not choose_version:
                    return Published(self._same_as_there(card), fresh=False)
        raise StoreError(f"{draft.model}: other registrations took {_TRIES} versions meanwhile: try again")

    def _write_card(self, draft: Card, version: str) -> Card:
        created = self._store.next_created(draft.model, datetime.now(UTC))
        card = Card.model_validate(draft.model_dump() | {"version": version, "created": created})
        aside = self.folder / f"{_CARD}.part"
        aside.unlink(missing_ok=True)
        write_new(aside, card.model_dump_json(indent=2).encode())
        os.replace(aside, self.folder / _CARD)
        sync_folder(self.folder)
        return card

    def _show(self, card: Card) -> bool:
        """Move the folder to its place; False when that is taken."""
        target = self._store.version_folder(card.model, card.version)
        for _ in range(_TRIES):
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.parent.is_symlink():
                raise StoreError(f"{target.parent} is a link: a model's folder must lie in the store, remove the link")
            try:
                os.rename(self.folder, target)
            except FileNotFoundError:  # the last version was removed just now, and its folder with it
                continue
            except OSError as exc:
                if exc.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                    return False
                raise
            for folder in (target.parent, target.parent.parent):
                sync_folder(folder)
            return True
        raise StoreError(f"{target} cannot be written: its folder keeps being removed: try again")

    def _same_as_there(self, card: Card) -> Card:
        folder = self._store.version_folder(card.model, card.version)
        if not (folder / _CARD).exists():
            raise StoreError(
                f"{folder} is in the way, without a card: remove it "
                f"(`qworker models remove {card.model} --version {card.version}`)"
            )
        there = self._store.card(card.model, card.version)
        if there.given_files != card.given_files:
            raise StoreError(
                f"version {card.version} of {card.model} is registered already, with other files: choose another "
                f"--version, or remove that one first (`qworker models remove {card.model} --version {card.version}`)"
            )
        return there


def _locked_name(incoming: Path) -> tuple[Path, int]:
    """A new name in ``incoming`` whose lock we hold."""
    for _ in range(_TRIES):
        folder = incoming / secrets.token_hex(8)
        descriptor = os.open(_lock_path(folder), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        if _try_lock(descriptor, _lock_path(folder)):
            return folder, descriptor
        os.close(descriptor)  # somebody who clears leftovers was faster
    raise StoreError(f"no lock could be taken in {incoming}: try again")


def _clear_leftovers(incoming: Path) -> None:
    """Delete what publishers that no longer live have left."""
    names = {path.name for path in incoming.iterdir()}
    for lock in sorted(name for name in names if name.endswith(".lock")):
        # another user's leftovers are not ours to delete
        with suppress(OSError):
            descriptor = os.open(incoming / lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _try_lock(descriptor, incoming / lock):
                    shutil.rmtree(incoming / lock.removesuffix(".lock"), ignore_errors=True)
                    (incoming / lock).unlink()
            finally:
                os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    """Lock an open file; False when somebody holds it, or when it is no longer the file at ``path``."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
