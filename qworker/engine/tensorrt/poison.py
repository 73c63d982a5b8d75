"""Inputs that broke the device, remembered by fingerprint beyond the process that they ended.

Nobody knows before the third time whether it was the input or the device: so an input that ended two
processes is refused, and the attempts that the broker counts do the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from qworker.errors import InferenceFailed
from qworker.wire.messages import Tensor

LIMIT: Final = 2
_MOST_BYTES: Final = 4 << 20
"""At once; a longer book is read in pieces."""


def fingerprint(model: str, inputs: Sequence[Tensor]) -> str:
    """The same for the same inputs to the same model."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(model.encode())
    for each in sorted(inputs, key=lambda one: one.name):
        digest.update(repr((each.name, each.datatype, each.array.shape)).encode())
        digest.update(each.array.tobytes())
    return digest.hexdigest()


class PoisonBook:
    """A file of one line a broken device; any number of processes append. Without a path it forgets at the end."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._times: Counter[str] = Counter()
        self._read = 0

    def refresh(self) -> None:
        """Read what other processes have written since. A line that cannot be read is none."""
        if self._path is None:
            return
        with self._lock, suppress(FileNotFoundError):
            if os.stat(self._path).st_size == self._read:
                return
            with self._path.open("rb") as file:
                file.seek(self._read)
                lines = file.read(_MOST_BYTES)
            self._read += len(lines)
            for line in lines.splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    self._times[str(json.loads(line)["fingerprint"])] += 1

    def check(self, model: str, inputs: Sequence[Tensor]) -> None:
        """Raises InferenceFailed for inputs that have broken the device often enough."""
        self.refresh()
        if not self._times:  # nearly always: a fingerprint costs a pass over the inputs
            return
        mark = fingerprint(model, inputs)
        if self._times[mark] >= LIMIT:
            raise InferenceFailed(
                f"these inputs broke the device {self._times[mark]} times (fingerprint {mark}): look at them, and "
                "build the plan again if they are what the model takes"
            )

    def add(self, model: str, inputs: Sequence[Tensor], reason: str) -> str:
        """These inputs ran when the device broke; their fingerprint."""
        mark = fingerprint(model, inputs)
        if self._path is None:
            self._times[mark] += 1
        else:
            line = json.dumps({"fingerprint": mark, "model": model, "reason": reason}) + "\n"
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode())  # one write: lines of two processes do not mix
            finally:
                os.close(descriptor)
        return mark
