"""When to send a heartbeat and when to give the broker up. Pure."""

from __future__ import annotations

from typing import Literal

Beat = Literal["fine", "send", "dead"]


class Pulse:
    """Counts silence in ticks of ``tick_s`` seconds and not by the clock.

    A loop that was held up for a minute has not read what arrived meanwhile: by the clock the broker
    would be dead, though its heartbeats wait in the socket. It gets one tick for that minute.
    """

    def __init__(self, heartbeat: int, tick_s: float) -> None:
        self.tick_s = tick_s
        self._heartbeat = heartbeat
        self._silent = 0
        self._quiet = 0

    def tick(self, *, heard: bool, wrote: bool) -> Beat:
        """What to do, given whether anything was read and written since the last tick."""
        self._silent = 0 if heard else self._silent + 1
        self._quiet = 0 if wrote else self._quiet + 1
        if not self._heartbeat:
            return "fine"
        if self._silent * self.tick_s > 2 * self._heartbeat:
            return "dead"
        if self._quiet and (self._quiet + 2) * self.tick_s > self._heartbeat / 2:
            self._quiet = 0
            return "send"
        return "fine"
