"""What a run has done, so that it survives being killed at any moment.

A folder beside the output, ``<output>.score``::

    lock            held while a process works on this output
    journal.jsonl   the head (input, models, options), then what was sent and what was flushed, and failed rows
    results-N.bin   answers as they came, appended by the N-th process that worked on the run

A record of results is a length, a CRC, a head and the reply's body. Answers are acknowledged to the broker only when
their bytes and the journal's mark over them are on disk; what lies behind the last mark comes again and is cut off.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

import msgspec
import numpy as np

from qworker.errors import OutputUnusable, RunBusy, RunChanged
from qworker.score.parts import Rows

_FRAME = struct.Struct("<III")  # bytes of the head, bytes of the body, CRC of both
FORMAT = 1
Head = Mapping[str, Any]


class OutputShape(msgspec.Struct, frozen=True, array_like=True):
    """One output of an answer: its shape without the rows."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class RecordHead(msgspec.Struct, frozen=True, array_like=True):
    """What is known of an answer without decoding it."""

    model: int
    part: int
    lo: int
    hi: int
    rows: bytes
    """Numbers of the rows: the first one as 8 bytes where they follow each other, else all of them."""
    outputs: tuple[OutputShape, ...]
    carried: bytes = b""
    """An Arrow stream of the columns that go through."""

    def row_numbers(self) -> Rows:
        found = np.frombuffer(self.rows, "<i8")
        count = self.hi - self.lo
        return found if len(found) == count else np.arange(found[0], found[0] + count, dtype=np.int64)


_decode_head = msgspec.msgpack.Decoder(RecordHead).decode


class Place(NamedTuple):
    """Where the record of an answer begins."""

    life: int
    at: int


def packed_rows(rows: Rows) -> bytes:
    """The row numbers of a record, short where they follow each other."""
    follow = int(rows[-1]) - int(rows[0]) + 1 == len(rows)
    return np.ascontiguousarray(rows[:1] if follow else rows, "<i8").tobytes()


@dataclass(frozen=True, slots=True)
class Failed:
    """A row that the model could not be run on."""

    model: int
    row: int
    code: str
    message: str
    key: str | int | None = None


@dataclass(slots=True)
class Done:
    """What a run has done so far, by model: parts that are done as a whole, and pieces of others."""

    whole: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    pieces: dict[tuple[int, int], list[tuple[int, int]]] = field(
        default_factory=dict[tuple[int, int], list[tuple[int, int]]]
    )
    rows: int = 0
    failed: int = 0

    def add(self, model: int, part: int, lo: int, hi: int, size: int) -> bool:
        """Rows ``lo`` to ``hi`` of a part of ``size`` rows are done; False where they were already."""
        left = self.left(model, part, size)
        if not any(a <= lo and hi <= b for a, b in left):
            return False
        if (lo, hi) == (0, size):
            _raise_flag(self.whole, model, part)
        else:
            self.pieces.setdefault((model, part), []).append((lo, hi))
        return True

    def left(self, model: int, part: int, size: int) -> list[tuple[int, int]]:
        """The stretches of a part that are not done."""
        if _has_flag(self.whole, model, part):
            return []
        found: list[tuple[int, int]] = []
        at = 0
        for lo, hi in sorted(self.pieces.get((model, part), ())):
            if at < lo:
                found.append((at, lo))
            at = max(at, hi)
        if at < size:
            found.append((at, size))
        return found


def _raise_flag(flags: dict[int, bytearray], model: int, part: int) -> None:
    found = flags.setdefault(model, bytearray())
    found.extend(bytes(max(0, part + 1 - len(found))))
    found[part] = 1


def _has_flag(flags: dict[int, bytearray], model: int, part: int) -> bool:
    found = flags.get(model)
    return found is not None and part < len(found) and bool(found[part])


class Journal:
    """One process's hold on a run's folder. ``with`` takes the lock and gives it back."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(output.name + ".score")
        self.head: dict[str, Any] = {}
        self.done = Done()
        self._sent: dict[int, bytearray] = {}
        self._sizes: dict[tuple[int, int], int] = {}  # of parts with more than one row
        self._life = 0
        self._lock: TextIO | None = None
        self._lines: TextIO | None = None
        self._results: BinaryIO | None = None
        self._marked: dict[int, int] = {}
        self.failed: list[Failed] = []

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Journal:
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise RunBusy(
                f"another process scores into {self.output} now: wait for it, or choose another output"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._lines, self._results):
            if file is not None:
                try:
                    file.close()
                except OSError:  # what could not be written was told when it was tried
                    os.close(os.open(os.devnull, os.O_RDONLY))
        if self._lock is not None:
            if not self.exists and self.folder.exists():
                shutil.rmtree(self.folder)
            self._lock.close()

    @property
    def exists(self) -> bool:
        """A run was begun here."""
        return self._path.exists()

    @property
    def _path(self) -> Path:
        return self.folder / "journal.jsonl"

    def begin(self, head: Head) -> None:
        """Begin a run: its head is on disk when this returns."""
        with writing(self._path):
            self._lines = self._path.open("x", encoding="utf-8")
        self.head = {"format": FORMAT, **head}
        self._line(self.head)
        self._life = 1
        self._open_results()
        self._sync_lines()
        with writing(self.folder):
            sync_folder(self.folder)

    def read(self) -> None:
        """Read what a former process did. Raises RunChanged when it is no journal of ours."""
        lines = self._parsed()
        if not lines or lines[0].get("format") != FORMAT:
            raise RunChanged(f"{self._path} is no journal of this version: delete {self.folder} to begin anew")
        self.head = lines[0]
        for line in lines[1:]:
            if "sent" in line:
                model, part, size = line["sent"]
                _raise_flag(self._sent, model, part)
                self._remember(model, part, size)
            elif "flushed" in line:
                self._marked[line["life"]] = line["flushed"]
            elif "failed" in line:
                self.failed.append(Failed(*line["failed"]))
        self._life = max([*self._marked, *self._lives()], default=0) + 1
        self._count()

    def resume(self) -> None:
        """Go on with what ``read`` found."""
        with writing(self._path):
            self._trim()
            self._lines = self._path.open("a", encoding="utf-8")
        self._open_results()

    # --- writing ---------------------------------------------------------------------------------

    def sent(self, model: int, part: int, size: int) -> None:
        """A part is about to be published. Survives our death, though not the machine's: then it is sent twice."""
        self._line({"sent": [model, part, size]})
        self._flush_lines()
        self._remember(model, part, size)

    def was_sent(self, model: int, part: int) -> bool:
        """A former process published it, or was about to."""
        return _has_flag(self._sent, model, part)

    @property
    def was_interrupted(self) -> bool:
        """A former process published something."""
        return bool(self._sent)

    def keep(self, records: Sequence[tuple[RecordHead, bytes]], failed: Sequence[Failed]) -> None:
        """Put answers and failed rows on disk. Blocks; once it returns they may be acknowledged.

        Raises OutputUnusable when the disk does not take them.
        """
        results = cast("BinaryIO", self._results)
        with writing(self.folder):
            for head, body in records:
                packed = msgspec.msgpack.encode(head)
                crc = zlib.crc32(body, zlib.crc32(packed))
                results.write(_FRAME.pack(len(packed), len(body), crc))
                results.write(packed)
                results.write(body)
            results.flush()
            os.fdatasync(results.fileno())
            for each in failed:
                self._line({"failed": [each.model, each.row, each.code, each.message[:2000], each.key]})
            self._line({"life": self._life, "flushed": results.tell()})
        self._sync_lines()
        self._marked[self._life] = results.tell()
        self.failed.extend(failed)

    def remove(self) -> None:
        """The run is finished, and its output in place: nothing of it is needed any more."""
        with writing(self.folder):
            self._path.unlink(missing_ok=True)
            shutil.rmtree(self.folder)

    # --- reading ---------------------------------------------------------------------------------

    def records(self, *, check: bool = False) -> Iterator[tuple[Place, RecordHead]]:
        """All answers that are marked: where they lie, and their heads. Each stretch of rows once."""
        seen = Done()
        for life in sorted(self._marked):
            for place, head in self._scan(life, check=check):
                if seen.add(head.model, head.part, head.lo, head.hi, self._size(head)):
                    yield place, head

    def results(self, life: int) -> Path:
        """The file of one life's results."""
        return self.folder / f"results-{life}.bin"

    def _remember(self, model: int, part: int, size: int) -> None:
        if size > 1:
            self._sizes[model, part] = size

    def load(self, file: BinaryIO, at: int) -> tuple[RecordHead, bytes]:
        """The record at ``at`` of a file of results."""
        file.seek(at)
        head_bytes, body_bytes, _ = _FRAME.unpack(file.read(_FRAME.size))
        return _decode_head(file.read(head_bytes)), file.read(body_bytes)

    def _scan(self, life: int, *, check: bool = False) -> Iterator[tuple[Place, RecordHead]]:
        path, end = self.results(life), self._marked[life]
        with writing(path), path.open("rb") as file:
            at = 0
            while at < end:
                frame = file.read(_FRAME.size)
                if len(frame) < _FRAME.size:
                    raise RunChanged(f"{path} is shorter than its journal says: delete {self.folder} to begin anew")
                head_bytes, body_bytes, crc = _FRAME.unpack(frame)
                packed = file.read(head_bytes)
                if check and zlib.crc32(file.read(body_bytes), zlib.crc32(packed)) != crc:
                    raise RunChanged(f"{path} is damaged at byte {at}: delete {self.folder} to begin anew")
                yield Place(life, at), _decode_head(packed)
                at += _FRAME.size + head_bytes + body_bytes
                file.seek(at)

    def _count(self) -> None:
        for _, head in self.records(check=True):
            self.done.add(head.model, head.part, head.lo, head.hi, self._size(head))
            self.done.rows += head.hi - head.lo
        self.done.failed = len({(each.model, each.row) for each in self.failed})

    def _size(self, head: RecordHead) -> int:
        return self._sizes.get((head.model, head.part), head.hi)

    # --- small change ----------------------------------------------------------------------------

    def _parsed(self) -> list[dict[str, Any]]:
        """The journal's lines. The last one may be torn: it was being written when the process died."""
        with writing(self._path):
            raw = self._path.read_text(encoding="utf-8").split("\n")
        found: list[dict[str, Any]] = []
        for number, line in enumerate(raw):
            try:
                if line:
                    found.append(json.loads(line))
            except ValueError as exc:
                if number < len(raw) - 1:
                    raise RunChanged(
                        f"{self._path} is damaged in line {number + 1}: delete {self.folder} to begin anew"
                    ) from exc
        return found

    def _trim(self) -> None:
        """Cut a torn last line off, or what we append would be one with it."""
        content = self._path.read_bytes()
        keep = content.rfind(b"\n") + 1
        if keep != len(content):
            os.truncate(self._path, keep)

    def _lives(self) -> list[int]:
        found = (path.stem.removeprefix("results-") for path in self.folder.glob("results-*.bin"))
        return [int(number) for number in found if number.isdecimal()]

    def _open_results(self) -> None:
        with writing(self.folder):
            self._results = self.results(self._life).open("ab")

    def _line(self, line: Head) -> None:
        lines = cast("TextIO", self._lines)
        with writing(self._path):
            lines.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _flush_lines(self) -> None:
        with writing(self._path):
            cast("TextIO", self._lines).flush()

    def _sync_lines(self) -> None:
        self._flush_lines()
        with writing(self._path):
            os.fdatasync(cast("TextIO", self._lines).fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Errors of the disk become OutputUnusable that says what to do."""
    try:
        yield
    except OSError as exc:
        what = {
            errno.ENOSPC: "the disk is full: free some space, then run the same command with --resume",
            errno.EDQUOT: "the disk quota is used up: free some space, then run the same command with --resume",
            errno.ENOENT: "make the folder first",
            errno.ENOTDIR: "make the folder first",
            errno.EACCES: "this user may not write there: give it the right, or choose another output",
            errno.EROFS: "the file system is read-only: choose another output",
        }.get(exc.errno or 0, "check the disk and the path")
        raise OutputUnusable(f"{path} cannot be written: {exc.strerror or exc}: {what}") from exc
