"""The ledger of jobs: what was accepted, and what became of each. Pure.

A job counts as accepted when the broker confirmed it, or when an answer shows that it had been taken although
its confirm was lost. Its outcome is the first that its requester is shown: a result, a typed failure, or (where
nobody was to be told) a dead letter.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["good", "deadline", "bad"]
ALSO_KEPT = frozenset({"unknown_model", "poison_job"})
"""Causes of dead letters that come beside an answer, for a person to see."""


@dataclass(slots=True)
class Entry:
    """One job."""

    model: str
    k: int
    kind: Kind
    answered: bool
    """Whether its requester waits for the answer; else it goes to the results exchange or the dead letters."""
    accepted: bool = False
    answers: list[str] = field(default_factory=list[str])
    """"ok" or a failure's code, in the order in which the client showed them."""
    letters: list[str] = field(default_factory=list[str])
    """Causes of dead letters."""
    wrong: bool = False
    seconds: float = 0.0
    """How long the job was made to run."""

    @property
    def outcome(self) -> str | None:
        if self.answers:
            return self.answers[0]
        return f"dead: {self.letters[0]}" if self.letters else None


class Book:
    """All jobs of a run, by correlation id. Several threads write; each call is one step."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.strays: Counter[str] = Counter()
        """Answers and letters that no job of ours asked for."""
        self._waiting: set[str] = set()
        self._lock = threading.Lock()

    def publishing(self, job_id: str, model: str, k: int, kind: Kind = "good", *, answered: bool = True) -> Entry:
        entry = Entry(model, k, kind, answered)
        with self._lock:
            self.entries[job_id] = entry
        return entry

    def confirmed(self, job_id: str) -> None:
        with self._lock:
            entry = self.entries[job_id]
            entry.accepted = True
            if entry.outcome is None:
                self._waiting.add(job_id)

    def answer(self, job_id: str | None, code: str) -> Entry | None:
        """The client was shown an answer; the job's entry, or None for a stray."""
        with self._lock:
            entry = self.entries.get(job_id or "")
            if entry is None:
                self.strays[code] += 1
                return None
            entry.accepted = True
            entry.answers.append(code)
            self._waiting.discard(job_id or "")
            return entry

    def letter(self, job_id: str | None, cause: str) -> None:
        with self._lock:
            entry = self.entries.get(job_id or "")
            if entry is None:
                self.strays[f"dead: {cause}"] += 1
                return
            entry.accepted = True
            entry.letters.append(cause)
            self._waiting.discard(job_id or "")

    def waiting(self) -> list[str]:
        """Accepted jobs without an outcome."""
        with self._lock:
            return sorted(self._waiting)

    def tally(self) -> Tally:
        with self._lock:
            entries = list(self.entries.values())
        outcomes: Counter[str] = Counter(e.outcome for e in entries if e.outcome is not None)
        return Tally(
            published=len(entries),
            accepted=sum(e.accepted for e in entries),
            results=outcomes["ok"],
            failures=sum(n for code, n in outcomes.items() if code != "ok" and not code.startswith("dead: ")),
            dead_letters=sum(n for code, n in outcomes.items() if code.startswith("dead: ")),
            lost=sum(e.accepted and e.outcome is None for e in entries),
            duplicates=sum(len(e.answers) > 1 for e in entries),
            doubled_letters=sum(max(0, len(e.letters) - 1) for e in entries),
            answer_and_letter=sum(bool(e.answers) and bool(set(e.letters) - ALSO_KEPT) for e in entries),
            unsure=sum(not e.accepted for e in entries),
            wrong=sum(e.wrong for e in entries),
            good_failed=Counter(e.outcome for e in entries if e.kind == "good" and e.outcome not in (None, "ok")),
            outcomes=outcomes,
            strays=sum(self.strays.values()),
        )


@dataclass(frozen=True, slots=True)
class Tally:
    """The book in numbers."""

    published: int
    accepted: int
    results: int
    failures: int
    dead_letters: int
    lost: int
    duplicates: int
    """Jobs whose requester was shown more than one answer."""
    doubled_letters: int
    answer_and_letter: int
    """Jobs with an answer and a dead letter that says otherwise: a kill came between the two."""
    unsure: int
    """Published without a confirm, and never heard of again: the broker did not take them."""
    wrong: int
    good_failed: Counter[str | None]
    """Outcomes of good jobs without a deadline that are no results."""
    outcomes: Counter[str]
    strays: int

    @property
    def balanced(self) -> bool:
        return self.accepted == self.results + self.failures + self.dead_letters + self.lost

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("accepted", "results", "failures", "dead_letters", "lost")}
