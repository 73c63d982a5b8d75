"""Where blobs lie: a folder, or a prefix in an object store. Names are digests, made here from nothing else.

All methods block: ``blobs`` calls them in threads.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qworker.errors import BlobUnavailable, ConfigError, InvalidInput, StoreError
from qworker.wire.reference import Part

_UNFINISHED = ".unfinished-"
_DIGEST_CHARACTERS = 64
_SECOND_LOOK = 0.05


@dataclass(frozen=True, slots=True)
class Entry:
    """One blob in a depot, or what a writer that died left behind."""

    name: str
    nbytes: int
    changed: float
    """Unix seconds at which it was last put."""


class Depot(Protocol):
    """A place for blobs. Whatever is wrong with it is a StoreError; reads have BlobUnavailable instead."""

    @property
    def prefix(self) -> str:
        """The URI of a blob is this and its digest, and nothing else."""
        ...

    def put(self, digest: str, part: Part) -> None:
        """Keep it from now on, also if it was there already. It is there whole, or not at all."""
        ...

    def get(self, digest: str, nbytes: int) -> NDArray[np.uint8]:
        """The bytes as they are, not verified. Raises InvalidInput when there are not ``nbytes`` of them: before
        any memory is taken for them."""
        ...

    def entries(self) -> Iterator[Entry]:
        """All that is there and ours."""
        ...

    def expire(self, entry: Entry) -> bool:
        """Remove it, unless it was put again since. Whether it is gone."""
        ...


class FolderDepot:
    """A folder that clients and workers both see under the same path."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.prefix = root.as_uri().rstrip("/") + "/"

    def put(self, digest: str, part: Part) -> None:
        aside = self._root / f"{_UNFINISHED}{secrets.token_hex(8)}"
        try:
            self._root.mkdir(mode=0o770, parents=True, exist_ok=True)
            file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
            try:
                with os.fdopen(file, "wb") as out:
                    out.write(part)
                    out.flush()
                    os.fsync(out.fileno())  # the job that names it is on the broker's disk, too
                os.replace(aside, self._root / digest)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
        except OSError as exc:
            raise StoreError(f"cannot write to the blob store {self._root}: {exc.strerror}: free or mend it") from exc

    def get(self, digest: str, nbytes: int) -> NDArray[np.uint8]:
        try:
            file = self._open(digest)
            try:
                return _read_whole(file, nbytes)
            finally:
                os.close(file)
        except OSError as exc:
            raise BlobUnavailable(f"a referenced tensor cannot be read: {exc.strerror}: send it again") from exc

    def _open(self, digest: str) -> int:
        # A link could lead out of the folder; without O_NONBLOCK a named pipe would wait for its writer for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(self._root / digest, flags)
        except FileNotFoundError:
            time.sleep(_SECOND_LOOK)  # ``expire`` may have it in its hands, and NFS is late with news
            return os.open(self._root / digest, flags)

    def entries(self) -> Iterator[Entry]:
        with _as_store_error(str(self._root)):
            if not self._root.is_dir():
                return
            with os.scandir(self._root) as found:
                for each in found:
                    if not _is_ours(each.name) or not each.is_file(follow_symlinks=False):
                        continue
                    try:
                        status = each.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield Entry(each.name, status.st_size, status.st_mtime)

    def expire(self, entry: Entry) -> bool:
        # Taken aside first: between a look and an unlink, somebody may put the same bytes again.
        path, aside = self._root / entry.name, self._root / f"{_UNFINISHED}{secrets.token_hex(8)}"
        with _as_store_error(str(self._root)):
            try:
                os.rename(path, aside)
                if aside.stat(follow_symlinks=False).st_mtime > entry.changed:
                    os.rename(aside, path)
                    return False
                aside.unlink()
            except FileNotFoundError:  # another worker tends the same folder
                return False
            return True


class ObjectDepot:
    """A prefix of an object store. ``store`` is one of obstore's, and has the prefix already."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self.prefix = prefix

    def put(self, digest: str, part: Part) -> None:
        obstore, failures = _obstore()
        with _as_store_error(self.prefix, failures):
            obstore.put(self._store, digest, part)

    def get(self, digest: str, nbytes: int) -> NDArray[np.uint8]:
        obstore, failures = _obstore()
        try:
            found = obstore.get(self._store, digest)
            _check_size(found.meta["size"], nbytes)
            content = np.frombuffer(found.bytes(), np.uint8) if nbytes else np.empty(0, np.uint8)
        except FileNotFoundError as exc:
            raise BlobUnavailable("a referenced tensor is not in the blob store: send it again") from exc
        except failures as exc:
            raise BlobUnavailable(f"the blob store cannot be read ({_first_line(exc)}): try again") from exc
        _check_size(content.nbytes, nbytes)
        return content

    def entries(self) -> Iterator[Entry]:
        obstore, failures = _obstore()
        with _as_store_error(self.prefix, failures):
            for page in obstore.list(self._store):
                for found in page:
                    if _is_ours(found["path"]):
                        yield Entry(found["path"], found["size"], found["last_modified"].timestamp())

    def expire(self, entry: Entry) -> bool:
        obstore, failures = _obstore()
        with _as_store_error(self.prefix, failures):
            try:
                if obstore.head(self._store, entry.name)["last_modified"].timestamp() > entry.changed:
                    return False
                obstore.delete(self._store, entry.name)
            except FileNotFoundError:  # another worker tends the same prefix
                return False
            return True


def _obstore() -> tuple[Any, tuple[type[Exception], ...]]:
    """obstore, which is optional, and what it raises."""
    return import_module("obstore"), (import_module("obstore.exceptions").BaseError, OSError)


def open_depot(place: str) -> FolderDepot | ObjectDepot:
    """The depot at ``place``: an absolute path, ``file:///path`` or ``s3://bucket/prefix``. Raises ConfigError.

    Endpoint, region and credentials of S3 come from the environment (``AWS_ENDPOINT_URL`` and the like), as
    for other programs; plain HTTP needs ``AWS_ALLOW_HTTP=true``.
    """
    scheme, found, rest = place.partition("://")
    if not found:
        scheme, rest = "file", place
    if scheme == "file" and rest.startswith("/") and os.path.normpath(rest) == rest.rstrip("/") != "":
        return FolderDepot(Path(rest))
    parts = rest.rstrip("/").split("/")
    if scheme == "s3" and all(part.strip(".") for part in parts) and not set(rest) & set("?#%@\\ "):
        return _open_s3(parts[0], "/".join(parts[1:]))
    raise ConfigError(
        "expected a blob store as an absolute path without '..' (/var/qworker/blobs) or as s3://bucket/prefix; found "
        f"{place!r}: correct it"
    )


def _open_s3(bucket: str, folder: str) -> ObjectDepot:
    try:
        stores: Any = import_module("obstore.store")
    except ImportError as exc:
        raise ConfigError(f"the blob store s3://{bucket} needs obstore: pip install 'qworker[s3]'") from exc
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    store = stores.S3Store(
        bucket,
        prefix=folder or None,
        client_options={"timeout": "60s", "connect_timeout": "5s", "allow_http": plain},
        retry_config={"max_retries": 3},
    )
    return ObjectDepot(store, f"s3://{bucket}/{folder}/" if folder else f"s3://{bucket}/")


def _read_whole(file: int, nbytes: int) -> NDArray[np.uint8]:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidInput("a referenced tensor is no regular file: put it there with a rename")
    _check_size(found.st_size, nbytes)
    content = np.empty(nbytes, np.uint8)
    at = 0
    while at < nbytes and (got := os.readv(file, [content[at:].data])):
        at += got
    _check_size(at, nbytes)
    return content


def _is_ours(name: str) -> bool:
    return name.startswith(_UNFINISHED) or (len(name) == _DIGEST_CHARACTERS and not set(name) - set("0123456789abcdef"))


def _check_size(found: int, nbytes: int) -> None:
    if found != nbytes:
        raise InvalidInput(f"a referenced tensor has {found} bytes; its ref says {nbytes}: correct the ref")


@contextmanager
def _as_store_error(where: str, failures: tuple[type[Exception], ...] = (OSError,)) -> Generator[None]:
    try:
        yield
    except failures as exc:
        raise StoreError(f"the blob store {where} fails: {_first_line(exc)}: free or mend it") from exc


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
