"""The screen of ``qworker top``: what its keys choose, and that all there is is shown."""

from __future__ import annotations

import time
from io import StringIO
from typing import Any

from rich.console import Console

from qworker.cli.top_screen import Screen, render
from qworker.telemetry.measures import Measures
from qworker.watch.fleet import Fleet
from tests.watch.snapshots import MIB, row, told


def view() -> dict[str, Any]:
    fleet, measures = Fleet(), Measures()
    measures.depths = {"cold-one": [(5, 0)]}
    measures.chronicle.note("loaded", "old", seconds=0.75)
    measures.chronicle.note("evicted", "old", "makes room for beta")
    measures.chronicle.note("loaded", "old", seconds=0.75)
    measures.chronicle.enter("gamma", "load", 10.0)
    rows = (row("alpha", nbytes=3 * MIB, key=2.0), row("beta", nbytes=9 * MIB, key=1.0), row("gamma", "loading"))
    fleet.take(told("w1", time.time(), measures, *rows), 1.0)
    fleet.called(["w1"], {"w2": None})
    return fleet.view(1.0)


def shown(screen: Screen, height: int = 50) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(render(view(), screen, height=height))
    return console.export_text()


def test_everything_is_on_the_screen() -> None:
    """Workers, hot models, loads with their stage, cold ones with jobs, evictions with reasons, the silent."""
    text = shown(Screen())
    for part in (
        "w1",
        "13 / 100 MiB",
        "alpha",
        "beta",
        "load",
        "cold-one",
        "makes room for beta",
        "loaded again and again",
        "1.5",
        "w2",
        "does not answer",
    ):
        assert part in text, part


def test_keys_sort_filter_and_select() -> None:
    """The order is that of the column; an order is about what is selected, and about nothing before that."""
    screen = Screen()
    assert screen.press("p", view()) is None
    assert "select" in screen.message
    while screen.press("s", view()) is None and screen.sort != 3:
        pass
    assert [each["model"] for each in screen.models(view())][:2] == ["beta", "alpha"]
    screen.press("j", view())
    assert screen.selected == ("beta", "w1")
    assert screen.press("e", view()) == "evict"
    for key in "/cold\r":
        assert screen.press(key, view()) is None
    assert screen.models(view()) == []
    screen.press("\x1b[B", view())
    assert screen.selected == ("cold-one", None)
    assert screen.press("l", view()) == "preload"
    screen.press("\x1b", view())
    assert (screen.filter, screen.selected) == ("", None)
    assert screen.press("q", view()) == "quit"


def test_the_selected_model_is_in_sight() -> None:
    """However many there are, and however small the window."""
    fleet = Fleet()
    fleet.take(told("w", 1.0, Measures(), *(row(f"m{n:03}") for n in range(300))), 1.0)
    many, screen = fleet.view(1.0), Screen(sort=5)
    screen.selected = ("m217", "w")
    console = Console(width=120, record=True, file=StringIO())
    console.print(render(many, screen, height=30))
    assert "m217" in console.export_text()
