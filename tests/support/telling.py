"""Somebody who hears how far a build is, and remembers."""

from __future__ import annotations

from collections.abc import Callable


class Told:
    """Lines, stages and the builder's phases, as they came. ``on_step`` is called at each of its steps."""

    def __init__(self, on_step: Callable[[], object] | None = None) -> None:
        self.lines: list[str] = []
        self.stages: list[tuple[str, int, int]] = []
        self.phases: set[str] = set()
        self.open: list[str] = []
        self._on_step = on_step

    def say(self, line: str) -> None:
        self.lines.append(line)

    def stage(self, name: str, done: int, total: int) -> None:
        self.stages.append((name, done, total))

    @property
    def watch(self) -> Told:
        return self

    def phase(self, name: str, parent: str | None, steps: int) -> None:
        assert parent is None or parent in self.open
        assert steps > 0
        self.phases.add(name)
        self.open.append(name)

    def step(self, name: str, step: int) -> None:
        if self._on_step is not None:
            self._on_step()

    def finished(self, name: str) -> None:
        self.open.remove(name)
