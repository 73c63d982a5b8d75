"""Loading a model in a process of its own, before a worker does: what ends that process ends nobody else.

The child is ``python -m qworker.build.rehearse``: a request as JSON on stdin, what is wrong as JSON on what was
stdout (the library may print to the new one). It reads and verifies the model by itself: no other bytes are loaded
than those of the card.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from qworker.build.probe import be_first_to_die, last_lines
from qworker.errors import LoadFailed, QworkerError, StoreError
from qworker.store.card import Card

NICENESS: Final = 5
"""A third of the CPU time of a process that serves, where both want it: as loads have."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Loads and warms up ONNX builds of ``store`` as a worker does, with ``threads`` within a run. Called by one.

    Plans are not rehearsed: they were built and run by whoever registered them, and take a device to be loaded.
    """

    store: Path
    threads: int
    timeout: float

    async def __call__(self, card: Card) -> None:
        """Raises LoadFailed with the reason for what a worker had better not load; StoreError: not read."""
        if card.plan is not None:
            return
        asked = {"store": str(self.store), "threads": self.threads, "card": card.model_dump(mode="json")}
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "qworker.build.rehearse"),  # -P: nothing of the current folder is imported
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(os.environ),
        )
        try:
            async with asyncio.timeout(self.timeout):
                said, complaints = await child.communicate(json.dumps(asked).encode())
        except TimeoutError as exc:
            raise LoadFailed(
                f"{card.model} did not load within {self.timeout:g} s in a process of its own, so it is not loaded "
                "here: see what it does, or raise load_timeout"
            ) from exc
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        _judge(card.model, child.returncode or 0, said, complaints.decode(errors="replace"))


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The child needs none of our settings, and least of all the broker's password."""
    paths = (str(Path(__file__).parents[2]), ours.get("PYTHONPATH", ""))
    kept = {name: text for name, text in ours.items() if not name.startswith("QWORKER_")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _judge(model: str, status: int, said: bytes, complaints: str) -> None:
    if status < 0:
        known = {each.value: each.name for each in signal.Signals}
        raise LoadFailed(
            f"{model} ended the process that loaded it first ({known.get(-status, f'signal {-status}')}; "
            f"{last_lines(complaints)}), so it is not loaded here: look for a crash of the library or too little "
            "memory, and register the model again when it is mended"
        )
    try:
        answer: object = json.loads(said)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise LoadFailed(
            f"{model}: the process that loaded it first left with status {status}: {last_lines(complaints)}"
        )
    if "unread" in answer:
        raise StoreError(f"{model} could not be read to be loaded in a process of its own: {answer['unread']}")
    if "refused" in answer:
        raise LoadFailed(f"{model} fails in a process of its own, so it is not loaded here: {answer['refused']}")


# --- the child's side ---------------------------------------------------------------------------


def main() -> None:
    """The child: one request from stdin, one answer to what was stdout."""
    be_first_to_die()
    os.nice(NICENESS)
    asked = json.loads(sys.stdin.read())
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            _load(Path(asked["store"]), int(asked["threads"]), Card.model_validate(asked["card"]))
            json.dump({}, answer)
        except (StoreError, OSError) as exc:
            json.dump({"unread": str(exc)}, answer)
        except QworkerError as exc:
            json.dump({"refused": str(exc)}, answer)
        except MemoryError:
            json.dump({"refused": "it needs more memory than there is"}, answer)


def _load(store: Path, threads: int, card: Card) -> None:
    from qworker.engine.base import ModelSource
    from qworker.engine.onnx import OnnxBackend, host  # in the child only: a crash must not be ours
    from qworker.store.local import LocalStore

    found = LocalStore(store, host()).fetch(card)
    backend = OnnxBackend(threads)
    source = ModelSource(
        card.model,
        card.version,
        found.path,
        found.content,
        card.intra_op_threads,
        found.mapped,
        optimised=found.optimised,
    )
    engine = backend.load(source)
    if found.sample is not None:
        with np.load(found.sample, allow_pickle=False) as arrays:
            backend.warm_up(engine, dict(arrays))
    elif card.warmed:
        backend.warm_up(engine, None)


if __name__ == "__main__":
    main()
