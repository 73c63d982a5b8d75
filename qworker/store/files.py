"""Reading and writing the store's files: checked while read, on disk when written."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from qworker.errors import CorruptModel, StoreError
from qworker.store.card import FileEntry

_CHUNK: Final = 1 << 20


def copy_in(source: Path, target: Path) -> FileEntry:
    """Copy ``source`` to the new file ``target`` until it is on disk; its digest is of what was written.

    Raises StoreError when either side fails.
    """
    digest = hashlib.sha256()
    nbytes = 0
    what = f"{source} cannot be copied into the store"
    with disk_errors(what), source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            writer.write(chunk)
            nbytes += len(chunk)
        _flush(writer)
    return FileEntry(name=target.name, sha256=digest.hexdigest(), nbytes=nbytes)


def write_new(target: Path, content: bytes) -> None:
    """Write the new file ``target`` until it is on disk. Raises StoreError."""
    with disk_errors(f"{target} cannot be written"), target.open("xb") as writer:
        writer.write(content)
        _flush(writer)


def hash_and_flush(path: Path) -> FileEntry:
    """The entry of a file that is already in its place, once it is on disk. Raises StoreError."""
    with disk_errors(f"{path} cannot be written"), path.open("rb") as file:
        digest = _digest(file)
        os.fsync(file.fileno())
        return FileEntry(name=path.name, sha256=digest, nbytes=file.tell())


def read_verified(path: Path, entry: FileEntry, *, root: Path, advice: str) -> bytes:
    """The bytes of ``path``, equal to ``entry``. Raises CorruptModel, StoreError, FileNotFoundError."""
    with _open_sized(path, entry, root, advice) as file:
        # one allocation of the right size, hashed where it lies: no second copy of a large model
        content = file.read(entry.nbytes)
        _check(path, entry, hashlib.sha256(content).hexdigest(), len(content), advice)
        return content


def verify(path: Path, entry: FileEntry, *, root: Path, advice: str) -> None:
    """Read ``path`` and compare it with ``entry``, keeping nothing. Raises like ``read_verified``."""
    with _open_sized(path, entry, root, advice) as file:
        digest = _digest(file)
        _check(path, entry, digest, file.tell(), advice)


def open_regular(path: Path, root: Path) -> BinaryIO:
    """Open a plain file that lies inside ``root``. Raises CorruptModel when it is none or leads out of there.

    Non-blocking, so that a pipe in a file's place does not hang the reader.
    """
    real = path.resolve(strict=True)
    if not real.is_relative_to(root.resolve()):
        raise CorruptModel(f"{path} leads out of the store, to {real}: remove the link and register the model again")
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptModel(f"{path} is not a plain file: remove it and register the model again")
    return os.fdopen(descriptor, "rb")


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(what: str, *, pass_missing: bool = False) -> Generator[None]:
    """Turn errors of the disk into StoreError: ``what`` failed, why, and what to do.

    With ``pass_missing`` a file that is not there stays a FileNotFoundError: the caller knows what it means.
    """
    try:
        yield
    except OSError as exc:
        if pass_missing and isinstance(exc, (FileNotFoundError, NotADirectoryError)):
            raise FileNotFoundError(*exc.args) from exc
        where = f" ({exc.filename})" if exc.filename else ""
        raise StoreError(f"{what}: {exc.strerror or exc}{where}: {_ADVICE.get(exc.errno or 0, _ASK)}") from exc


_ASK: Final = "check the disk and the path"
_ADVICE: Final = {
    errno.ENOSPC: "the disk is full: free some space, or remove models with `qworker models remove`",
    errno.EDQUOT: "the disk quota is used up: free some space, or remove models with `qworker models remove`",
    errno.EROFS: "the file system is read-only: mount it for writing, or register on a machine that can write",
    errno.EACCES: "this user may not: give it the right, or use another --store",
    errno.EPERM: "this user may not: give it the right, or use another --store",
    errno.ENOENT: "check that the path exists",
    errno.ENOTDIR: "a file lies where a folder is needed: check the path",
    errno.EISDIR: "a folder lies where a file is needed: check the path",
    errno.EIO: "the disk has an error: check its log",
    errno.ENOLCK: "the file system has no locks: use one that has them (local disk, NFS 4)",
    errno.EOPNOTSUPP: "the file system has no locks: use one that has them (local disk, NFS 4)",
}


@contextmanager
def _open_sized(path: Path, entry: FileEntry, root: Path, advice: str) -> Generator[BinaryIO]:
    with disk_errors(f"{path} cannot be read", pass_missing=True), open_regular(path, root) as file:
        found = os.fstat(file.fileno()).st_size
        if found != entry.nbytes:
            raise CorruptModel(f"{path} has {found} bytes; its card says {entry.nbytes}: {advice}")
        yield file


def _check(path: Path, entry: FileEntry, digest: str, nbytes: int, advice: str) -> None:
    if nbytes != entry.nbytes or digest != entry.sha256:
        raise CorruptModel(f"{path} has the sha256 {digest[:16]}...; its card says {entry.sha256[:16]}...: {advice}")


def _digest(file: Any) -> str:  # any binary file will do; BinaryIO does not promise the readinto that it has
    return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(writer: BinaryIO) -> None:
    writer.flush()
    os.fsync(writer.fileno())
