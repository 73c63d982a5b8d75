# ruff: noqa: T201  # a script that talks to a terminal
"""Fuzzes the frame reader:  python -m tests.broker.fuzz_frames [--minutes N] [--seed N]

Takes streams that a broker could send, damages them, and reads them in pieces. Whatever comes, the reader
either goes on or is ``broken`` by a FrameError, in the same way however the bytes are cut; nothing else is
raised, nothing hangs, and nothing of the announced size is taken before it has come. Streams that show
something new (lines of the reader that none has reached before) are kept in ``corpus/``, and
``test_corpus.py`` reads them again in each run of the tests.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from qworker.broker.fast import fields, frames
from qworker.broker.fast.frames import Called, Delivered, Event, FrameReader, Returned
from tests.broker.wire_samples import seeds

CORPUS = Path(__file__).with_name("corpus")
MAX_STREAM = 4096
MAX_KEPT = 300
MAX_GROWTH = 96 << 20
"""Three readers hold the 16 MiB that one may take in advance, twice while they grow."""
SLOW_SECONDS = 1.0

_INTERESTING = (0, 1, 2, 3, 8, 0x7F, 0x80, 0xCE, 0xFF)
_MODULES = {frames.__file__, fields.__file__}


def read(stream: bytes, cuts: list[int] | None = None) -> tuple[list[str], str | None]:
    """What a reader makes of ``stream`` in these pieces: its events, and how it broke."""
    reader = FrameReader()
    events: list[Event] = []
    at = 0
    for cut in [*(cuts or []), len(stream)]:
        events += reader.feed(stream[at:cut])
        at = cut
    broken = None if reader.broken is None else re.sub(r" at 0x[0-9a-f]+", "", str(reader.broken))  # pamqp's objects
    return [described(event) for event in events], broken


def described(event: Event) -> str:
    """All of an event; looks into its headers, which are decoded late."""
    if isinstance(event, Delivered | Returned):
        properties = event.properties
        headers, body = dict(properties.headers), hashlib.sha256(event.body).hexdigest()
        return f"{type(event).__name__} {event.channel} {event.routing_key!r} {properties!r} {headers!r} {body}"
    if isinstance(event, Called):
        return f"{event.channel} {event.method.name}"
    return repr(event)


def check(stream: bytes, chance: random.Random) -> None:
    """Raises AssertionError when the reader does what it must not."""
    started = time.process_time()
    whole = read(stream)
    cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(1, 6)))
    in_pieces = read(stream, cuts)
    assert in_pieces == whole, f"cut at {cuts} it reads {in_pieces}, whole it reads {whole}"
    assert time.process_time() - started < SLOW_SECONDS, "it took too long"


def mutated(stream: bytes, others: list[bytes], chance: random.Random) -> bytes:
    out = bytearray(stream)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(7):
            case 0 if out:
                out[at % len(out)] = chance.choice(_INTERESTING)
            case 1 if out:
                out[at % len(out)] ^= 1 << chance.randrange(8)
            case 2:
                del out[at : at + chance.choice((1, 2, 4, 8, 40))]
            case 3:
                out[at:at] = os.urandom(chance.choice((1, 2, 4, 8)))
            case 4:
                other = chance.choice(others)
                start = chance.randrange(len(other) + 1)
                out[at:at] = other[start : start + chance.randrange(200)]
            case 5:
                out[at : at + 4] = chance.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, len(out))).to_bytes(4, "big")
            case _:
                out += chance.choice(others)
    return bytes(out[:MAX_STREAM])


class Lines:
    """The lines of the reader that have been reached. One that is reached again costs nothing."""

    def __init__(self) -> None:
        self._seen: set[tuple[CodeType, int]] = set()

    def new_in(self, work: Callable[[], object]) -> int:
        """How many ``work`` reaches for the first time."""
        before = len(self._seen)

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in _MODULES:
                return None
            if event == "line":
                self._seen.add((frame.f_code, frame.f_lineno))
            return trace

        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)
        return len(self._seen) - before


def kept() -> Iterator[bytes]:
    for path in sorted(CORPUS.glob("*.bin")):
        yield path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    CORPUS.mkdir(exist_ok=True)
    lines = Lines()
    known = [*seeds(), *kept()]
    for stream in known:
        lines.new_in(lambda stream=stream: read(stream))
    tracemalloc.start(1)
    until, done, new = time.monotonic() + chosen.minutes * 60, 0, 0
    while time.monotonic() < until:
        stream = mutated(chance.choice(known), known, chance)
        try:
            if tracemalloc.get_traced_memory()[0] > MAX_GROWTH // 4:
                gc.collect()  # a reader that broke holds itself, by the traceback of its error
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            if lines.new_in(lambda stream=stream: read(stream)) and len(known) < MAX_KEPT:
                known.append(stream)
                new += 1
                (CORPUS / f"{hashlib.sha256(stream).hexdigest()[:16]}.bin").write_bytes(stream)
            check(stream, chance)
            assert tracemalloc.get_traced_memory()[1] - held < MAX_GROWTH, "it took memory for what had not come"
        except BaseException:
            print(f"seed {chosen.seed}, stream {done}: {stream.hex()}")
            raise
        done += 1
    print(f"{done} streams in {chosen.minutes:g} minutes, {new} kept, seed {chosen.seed}: nothing found")


if __name__ == "__main__":
    main()
