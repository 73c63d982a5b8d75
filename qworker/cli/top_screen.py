"""What ``qworker top`` shows, and what its keys do. Pure: a view in, something to print out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

View = Mapping[str, Any]
Row = Mapping[str, Any]

SORTS: Final[tuple[tuple[str, Callable[[Row], Any]], ...]] = (
    ("rate", lambda row: -row["rate"]),
    ("key", lambda row: row["key"] if row["key"] is not None else float("-inf")),
    ("age", lambda row: -row["seconds"]),
    ("memory", lambda row: -row["nbytes"]),
    ("p99", lambda row: -(row["p99"] or 0.0)),
    ("name", lambda row: row["model"]),
)
ORDERS: Final = {"p": "pin", "u": "unpin", "e": "evict", "l": "preload"}
HELP: Final = "arrows/jk select   s sort   / filter   p pin   u unpin   e evict   l preload   q quit"
UP, DOWN, ENTER, ESCAPE, ERASE = ("\x1b[A", "k"), ("\x1b[B", "j"), ("\r", "\n"), "\x1b", ("\x7f", "\b")


@dataclass(slots=True)
class Screen:
    """What the keys have set. Owner: the loop that reads them."""

    sort: int = 0
    filter: str = ""
    typing: bool = False
    selected: tuple[str, str | None] | None = None
    """Model and worker."""
    message: str = ""

    def press(self, key: str, view: View) -> str | None:
        """What is to be done: ``quit``, or the verb of an order about ``selected``; None for what is done here."""
        if self.typing:
            self._type(key)
            return None
        rows = [(row["model"], row["worker"]) for row in (*self.models(view), *self.cold(view))]
        at = rows.index(self.selected) if self.selected in rows else -1
        if key in ("q", "\x03"):
            return "quit"
        if key in DOWN and rows:
            self.selected = rows[min(at + 1, len(rows) - 1)]
        elif key in UP and rows:
            self.selected = rows[max(at - 1, 0)]
        elif key == "s":
            self.sort = (self.sort + 1) % len(SORTS)
        elif key == "/":
            self.typing, self.filter = True, ""
        elif key == ESCAPE:
            self.filter, self.selected = "", None
        elif key in ORDERS:
            if at >= 0:
                return ORDERS[key]
            self.message = "select a model first, by the arrows"
        return None

    def models(self, view: View) -> list[Row]:
        rows = [row for row in view["models"] if self.filter in row["model"] and row["state"] != "waiting"]
        return sorted(rows, key=SORTS[self.sort][1])

    def cold(self, view: View) -> list[Row]:
        return [row for row in view["cold"] if self.filter in row["model"]]

    def _type(self, key: str) -> None:
        if key in ENTER:
            self.typing = False
        elif key == ESCAPE:
            self.typing, self.filter = False, ""
        elif key in ERASE:
            self.filter = self.filter[:-1]
        elif key.isprintable():
            self.filter += key


def render(view: View, screen: Screen, *, height: int = 50) -> Group:
    """The whole screen, of at most about ``height`` lines."""
    workers, cold = view["workers"], screen.cold(view)
    rest = max(5, height - len(workers) - len(view["reloaded"][:6]) - 23)
    parts: list[Any] = [_workers(workers, view["silent"]), _models(screen.models(view), screen, rest)]
    if view["loading"]:
        parts.append(_table("loading", ("worker", "stage", "seconds", "percent"), _loads(view["loading"])))
    if cold:
        parts.append(
            _table("cold, with jobs", ("ready", "waits on", "seconds", "then loads", "why"), _cold(cold, screen))
        )
    if view["reloaded"]:
        columns = ("loads/min", "load s", "workers", "evicted last because it")
        parts.append(_table("loaded again and again", columns, _reloaded(view["reloaded"])))
    if view["evictions"]:
        parts.append(_table("evicted", ("worker", "why"), _evictions(view["evictions"])))
    foot = f"filter: {screen.filter}_" if screen.typing else screen.message or HELP
    parts.append(Text(f"sorted by {SORTS[screen.sort][0]}   {foot}", style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _workers(rows: Sequence[Row], silent: Sequence[Row]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in ("worker", "state", "memory", "", "hot", "in hand", "jobs/s", "fill", "switches/min", "reloads/min"):
        table.add_column(name, justify="left" if name in ("worker", "state", "memory") else "right", no_wrap=True)
    for row in rows:
        state = f"no word for {row['heard']:.0f} s" if row["late"] else row["state"]
        table.add_row(
            Text(row["worker"]),
            Text(state, style="" if state == "ready" else "red"),
            ProgressBar(max(1, row["budget"]), row["bytes"], width=24),
            f"{_mib(row['bytes'])} / {_mib(row['budget'])} MiB",
            str(row["hot"]),
            str(row["in_hand"]),
            f"{row['rate']:.1f}",
            _share(row["fill"]),
            f"{row['switches']:.0f}",
            str(row["reloads"]),
        )
    for row in silent:
        table.add_row(Text(row["worker"]), Text("does not answer", style="red"))
    if not rows and not silent:
        table.add_row(Text("no worker is connected"))
    return table


def _models(rows: Sequence[Row], screen: Screen, most: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    left = ("model", "worker", "state")
    for name in (*left, "MiB", "jobs/s", "p50 ms", "p99 ms", "wait p99 ms", "fill", "in hand", "age", "key"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    chosen = next((n for n, row in enumerate(rows) if (row["model"], row["worker"]) == screen.selected), 0)
    first = max(0, min(chosen - most + 1, len(rows) - most))  # the selected one is always in sight
    for row in rows[first : first + most]:
        table.add_row(
            Text(row["model"]),
            Text(row["worker"]),
            Text(row["state"] + (" pinned" if row["pinned"] else "")),
            _mib(row["nbytes"]),
            f"{row['rate']:.1f}",
            _ms(row["p50"]),
            _ms(row["p99"]),
            _ms(row["wait_p99"]),
            _share(row["fill"]),
            str(row["in_hand"]),
            _age(row["seconds"]),
            "lowest" if row["key"] is None else f"{row['key']:.4g}",
            style="reverse" if (row["model"], row["worker"]) == screen.selected else None,
        )
    if len(rows) > most:
        table.add_row(Text(f"{len(rows)} models, {most} shown: filter with /", style="dim"))
    return table


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[Sequence[str], bool]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in (title, *columns):
        table.add_column(name, no_wrap=not name.endswith(("why", "because it")), overflow="fold")
    for cells, selected in rows:
        table.add_row(*map(Text, cells), style="reverse" if selected else None)
    return table


def _loads(rows: Sequence[Row]) -> list[tuple[Sequence[str], bool]]:
    return [
        (
            (
                row["model"],
                row["worker"],
                row["stage"],
                f"{row['seconds']:.1f}",
                "" if row["percent"] is None else f"{row['percent']} %",
            ),
            False,
        )
        for row in rows
    ]


def _cold(rows: Sequence[Row], screen: Screen) -> list[tuple[Sequence[str], bool]]:
    return [
        (
            (
                row["model"],
                "" if row["ready"] is None else str(row["ready"]),
                row["worker"] or "",
                "" if row["seconds"] is None else f"{row['seconds']:.1f}",
                "" if row["load_seconds"] is None else f"{row['load_seconds']:.1f} s",
                row["why"] or "no worker has claimed it yet",
            ),
            (row["model"], row["worker"]) == screen.selected,
        )
        for row in rows[:8]
    ]


def _reloaded(rows: Sequence[Row]) -> list[tuple[Sequence[str], bool]]:
    return [
        ((row["model"], str(row["loads"]), f"{row['seconds']:.1f}", ", ".join(row["workers"]), row["why"] or ""), False)
        for row in rows[:6]
    ]


def _evictions(rows: Sequence[Row]) -> list[tuple[Sequence[str], bool]]:
    return [((row["model"], row["worker"], row.get("reason", "")), False) for row in rows[:-6:-1]]


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.0f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _age(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.0f} h"
