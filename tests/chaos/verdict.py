"""What must hold once the noise is over, and the figures that say whether it does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qworker.errors import BrokerUnavailable
from qworker.wire.topology import ACTIVATION, EXPIRED, UNROUTABLE, lane_queue
from tests.chaos.book import Book, Tally
from tests.chaos.stage import Stage
from tests.chaos.traffic import collect_dead_letters
from tests.e2e.fleet import queue_depths

OUTCOME_SECONDS = 120.0
"""Without one more outcome in so long, what still waits is lost."""
REST_SECONDS = 30.0
MOST_GROWTH = 64 << 20
HARMED = {"evictions": 0.0, "restarts": 0.0, "malformed": 0.0, "cycles": 0.0, "kills": 0.01}
"""By scenario, the share of good jobs without a deadline that may fail: kills can look like those of a model."""


@dataclass(slots=True)
class Figures:
    """One run in numbers. ``line`` is what programs read."""

    scenario: str
    seed: int
    seconds: float
    tally: Tally
    faults: dict[str, int]
    skipped: dict[str, str]
    raw_doubles: int
    stuck_unacked: int
    consumers_of_cold_models: int
    ledger_bytes_after: int
    rss_growth_bytes: int
    loads: int
    unloads: int
    told_to_leave: int
    complaints: list[str] = field(default_factory=list[str])
    more: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def good(self) -> bool:
        """Whether all that must be nothing is nothing."""
        tally = self.tally
        zero = (tally.lost, tally.duplicates, self.stuck_unacked, self.consumers_of_cold_models)
        return not any(zero) and self.ledger_bytes_after == 0 and not self.complaints

    def line(self) -> str:
        return json.dumps(
            {
                **self.tally.fields(),
                "duplicates": self.tally.duplicates,
                "stuck_unacked": self.stuck_unacked,
                "consumers_of_cold_models": self.consumers_of_cold_models,
                "ledger_bytes_after": self.ledger_bytes_after,
                "faults": sum(self.faults.values()),
                "scenario": self.scenario,
                "seed": self.seed,
                "seconds": round(self.seconds, 1),
                "wrong": self.tally.wrong,
                "raw_doubles": self.raw_doubles,
                "unloads": self.unloads,
                "rss_growth_bytes": self.rss_growth_bytes,
                "complaints": len(self.complaints),
            }
        )


def wait_for_outcomes(stage: Stage, book: Book, told: Callable[[str], None]) -> list[str]:
    """Wait until every accepted job has its outcome; those that have none when nothing moves any more."""
    left = book.waiting()
    moved = time.monotonic()
    said = moved
    while True:
        collect_dead_letters(stage.url, book)
        now, still = time.monotonic(), book.waiting()
        if not still:
            return []
        if len(still) < len(left):
            moved = now
        if now - moved > OUTCOME_SECONDS:
            return still
        if now - said > 10:
            told(f"{len(still)} jobs wait for their outcome")
            said = now
        left = still
        time.sleep(0.5)


def unacked(stage: Stage) -> dict[str, int]:
    """Deliveries in hand that nobody settles, by queue; looked at until there are none."""

    def look() -> dict[str, int]:
        found = _messages(stage).items()
        return {name: held for name, (_, held) in found if held and not name.startswith("chaos.")}

    return _until_nothing(look)


def _messages(stage: Stage) -> dict[str, tuple[int, int]]:
    """Ready and unacknowledged, of each queue that has any; those of the answers, too."""
    columns = ("name", "messages_ready", "messages_unacknowledged")
    listed = stage.node.ctl("list_queues", "--quiet", "--no-table-headers", *columns)
    rows = (line.rsplit(None, 2) for line in listed.splitlines() if line.strip())
    counts = {name: (int(ready), int(held)) for name, ready, held in rows}
    return {name: found for name, found in counts.items() if any(found)}


def consumers_of_cold_models(stage: Stage) -> dict[str, int]:
    """Consumers of queues whose model no worker holds, neither before nor after the broker was asked."""

    def look() -> dict[str, int]:
        before = _held(stage)
        queues = {lane_queue(lane, model): model for model in stage.names for lane in ("jobs", "batch")}
        depths = queue_depths(stage.url, queues)
        held = before | _held(stage)
        return {queue: count for queue, (_, count) in depths.items() if count and queues[queue] not in held}

    return _until_nothing(look)


def left_in_queues(stage: Stage) -> dict[str, tuple[int, int]]:
    """Queues with messages or consumers once all workers have stopped. Hints may be left: they are only hints."""
    queues = [lane_queue(lane, model) for model in stage.names for lane in ("jobs", "batch")]

    def look() -> dict[str, Any]:
        return {
            name: found for name, found in queue_depths(stage.url, [*queues, UNROUTABLE, EXPIRED]).items() if any(found)
        }

    return _until_nothing(look)


def conclude(
    stage: Stage,
    book: Book,
    *,
    scenario: str,
    seed: int,
    started: float,
    faults: dict[str, int],
    skipped: dict[str, str],
    raw_doubles: Callable[[], int],
    told: Callable[[str], None],
    complaints: list[str],
) -> Figures:
    """Look at everything, stop the workers, look again."""
    still = wait_for_outcomes(stage, book, told)
    if still:
        of = [book.entries[job].model for job in still[:10]]
        complaints.append(f"no outcome: {still[:10]} of {of}; ready and unacknowledged: {_messages(stage)}")
    states = stage.states()
    stuck = unacked(stage)
    cold = consumers_of_cold_models(stage)
    growth = stage.growth()
    version = stage.node.ctl("version").strip()
    held = stage.stop_workers()
    left = left_in_queues(stage)
    collect_dead_letters(stage.url, book)
    tally = book.tally()
    for what, found in (("unacknowledged", stuck), ("consumers of cold models", cold), ("left in queues", left)):
        if found:
            complaints.append(f"{what}: {found}")
    complaints += stage.crashes + stage.log_faults()
    if tally.wrong:
        wrong = [(job, e.model, e.k, e.kind, e.answers) for job, e in book.entries.items() if e.wrong]
        complaints.append(f"{tally.wrong} answers are wrong: {wrong[:10]}")
    complaints += harmed(scenario, tally)
    if not tally.balanced:
        complaints.append(f"the ledger of jobs does not add up: {tally}")
    if growth > MOST_GROWTH:
        complaints.append(f"a worker grew by {growth / 2**20:.0f} MiB")
    return Figures(
        scenario=scenario,
        seed=seed,
        seconds=time.monotonic() - started,
        tally=tally,
        faults=faults,
        skipped=skipped,
        raw_doubles=raw_doubles(),
        stuck_unacked=sum(stuck.values()),
        consumers_of_cold_models=sum(cold.values()),
        ledger_bytes_after=held,
        rss_growth_bytes=growth,
        loads=stage.count_events("model.loaded"),
        unloads=stage.count_events("model.unloaded"),
        told_to_leave=stage.count_events("model.evicted"),
        complaints=complaints,
        more={"workers": len(stage.lives), "states": states, "broker": version, "hints": _hints(stage)},
    )


def harmed(scenario: str, tally: Tally) -> list[str]:
    """The complaint about good jobs that failed, where they are more than the scenario can excuse."""
    failed, share = sum(tally.good_failed.values()), HARMED.get(scenario, 1.0)
    if failed <= share * tally.accepted:
        return []
    return [f"{failed} good jobs failed though nothing was wrong with them: {dict(tally.good_failed)}"]


def _hints(stage: Stage) -> int:
    return queue_depths(stage.url, [ACTIVATION]).get(ACTIVATION, (0, 0))[0]


def _held(stage: Stage) -> set[str]:
    """Models that a worker has, or whose jobs it answers with failures."""
    states = stage.states()
    return {row["model"] for state in states for row in state["models"]}.union(*(s["refusing"] for s in states))


def _until_nothing(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``look`` finds: nothing, or what is still found after the time to come to rest."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        try:
            found = look()
        except BrokerUnavailable:
            found = {"the broker": 1}
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.3)
