"""The blob store: tensors that are too large for a message, read and written for it by their digest.

The one rule that keeps it safe: **nothing of a message becomes a path or a URL.** A ref's ``uri`` must be, to the
letter, a prefix that the operator allows followed by the ref's own digest; what is then opened is made from that
digest. So there is nothing to traverse, no host to name and no redirect to follow.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
import structlog
from numpy.typing import NDArray

from qworker.errors import InvalidInput, StoreError
from qworker.store.depots import Depot, open_depot
from qworker.wire.messages import BlobRef, Tensor
from qworker.wire.reference import Part, blob_part, to_send_apart

log = structlog.get_logger(__name__)

DEFAULT_LIMIT = 8 << 20
DEFAULT_TTL = 86_400.0
DEFAULT_QUOTA = 10 << 30
_THREADS = 4
_COUNT_AGAIN = 60.0
"""Seconds for which our own count of a depot is good: others write to it too."""
_TENDING_SHARE, _TENDING_LEAST, _TENDING_MOST = 0.05, 0.2, 600.0


class Blobs:
    """Blobs in ``depots``: all are read from, the first one is written to.

    ``memory`` bounds the bytes of fetched blobs that are alive at once, whoever holds them. ``async with`` also
    removes what is older than ``ttl``, for as long as it is open. Owned by the event loop, except for the count of
    the depot, which the pool's threads take turns at.
    """

    def __init__(
        self,
        depots: Sequence[Depot],
        *,
        quota: int | None = None,
        ttl: float = DEFAULT_TTL,
        memory: int | None = None,
    ) -> None:
        self._allowed = {depot.prefix: depot for depot in depots}
        self._own = depots[0]
        self._quota = quota
        self._ttl = ttl
        self._room = _Room(memory)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="blob")
        self._count = _Count()
        self._tasks = asyncio.TaskGroup()
        self._tending: asyncio.Task[None] | None = None

    @property
    def prefix(self) -> str:
        return self._own.prefix

    async def __aenter__(self) -> Blobs:
        await self._tasks.__aenter__()
        self._tending = self._tasks.create_task(self._tend(), name="blobs")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tending is not None:
            self._tending.cancel()
        self.close()
        await self._tasks.__aexit__(kind, exc, trace)

    def close(self) -> None:
        """End the threads. What they still do is finished."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- reading ---------------------------------------------------------------------------------

    async def fetch(self, refs: Iterable[BlobRef]) -> Mapping[BlobRef, memoryview]:
        wanted = {ref: self._depot(ref) for ref in refs}
        nbytes = sum(ref.nbytes for ref in wanted)
        await self._room.take(nbytes)
        arrays: list[NDArray[np.uint8]] = []
        try:
            loop = asyncio.get_running_loop()
            for ref, depot in wanted.items():
                arrays.append(await loop.run_in_executor(self._pool, _read, depot, ref))
        except BaseException:
            self._room.give(nbytes)
            raise
        for ref, array in zip(wanted, arrays, strict=True):
            # Views of it go into jobs and batches: it is free when the last of them is.
            weakref.finalize(array, self._room.give_soon, loop, ref.nbytes).atexit = False
        return {ref: array.data.toreadonly() for ref, array in zip(wanted, arrays, strict=True)}

    def _depot(self, ref: BlobRef) -> Depot:
        """Where ``ref`` may be read from. Raises InvalidInput for anywhere else, and never repeats its URI."""
        prefix = ref.uri.removesuffix(ref.sha256)
        depot = self._allowed.get(prefix) if prefix != ref.uri else None
        if depot is None:
            raise InvalidInput(
                "expected the uri of a ref to be a blob store that is allowed here followed by the ref's sha256; found "
                "another one: put the tensor where the operator says"
            )
        return depot

    # --- writing ---------------------------------------------------------------------------------

    async def send(self, tensors: Iterable[Tensor], limit: int) -> tuple[Tensor, ...]:
        tensors = tuple(tensors)
        apart = to_send_apart(tensors, limit)
        if not apart:
            return tensors
        loop = asyncio.get_running_loop()
        sent: list[Tensor] = []
        for tensor in tensors:
            if tensor.name in apart:
                ref = await loop.run_in_executor(self._pool, self._write, tensor)
                tensor = Tensor(tensor.name, tensor.datatype, tensor.array, ref)  # noqa: PLW2901
            sent.append(tensor)
        return tuple(sent)

    def _write(self, tensor: Tensor) -> BlobRef:
        part: Part = blob_part(tensor)
        nbytes = len(part)
        self._check_quota(nbytes)
        digest = hashlib.sha256(part).hexdigest()
        self._own.put(digest, part)
        self._count.add(nbytes)
        return BlobRef(self._own.prefix + digest, digest, nbytes)

    def _check_quota(self, more: int) -> None:
        if self._quota is None:
            return
        held = self._count.now(self._own)
        if held + more > self._quota:
            self._sweep()
            held = self._count.anew(self._own)
        if held + more > self._quota:
            raise StoreError(
                f"the blob store has {held} of {self._quota} bytes and was asked to take {more} more: send less, wait "
                "until older ones expire, or raise blob_quota"
            )

    # --- tending ---------------------------------------------------------------------------------

    async def _tend(self) -> None:
        pause = min(max(self._ttl * _TENDING_SHARE, _TENDING_LEAST), _TENDING_MOST)
        loop = asyncio.get_running_loop()
        while True:
            try:
                gone, nbytes = await loop.run_in_executor(self._pool, self._sweep)
                if gone:
                    log.info("blobs.expired", blobs=gone, nbytes=nbytes)
            except StoreError as error:
                log.warning("blobs.not_tended", reason=str(error))
            await asyncio.sleep(pause)

    def _sweep(self) -> tuple[int, int]:
        """Remove what has expired; how many blobs that were, and their bytes."""
        oldest = time.time() - self._ttl
        gone = [entry for entry in self._own.entries() if entry.changed < oldest and self._own.expire(entry)]
        return len(gone), sum(entry.nbytes for entry in gone)


class _Count:
    """About how many bytes a depot has: counted now and then, and what we put since. Called from threads; a lost
    update makes it wrong by a blob until it is counted again."""

    def __init__(self) -> None:
        self._held = 0
        self._until = 0.0

    def now(self, depot: Depot) -> int:
        return self._held if time.monotonic() < self._until else self.anew(depot)

    def anew(self, depot: Depot) -> int:
        self._held = sum(entry.nbytes for entry in depot.entries())
        self._until = time.monotonic() + _COUNT_AGAIN
        return self._held

    def add(self, nbytes: int) -> None:
        self._held += nbytes


class _Room:
    """Bytes of fetched blobs that are alive; who finds no room waits in turn. Event loop only, but for ``give_soon``.

    One that is larger than all there is gets in when nothing else is there: its job was let in by its size already.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int) -> None:
        if not self._waiting and self._fits(nbytes):
            self._held += nbytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(nbytes)
            raise

    def give(self, nbytes: int) -> None:
        self._held -= nbytes
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.done():
                if not self._fits(wanted):
                    return
                self._held += wanted
                turn.set_result(None)
            self._waiting.popleft()

    def give_soon(self, loop: asyncio.AbstractEventLoop, nbytes: int) -> None:
        """``give``, from whatever thread drops the last view."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self.give, nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._most is None or self._held == 0 or self._held + nbytes <= self._most


def _read(depot: Depot, ref: BlobRef) -> NDArray[np.uint8]:
    content = depot.get(ref.sha256, ref.nbytes)
    if hashlib.sha256(content.data).hexdigest() != ref.sha256:
        raise InvalidInput(
            "a referenced tensor is not what its ref says: the SHA-256 of its bytes is another one: send it again"
        )
    return content


def open_blobs(
    place: str | None,
    more: Sequence[str] = (),
    *,
    quota: int = DEFAULT_QUOTA,
    ttl: float = DEFAULT_TTL,
    memory: int | None = None,
) -> Blobs | None:
    """The blob store at ``place`` that may also read from ``more``; None without a place. Raises ConfigError."""
    if not place:
        return None
    return Blobs([open_depot(each) for each in (place, *more)], quota=quota, ttl=ttl, memory=memory)
