"""CUDA graphs of executions that come again: one launch in place of hundreds, kept only where it is faster.

A graph is good for one context, one set of shapes and one place of the lane's block. The switch is measured:
the first runs of a shape are timed without a graph, the next ones with it, and the faster way stays.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from qworker.engine.tensorrt.gpu import Gpu
from qworker.errors import InferenceFailed

T = TypeVar("T")

PLAIN_RUNS: Final = 6
GRAPH_RUNS: Final = 6
FIRST_IGNORED: Final = 2
"""Of either kind: they load kernels and fill caches."""
CLEARLY: Final = 0.97
MOST: Final = 16
"""Graphs of one execution; they take device memory. More shapes run without."""


@dataclass(slots=True)
class Trial:
    """One set of shapes: what was timed so far, and what came of it. Pure."""

    plain: list[float] = field(default_factory=list[float])
    graph: list[float] = field(default_factory=list[float])
    refused: bool = False

    @property
    def wants_graph(self) -> bool:
        """Whether the next run shall be one of the graph."""
        return not self.refused and len(self.plain) >= PLAIN_RUNS

    def timed(self, seconds: float, *, graph: bool) -> None:
        """A run took so long. The graph that is not clearly faster is given up."""
        times, most = (self.graph, GRAPH_RUNS) if graph else (self.plain, PLAIN_RUNS)
        if len(times) < most:
            times.append(seconds)
            if graph and len(times) == most:
                self.refused = self._typical(self.graph) > CLEARLY * self._typical(self.plain)

    @staticmethod
    def _typical(times: list[float]) -> float:
        return statistics.median(times[FIRST_IGNORED:])


class Graphs:
    """The graphs of one execution; whoever has its lane may call it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._trials: dict[Hashable, Trial] = {}
        self._made: dict[Hashable, Any] = {}

    def run(self, key: Hashable, stream: Any, enqueue: Callable[[], None], collect: Callable[[], T]) -> T:
        """Enqueue, by a graph where that is being tried or has won; what ``collect`` gives, which waits for it."""
        trial = self._trials.get(key)
        if trial is None and len(self._trials) < MOST:
            trial = self._trials[key] = Trial()
        graph = self._graph(key, trial, stream, enqueue) if trial is not None and trial.wants_graph else None
        started = time.perf_counter()
        if graph is None:
            enqueue()
        else:
            self._gpu.check(self._gpu.driver.cuGraphLaunch(graph, stream.handle))
        collected = collect()
        if trial is not None:
            trial.timed(time.perf_counter() - started, graph=graph is not None)
            if trial.refused:
                self._drop(key)
        return collected

    @property
    def in_use(self) -> int:
        """How many shapes run by a graph now."""
        return len(self._made)

    def clear(self) -> None:
        """Forget all: the addresses that they hold are not good any more, or the engine goes."""
        for key in list(self._made):
            self._drop(key)
        self._trials.clear()

    def _graph(self, key: Hashable, trial: Trial, stream: Any, enqueue: Callable[[], None]) -> Any:
        """The graph of ``key``, captured at its first use; None, and never again, when it cannot be captured."""
        if key not in self._made:
            with self._gpu.quiet:
                made = self._capture(stream, enqueue)
            if made is None:
                trial.refused = True
                return None
            self._made[key] = made
        return self._made[key]

    def _capture(self, stream: Any, enqueue: Callable[[], None]) -> Any:
        driver = self._gpu.driver
        good = driver.CUresult.CUDA_SUCCESS
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL  # other threads may allocate meanwhile
        if driver.cuStreamBeginCapture(stream.handle, mode)[0] != good:
            self._gpu.check_alive()
            return None
        captured = True
        try:
            enqueue()
        except InferenceFailed:  # the plan does something that cannot be captured
            captured = False
        status, graph = driver.cuStreamEndCapture(stream.handle)
        if status != good or not captured:
            if status == good:
                self._gpu.check(driver.cuGraphDestroy(graph))
            self._gpu.check_alive()
            return None
        status, made = driver.cuGraphInstantiate(graph, 0)
        self._gpu.check(driver.cuGraphDestroy(graph))
        if status != good:
            self._gpu.check_alive()
            return None
        return made

    def _drop(self, key: Hashable) -> None:
        made = self._made.pop(key, None)
        if made is not None and self._gpu.lost is None:
            self._gpu.check(self._gpu.driver.cuGraphExecDestroy(made))
