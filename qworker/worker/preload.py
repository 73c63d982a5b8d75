"""Loads that no job has asked for: into free bytes, while nobody needs what a load takes, each with its reason.

``SpareLoads`` makes them and counts what becomes of them; ``Planned`` makes those of the day's plan, a file that a
person may edit or refuse (docs/forecast.md). What is loaded so has no claim to stay.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from qworker.policy.forecast import HOUR, BadPlan, Plan, Preload, due, is_over, parse_plan
from qworker.telemetry.counters import Counters
from qworker.worker.brake import Brake
from qworker.worker.history_file import journals_of, plan_of
from qworker.worker.hot_zone import SPARE, HotZone
from qworker.worker.intake import Hint
from qworker.worker.registry import Registry

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.1
PLAN_LOOK_SECONDS = 5.0
PLAN_SECONDS = 1_800.0
"""A plan that takes longer is given up."""
RETRY_SECONDS = 3_600.0
NICENESS = 10

Claim = Callable[[str, bool, Hint], bool]


class SpareLoads:
    """Owned here: the preloads that no job has asked for yet, each with its reason and the jobs before it."""

    def __init__(
        self, zone: HotZone, counters: Counters, claim: Claim, is_loading: Callable[[str], bool | None]
    ) -> None:
        """``claim`` starts a claim as a hint does; ``is_loading``: whether it still has no model, or is over."""
        self._zone = zone
        self._counters = counters
        self._claim = claim
        self._is_loading = is_loading
        self._open: dict[str, tuple[str, int]] = {}

    async def load(self, model: str, why: str) -> bool | None:
        """True when ``model`` is ready; False when it was claimed before, None when another worker has it or there
        are no bytes to spare."""
        jobs = self._jobs(model)
        hint = Hint(None)
        hint.unasked, hint.urgency = True, SPARE
        if not self._claim(model, False, hint):
            return False
        while self._is_loading(model):  # noqa: ASYNC110  # some loads a day: not worth an event
            await asyncio.sleep(LOOK_SECONDS)
        if self._is_loading(model) is None:
            return None
        log.info("model.preloaded", model=model, reason=why)
        self._counters.measures.chronicle.note("preloaded", model, why)
        self._counters.preloads += 1
        if model in self._open:  # it has left, and nobody has looked since
            self._close(model, used=False)
        self._open[model] = (why, jobs)
        return True

    @property
    def is_quiet(self) -> bool:
        """Whether no model loads or waits for bytes: that needs the slot, the disk and the CPU."""
        return not self._counters.measures.loading and not self._zone.crowded

    async def until_quiet(self) -> None:
        while not self.is_quiet:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """See which ones jobs came for, and which have left without."""
        there = {row.model for row in self._zone.rows()} if self._open else frozenset[str]()
        for model in list(self._open):
            if self._jobs(model) > self._open[model][1]:
                self._close(model, used=True)
            elif model not in there:
                self._close(model, used=False)

    def evicted(self, model: str) -> None:
        """``model`` was told to leave for another."""
        if model in self._open:
            self._close(model, used=self._jobs(model) > self._open[model][1])

    def waiting(self) -> dict[str, str]:
        """Those that nobody has asked for yet, each with its reason."""
        return {model: why for model, (why, _) in self._open.items()}

    def _close(self, model: str, *, used: bool) -> None:
        del self._open[model]
        if used:
            self._counters.preloads_used += 1
        else:
            self._counters.preloads_unused += 1

    def _jobs(self, model: str) -> int:
        measured = self._counters.measures.models.get(model)
        return 0 if measured is None else measured.jobs


class Planned:
    """Preloads by the plan of the day. Owned here: the plan as it was read last, and which of it is done."""

    def __init__(
        self,
        history: Path,
        zone: HotZone,
        registry: Registry,
        brake: Brake,
        spare: SpareLoads,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``history``: the history file, beside which journal and plan lie."""
        self._history = history
        self._path = plan_of(history)
        self._zone = zone
        self._registry = registry
        self._brake = brake
        self._spare = spare
        self._wall = wall
        self._plan: Plan | None = None
        self._read_at = 0.0  # the file's time of change
        self._trouble = ""
        self._try_at = 0.0
        self._done: set[Preload] = set()

    async def run(self) -> None:
        """Make a plan each day, and do what the latest says. Runs until cancelled."""
        while True:
            await self._read()
            if (self._plan is None or is_over(self._plan, self._wall())) and self._wall() >= self._try_at:
                await self._make()
            await self._act()
            await asyncio.sleep(PLAN_LOOK_SECONDS)

    def state(self) -> dict[str, Any] | None:
        """For ``/state``: the plan in force."""
        plan = self._plan
        if plan is None:
            return None
        return {"file": str(self._path), "made_at": plan.made_at, "act": plan.act, "verdict": plan.verdict}

    # --- the plan --------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Take over the file, if somebody has changed it. One that cannot be read preloads nothing."""
        try:
            changed, text = await asyncio.to_thread(_newer, self._path, self._read_at)
            if text is not None:
                self._read_at = changed
                self._plan = parse_plan(text)
        except FileNotFoundError:
            self._plan, self._read_at = None, 0.0
        except (BadPlan, OSError, UnicodeDecodeError) as error:
            self._plan = Plan(self._wall(), False, "off", f"the plan cannot be read: {error}", ())
            if str(error) != self._trouble:
                log.warning("plan.unreadable", path=str(self._path), reason=str(error), advice="mend it or remove it")
            self._trouble = str(error)

    async def _make(self) -> None:
        """Test the history and write a plan, in a process of its own: that is a minute of CPU, or more."""
        self._try_at = self._wall() + RETRY_SECONDS
        journals = await asyncio.to_thread(journals_of, self._history)
        if not journals:
            return
        memory = str(self._zone.budget)
        command = ["history", "plan", *map(str, journals), "--memory", memory, "--out", str(self._path)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "qworker", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            with suppress(OSError):  # it has ended already
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            async with asyncio.timeout(PLAN_SECONDS):
                _, told = await process.communicate()
        except TimeoutError:
            log.warning("plan.failed", path=str(self._path), reason=f"it took more than {PLAN_SECONDS:g} s")
            return
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        said = told.decode(errors="replace").strip()
        if process.returncode:
            log.warning("plan.failed", path=str(self._path), reason=said[-500:])
            return
        await self._read()
        log.info("plan.made", path=str(self._path), reason=said[-1_000:])

    # --- carrying it out -------------------------------------------------------------------------

    async def _act(self) -> None:
        now = self._wall()
        self._done = {preload for preload in self._done if preload.at + HOUR > now}
        wanted = () if self._plan is None else due(self._plan, now, self._done)
        if not wanted:
            return
        there, known = frozenset(await self._registry.models()), self._zone.history()
        for preload in wanted:
            if self._brake.window > 0.0 or not self._spare.is_quiet:
                return  # jobs come first; and where models push each other out, claims wait for what is free
            usage = known.get(preload.model)
            if preload.model in there and usage is not None and not self._is_there(preload.model):
                if not self._zone.fits_free(int(usage.nbytes)):
                    continue  # perhaps later in its hour
                at = datetime.fromtimestamp(preload.at, UTC).strftime("%H:%M UTC")
                await self._spare.load(
                    preload.model, f"planned for {at}: {preload.why} ({preload.probability:.0%} likely)"
                )
            self._done.add(preload)

    def _is_there(self, model: str) -> bool:
        return any(row.model == model for row in self._zone.rows())


def _newer(path: Path, than: float) -> tuple[float, str | None]:
    """When ``path`` was changed, and its text if that was not at ``than``."""
    changed = path.stat().st_mtime
    return changed, path.read_text(encoding="utf-8") if changed != than else None
