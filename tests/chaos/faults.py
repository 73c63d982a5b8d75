"""What a chaos run does to its stage. Each fault heals what it broke before it ends; all block."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from qworker.errors import StoreError
from qworker.store.local import LocalStore
from tests.chaos import models
from tests.chaos.schedule import Planned
from tests.chaos.stage import Stage, fill_disk
from tests.chaos.traffic import PikaThread
from tests.e2e.caller import packed
from tests.e2e.models import model_file, replace

MALFORMED_AT_ONCE = 150
EVICTION_ROUNDS = 6
HANG_SECONDS = 17.0
"""More than three heartbeats of 5 s: the broker takes the worker's connection for dead."""
SLOW_SECONDS_A_MIB = 0.06
NEARLY_NO_MEMORY, USUAL_MEMORY = "0.000001", "0.4"
FAR, NEAR = 3600.0, 20.0


class Faults:
    """Carries planned faults out. ``done`` counts them; ``skipped`` says what could not be done here, and why."""

    def __init__(self, stage: Stage, publisher: PikaThread, told: Callable[[str], None]) -> None:
        self.done: Counter[str] = Counter()
        self.skipped: dict[str, str] = {}
        self.wrong: list[str] = []
        """What did not behave under a fault as it should."""
        self._stage = stage
        self._publisher = publisher
        self._told = told
        self._stop = threading.Event()

    def stop(self) -> None:
        """No more faults; the one in progress heals what it broke."""
        self._stop.set()

    def run(self, planned: list[Planned]) -> None:
        """One after the other, until told to stop."""
        for fault in planned:
            if self._stop.wait(fault.pause):
                return
            self.act(fault)

    def act(self, fault: Planned) -> None:
        why_not = self._why_not(fault.kind)
        if why_not is not None:
            if fault.kind not in self.skipped:
                self._told(f"fault {fault.kind} is skipped: {why_not}")
            self.skipped[fault.kind] = why_not
            return
        does: Callable[[Planned], str] = getattr(self, f"_{fault.kind}")
        said = does(fault)
        self.done[fault.kind] += 1
        self._told(f"fault {fault.kind}: {said}")

    def _why_not(self, kind: str) -> str | None:
        if kind == "disk_full" and not self._stage.small_disk:
            return "no small disk can be mounted here (it takes root, and a mount namespace)"
        if kind in ("clock_jump", "store_slow") and self._stage.shim is None:
            return "there is no C compiler for the library that does it"
        return None

    def _hold(self, seconds: float) -> None:
        self._stop.wait(seconds)

    # --- to workers ---

    def _kill(self, fault: Planned) -> str:
        return self._stage.kill(fault.draws[0])

    def _kill_serving(self, fault: Planned) -> str:
        return self._stage.kill(fault.draws[0], serving=True)

    def _terminate(self, fault: Planned) -> str:
        return self._stage.terminate(fault.draws[0])

    def _pause(self, fault: Planned) -> str:
        return self._freeze(fault, 0.2 + 3 * fault.draws[1])

    def _hang(self, fault: Planned) -> str:
        return self._freeze(fault, HANG_SECONDS)

    def _freeze(self, fault: Planned, seconds: float) -> str:
        worker = self._stage.pick(fault.draws[0]).worker
        worker.pause()
        try:
            self._hold(seconds)
        finally:
            worker.resume()
        return f"{worker.name} for {seconds:.1f} s"

    def _evictions(self, fault: Planned) -> str:
        """Jobs for all models in turn, so that nobody stays."""
        names, jobs = self._stage.names, 0
        with self._publisher.connected() as publish:
            for turn in range(EVICTION_ROUNDS):
                for n in range(len(names)):
                    model = names[(n + turn + int(fault.draws[0] * len(names))) % len(names)]
                    for k in range(3):
                        self._publisher.good(publish, model, k)
                        jobs += 1
                self._hold(0.5)
        return f"{jobs} jobs for all models in turn"

    def _malformed(self, fault: Planned) -> str:
        good = [packed(name, models.inputs_of(name, 1)) for name in models.SMALL]
        self._publisher.bad_ones(MALFORMED_AT_ONCE, models.SMALL, good)
        return f"{MALFORMED_AT_ONCE} messages"

    # --- to the broker ---

    def _broker_restart(self, fault: Planned) -> str:
        self._stage.node.stop()
        self._hold(2 * fault.draws[0])
        self._stage.node.start()
        return "stopped and started"

    def _connection_close(self, fault: Planned) -> str:
        """One of all connections, whoever's it is."""
        said = self._stage.node.ctl(
            "eval",
            "case lists:sort(rabbit_networking:connections()) of [] -> none; L -> "
            f"ok = rabbit_networking:close_connection(lists:nth(1 + trunc({fault.draws[0]:.6f} * length(L)), L), "
            '<<"chaos">>), length(L) end.',
        )
        return f"one of {said.strip()}"

    def _memory_alarm(self, fault: Planned) -> str:
        seconds = 3 + 5 * fault.draws[0]
        self._stage.node.ctl("set_vm_memory_high_watermark", NEARLY_NO_MEMORY)
        try:
            self._hold(seconds)
        finally:
            self._stage.node.ctl("set_vm_memory_high_watermark", USUAL_MEMORY)
        return f"for {seconds:.1f} s"

    # --- to the store and the clock ---

    def _disk_full(self, fault: Planned) -> str:
        """Workers go on, and who registers a model is told so."""
        filler = fill_disk(self._stage.store)
        try:
            try:
                with LocalStore(self._stage.store).stage() as staging:
                    staging.add("model.onnx", self._newcomer())
            except StoreError:
                pass
            except OSError as error:
                self.wrong.append(f"a full disk was no StoreError but {error!r}")
            else:
                self.wrong.append("a model was copied onto a full disk")
            self._hold(1 + 3 * fault.draws[0])
        finally:
            filler.unlink()
        return "a model could not be registered"

    def _newcomer(self) -> Path:
        path = self._stage.folder / "newcomer.onnx"
        path.write_bytes(models.adding(77))
        return path

    def _model_corrupt(self, fault: Planned) -> str:
        path, content = self._victim(fault)
        at = int(fault.draws[1] * len(content))
        self._damage(path, content, content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :], fault)
        return f"{path.parent.parent.name}, byte {at} of {len(content)}"

    def _model_truncated(self, fault: Planned) -> str:
        path, content = self._victim(fault)
        at = int(fault.draws[1] * len(content))
        self._damage(path, content, content[:at], fault)
        return f"{path.parent.parent.name} at {at} of {len(content)} bytes"

    def _victim(self, fault: Planned) -> tuple[Path, bytes]:
        small = [name for name in self._stage.names if name != "roll"]
        path = model_file(self._stage.store, small[int(fault.draws[0] * len(small))])
        return path, path.read_bytes()

    def _damage(self, path: Path, content: bytes, damaged: bytes, fault: Planned) -> None:
        # The new file lies beside the old one for a moment, and a large one does not fit twice.
        path.unlink()
        try:
            replace(path, damaged)
            self._hold(2 + 4 * fault.draws[2])
        finally:
            path.unlink()
            replace(path, content)

    def _store_slow(self, fault: Planned) -> str:
        assert self._stage.shim is not None
        self._stage.shim.slow_store(SLOW_SECONDS_A_MIB)
        try:
            self._hold(4 + 4 * fault.draws[0])
        finally:
            self._stage.shim.slow_store(0)
        return f"{SLOW_SECONDS_A_MIB * 1000:.0f} ms a MiB"

    def _clock_jump(self, fault: Planned) -> str:
        """There and back again."""
        assert self._stage.shim is not None
        seconds = (fault.draws[0] * 2 - 1) * (FAR if fault.draws[1] < 0.5 else NEAR)
        self._stage.shim.shift_clock(seconds)
        try:
            self._hold(3 + 3 * fault.draws[2])
        finally:
            self._stage.shim.shift_clock(0)
        return f"by {seconds:+.0f} s and back"
