"""What is likely to be asked for in the next hours, and the plan of preloads that a person can read.

Pure. A forecast looks at the same hour of the last days, at the same hour of the last weeks, and at the
hours just past. Whether it may act is not its business: ``backtest`` decides that on the recorded history.
"""

from __future__ import annotations

import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any, ClassVar, Literal, cast

from qworker.errors import QworkerError

HOUR, DAY_HOURS, WEEK_HOURS = 3_600.0, 24, 168
DAYS, WEEKS = 14, 4
_DAY_HALF_LIFE, _WEEK_HALF_LIFE = 4.0, 2.0
_FEWEST_DAYS = 2
"""Days of history below which the same hour of other days says nothing."""

Tier = Literal["off", "free", "evict"]
"""What preloads may take: nothing, bytes that are free, or the place of others."""

PLAN_VERSION = 1
LEAD_SECONDS = 300.0
"""So long before its hour a model may be preloaded: a load takes time, and waits for others."""
_DAY = 86_400.0


class BadPlan(QworkerError):
    """A plan of preloads that cannot be read. Nothing is preloaded by it."""

    code: ClassVar[str] = "bad_plan"


# --- forecast -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of one model in one hour."""

    model: str
    probability: float
    """Of at least one request."""
    requests: float
    why: str


class Forecast:
    """Counts by model and hour, and what they say of an hour to come. Times are unix seconds (UTC)."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {}
        self._busy: dict[str, tuple[int, int]] = {}  # hours with requests, and those right after such an hour
        self._first: int | None = None

    def observe(self, model: str, at: float, requests: int = 1) -> None:
        """``requests`` for ``model`` came at ``at``."""
        hour = int(at // HOUR)
        self._first = hour if self._first is None else min(self._first, hour)
        counts = self._counts.setdefault(model, {})
        if hour not in counts:
            busy, followed = self._busy.get(model, (0, 0))
            self._busy[model] = (busy + 1, followed + (hour - 1 in counts))
        counts[hour] = counts.get(hour, 0) + requests

    def models(self) -> list[str]:
        return list(self._counts)

    def expect(self, model: str, at: float) -> Expected:
        """What is expected in the hour of ``at``, from the hours before it."""
        hour = int(at // HOUR)
        counts = self._counts.get(model, {})
        days = self._past(hour, DAY_HOURS, DAYS)
        weeks = self._past(hour, WEEK_HOURS, WEEKS)
        if len(days) < _FEWEST_DAYS:
            return Expected(model, 0.0, 0.0, f"only {len(days)} days of history for this hour")
        daily, per_day = _weighed(counts, days, _DAY_HALF_LIFE)
        probability, requests = daily, per_day
        if len(weeks) >= 2:  # one week alone is an anecdote
            weekly, per_week = _weighed(counts, weeks, _WEEK_HALF_LIFE)
            probability, requests = (daily + weekly) / 2.0, (per_day + per_week) / 2.0
        if counts.get(hour - 1):
            busy, followed = self._busy[model]
            if followed > probability * busy:
                again = followed / busy
                return Expected(model, again, requests, f"asked for in the hour before, and {again:.0%} of those go on")
        seen = sum(1 for day in days if counts.get(day))
        return Expected(model, probability, requests, f"asked for in this hour on {seen} of the last {len(days)} days")

    def forget_before(self, at: float) -> None:
        """Drop what no forecast looks at any more."""
        oldest = int(at // HOUR) - WEEKS * WEEK_HOURS
        for model, counts in list(self._counts.items()):
            self._counts[model] = {hour: count for hour, count in counts.items() if hour >= oldest}
        if self._first is not None:
            self._first = max(self._first, oldest)

    def _past(self, hour: int, period: int, periods: int) -> list[int]:
        """The same hour in the periods before, the nearest first, as far as there is history."""
        first = self._first if self._first is not None else hour
        return [hour - period * n for n in range(1, periods + 1) if hour - period * n >= first]


def _weighed(counts: Mapping[int, int], hours: list[int], half_life: float) -> tuple[float, float]:
    """The share of ``hours`` with requests and their mean count, nearer ones weighing more."""
    weights = [2.0 ** (-n / half_life) for n in range(len(hours))]
    total = sum(weights)
    asked = sum(weight for hour, weight in zip(hours, weights, strict=True) if counts.get(hour))
    requests = sum(weight * counts.get(hour, 0) for hour, weight in zip(hours, weights, strict=True))
    return asked / total, requests / total


# --- plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preload:
    """Have ``model`` ready at ``at`` (unix seconds, UTC)."""

    at: float
    model: str
    probability: float
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The preloads of a day. ``act``: False when a back-test or a person says that they are not to happen."""

    made_at: float
    act: bool
    tier: Tier
    verdict: str
    """Why it acts, or does not."""
    preloads: tuple[Preload, ...]


def make_plan(
    forecast: Forecast, tier: Tier, verdict: str, now: float, *, least_probability: float, hours: int = 24
) -> Plan:
    """All that is likely enough in the next ``hours``, hour by hour, the most likely first."""
    preloads: list[Preload] = []
    first = int(now // HOUR) + 1
    for hour in range(first, first + hours):
        expected = [forecast.expect(model, hour * HOUR) for model in forecast.models()]
        likely = [e for e in expected if e.probability >= least_probability]
        likely.sort(key=lambda e: (-e.probability, -e.requests, e.model))
        preloads += (Preload(hour * HOUR, e.model, e.probability, e.why) for e in likely)
    return Plan(now, tier != "off", tier, verdict, tuple(preloads))


def dump_plan(plan: Plan) -> str:
    """The plan as TOML, to be read and edited by a person."""
    lines = [
        f"# Preloads, planned at {_stamp(plan.made_at)}.",
        "# Remove what you do not want, add what you know better, or set act = false to refuse all of it: that stays",
        "# so in the plans to come, until somebody sets it to true or removes this file.",
        f"version = {PLAN_VERSION}",
        f'made_at = "{_stamp(plan.made_at)}"',
        f"act = {'true' if plan.act else 'false'}",
        f'tier = "{plan.tier}"  # "free": into free bytes only; "evict": in place of what is less likely',
        f"verdict = {_quoted(plan.verdict)}",
    ]
    for preload in plan.preloads:
        lines += [
            "",
            "[[preload]]",
            f'at = "{_stamp(preload.at)}"',
            f"model = {_quoted(preload.model)}",
            f"probability = {preload.probability:.3f}",
            f"why = {_quoted(preload.why)}",
        ]
    return "\n".join(lines) + "\n"


def parse_plan(text: str) -> Plan:
    """The plan in ``text``, perhaps edited: ``probability`` and ``why`` may be missing. Raises BadPlan."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadPlan(f"expected a plan in TOML: {error}") from error
    if found.get("version") != PLAN_VERSION:
        raise BadPlan(f"expected version = {PLAN_VERSION}, found {found.get('version')!r}")
    act, tier, verdict, rows = (found.get(key) for key in ("act", "tier", "verdict", "preload"))
    if not isinstance(act, bool) or tier not in ("off", "free", "evict"):
        raise BadPlan(f'expected act = true or false and tier = "off", "free" or "evict", found {act!r} and {tier!r}')
    listed = cast("list[Any]", rows) if isinstance(rows, list) else []
    preloads = sorted((_preload(row) for row in listed), key=lambda preload: preload.at)
    return Plan(_time(found.get("made_at")), act and tier != "off", tier, str(verdict or ""), tuple(preloads))


def is_refused(plan: Plan) -> bool:
    """Whether a person has refused what the back-test would have let act."""
    return not plan.act and plan.tier != "off"


def renewed(plan: Plan, before: Plan | None) -> Plan:
    """``plan`` in place of the one before: what a person has refused stays refused."""
    if before is None or not is_refused(before) or plan.tier == "off":
        return plan
    return replace(plan, act=False)


def is_over(plan: Plan, now: float) -> bool:
    """Whether another day has begun (UTC) since the plan was made: it is time for the next one."""
    return int(plan.made_at // _DAY) != int(now // _DAY)


def due(plan: Plan, now: float, done: Container[Preload] = ()) -> tuple[Preload, ...]:
    """The preloads of the hour of ``now``, and of the next one in its last minutes, the most likely first.

    None of a plan that does not act, and none of those ``done``: a model that was ready and had to leave is not
    preloaded again in the same hour.
    """
    if not plan.act:
        return ()
    return tuple(p for p in plan.preloads if p.at - LEAD_SECONDS <= now < p.at + HOUR and p not in done)


def _preload(row: Any) -> Preload:
    if not isinstance(row, dict):
        raise BadPlan(f"expected [[preload]] tables, found {row!r}")
    table = cast("dict[str, Any]", row)
    model, probability = table.get("model"), table.get("probability", 1.0)
    if not isinstance(model, str) or not model:
        raise BadPlan(f"expected a model in each [[preload]], found {model!r}")
    if not isinstance(probability, int | float) or not isfinite(probability):
        raise BadPlan(f"expected a probability from 0 to 1 for {model}, found {probability!r}")
    return Preload(_time(table.get("at")), model, float(probability), str(table.get("why", "by hand")))


def _time(value: Any) -> float:
    try:
        at = datetime.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(at, datetime):
            return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        pass
    raise BadPlan(f'expected a time like "2030-01-31T08:00:00+00:00", found {value!r}')


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _quoted(text: str) -> str:
    """A TOML basic string. What is not printable in ASCII is escaped."""
    out = "".join(
        f"\\{c}" if c in '"\\' else c if c.isprintable() and c.isascii() else f"\\U{ord(c):08x}" for c in text
    )
    return f'"{out}"'


# --- fates --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Fates:
    """What became of preloads. ``open``: those resident and not asked for yet, each with its why."""

    made: int = 0
    used: int = 0
    wasted: int = 0
    open: dict[str, str] = field(default_factory=dict[str, str])

    def preloaded(self, model: str, why: str) -> None:
        self.made += 1
        self.open[model] = why

    def asked(self, model: str) -> None:
        """A request came for ``model``."""
        if self.open.pop(model, None) is not None:
            self.used += 1

    def left(self, model: str) -> None:
        if self.open.pop(model, None) is not None:
            self.wasted += 1
