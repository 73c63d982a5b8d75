"""Makes the clock of workers jump and their store slow, by a library that is preloaded into them (``shim.c``)."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

from tests.e2e.fleet import ROOT

SOURCE = Path(__file__).with_name("shim.c")


class Shim:
    """The page that the workers look at, and the environment that makes them look. None without a C compiler."""

    def __init__(self, library: Path, folder: Path, store: Path) -> None:
        path = folder / "chaos-control"
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.environment = {
            "LD_PRELOAD": str(library),
            "CHAOS_CONTROL": str(path),
            "CHAOS_FOLDER": str(store.resolve()) + "/",
        }

    def shift_clock(self, seconds: float) -> None:
        """What the workers take for now, less what it is."""
        self._page[0:8] = struct.pack("<q", int(seconds * 1e9))

    def slow_store(self, seconds_a_mib: float) -> None:
        self._page[8:16] = struct.pack("<q", int(seconds_a_mib * 1e6))


def make_shim(folder: Path, store: Path) -> Shim | None:
    """Compile it, unless that was done before. None where there is no compiler."""
    if shutil.which("gcc") is None:
        return None
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    library = cache / f"chaos-shim-{digest}.so"
    if not library.exists():
        fresh = cache / f"chaos-shim-{digest}.{os.getpid()}.so"
        subprocess.run(["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", fresh, SOURCE, "-ldl"], check=True)
        os.replace(fresh, library)
    return Shim(library, folder, store)
