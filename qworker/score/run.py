"""One run over a file: from what was asked to an output that is complete, or to a journal that can be resumed.

Everything that can be known to be wrong is told before the first job is sent. Then three things go on at once:
rows are read and cut into jobs (in a thread), the courier keeps a window of them on their way, and answers are put
into the journal (in a thread) and acknowledged once they are on disk there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from qworker.broker.base import Connector
from qworker.errors import ModelChanged, QworkerError, ScoreError, TooManyErrors
from qworker.policy.flow import Window
from qworker.policy.offline import Group, turns
from qworker.score.arrow import pyarrow
from qworker.score.assemble import Answers, assemble, write_errors
from qworker.score.cargo import REPLY_PREFETCH, Answer, Piece, Route, Tally, acknowledge, reply_queue
from qworker.score.courier import Courier
from qworker.score.feed import Feed
from qworker.score.journal import Failed, Journal, RecordHead, packed_rows
from qworker.score.parts import Part, Refused
from qworker.score.prepare import Ask, Cards, Prepared, differences, finished_already, mark_finished, prepare
from qworker.score.tables import by_row, shapes_of
from qworker.wire.topology import QueueType

FLUSH_SECONDS = 1.0
FLUSH_ANSWERS = REPLY_PREFETCH // 4
"""Those of two flushes wait for their acks: fewer than the broker lets us have, or it would send no more."""
FLUSH_BYTES = 8 << 20
RATE_ROWS = 1000
"""Rows before a rate of errors is one."""


@dataclass(slots=True)
class Progress:
    """How far a run is. Rows count once for each model that they go to."""

    rows: int | None
    done: int = 0
    failed: int = 0
    resumed: int = 0
    """Of those done, rows that a former process did."""
    in_flight: int = 0
    window: int = 0
    blocked: bool = False
    models: tuple[str, ...] = ()
    """Whose rows are sent now."""
    stage: str = "looking"
    tallies: dict[str, Tally] = field(default_factory=dict[str, Tally])


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to."""

    rows: int
    """In the output."""
    failed: int
    seconds: float
    resumed: int
    already: bool
    """It was finished before; nothing was done."""
    errors_file: str | None
    tallies: dict[str, Tally]


Told = Callable[[Progress], None]


async def score_file(
    ask: Ask,
    connector: Connector,
    cards: Cards,
    *,
    max_body: int,
    queue_type: QueueType = "quorum",
    told: Told | None = None,
) -> Summary:
    """Score a file. Raises ScoreError and its kinds, StoreError, BrokerRefused, and what stops a model for good.

    Cancelled or killed at any moment, it can be resumed; the output is complete or not there.
    """
    prepared = await asyncio.to_thread(prepare, ask, cards)
    if finished_already(prepared):
        return Summary(0, 0, 0.0, 0, True, None, {})
    with Journal(ask.output) as journal:
        await asyncio.to_thread(_open, journal, prepared)
        run = _Run(prepared, connector, journal, cards, max_body, queue_type, told or _unheard)
        return await run.run()


def _open(journal: Journal, prepared: Prepared) -> None:
    """Begin the journal, or go on with it. Raises RunChanged, naming what differs."""
    if not journal.exists:
        journal.begin({"run": uuid4().hex[:16], **prepared.head})
        return
    journal.read()
    differences(prepared, journal)
    journal.resume()


def _unheard(_: Progress) -> None:
    return


class _Run:
    """Owned here, on the event loop: the progress, and answers that are not on disk yet."""

    def __init__(
        self,
        prepared: Prepared,
        connector: Connector,
        journal: Journal,
        cards: Cards,
        max_body: int,
        queue_type: QueueType,
        told: Told,
    ) -> None:
        self._prepared = prepared
        self._ask = prepared.ask
        self._journal = journal
        self._cards = cards
        self._told = told
        self._told_at = 0.0
        self._started = time.monotonic()
        self._window = Window(fixed=prepared.ask.in_flight)
        self._courier = Courier(
            connector,
            journal.head["run"],
            reply_queue(journal.head["run"]),
            [Route(facts.model, facts.plan, facts.version, prepared.ask.outputs) for facts in prepared.models],
            self._window,
            max_body=max_body,
            queue_type=queue_type,
            was_sent=journal.was_sent,
        )
        self._feed = Feed(prepared, journal, max_body)
        self.progress = Progress(prepared.rows, done=journal.done.rows, resumed=journal.done.rows)
        self._failed_rows = journal.done.failed
        self._records: list[tuple[RecordHead, bytes]] = []
        self._failed: list[Failed] = []
        self._answers: list[Answer] = []
        self._bytes = 0
        self._flushed_at = time.monotonic()
        self._flushing: asyncio.Future[None] | None = None
        self._flushing_answers: list[Answer] = []

    async def run(self) -> Summary:
        prepared, courier = self._prepared, self._courier
        self._tell("connecting")
        try:
            async with courier:
                if self._journal.was_interrupted:
                    await courier.settle_in()
                hot = await courier.hot()
                groups = [
                    Group(str(number), facts.rows if facts.rows is not None else 1, hot[number])
                    for number, facts in enumerate(prepared.models)
                ]
                self._tell("scoring", force=True)
                try:
                    await self._collect([int(number) for number in turns(groups)])
                finally:
                    await self._flush(last=True)
                self._check_rate(last=True)
                summary = await self._finish()
                await courier.clear()
        except TooManyErrors:
            await asyncio.to_thread(self._write_errors)
            raise
        self._tell("done", force=True)
        await asyncio.to_thread(mark_finished, prepared, summary.rows, summary.failed)
        await asyncio.to_thread(self._journal.remove)
        return summary

    # --- sending ---------------------------------------------------------------------------------

    async def _pieces(self, order: Sequence[int]) -> AsyncGenerator[Piece]:
        """Jobs of the models in this order, of a few at once."""
        waiting = list(order)
        active: dict[int, AsyncGenerator[Part | Refused]] = {}
        try:
            while waiting or active:
                while waiting and len(active) < self._ask.models_at_once:
                    model = waiting.pop(0)
                    active[model] = self._feed.parts(model)
                self.progress.models = tuple(self._prepared.models[model].model for model in active)
                for model, parts in list(active.items()):
                    found = await anext(parts, None)
                    if found is None:
                        del active[model]
                    elif isinstance(found, Refused):
                        self._check_rate()
                    else:
                        for lo, hi in self._left(model, found):
                            yield Piece(model, found, lo, hi)
        finally:
            for parts in active.values():
                await parts.aclose()

    def _left(self, model: int, part: Part) -> list[tuple[int, int]]:
        """What of a part is still to be done; it counts as sent from here on."""
        journal, size = self._journal, len(part.rows)
        failed = self._feed.failed_before(model, part)
        left = journal.done.left(model, part.number, size)
        left = [cut for lo, hi in left for cut in _without(lo, hi, failed)]
        if not left:
            return []
        if journal.was_sent(model, part.number):
            self._courier.doubled()
        else:
            journal.sent(model, part.number, size)
        return left

    # --- answers ---------------------------------------------------------------------------------

    async def _collect(self, order: Sequence[int]) -> None:
        async with aclosing(self._courier.deliver(self._pieces(order))) as answers:
            async for answer in answers:
                self._take(answer)
                self._check_rate()
                self._tell("scoring")
                due = time.monotonic() - self._flushed_at > FLUSH_SECONDS
                if due or self._bytes > FLUSH_BYTES or len(self._answers) >= FLUSH_ANSWERS:
                    await self._flush()

    def _take(self, answer: Answer) -> None:
        piece = answer.piece
        part, lo, hi = piece.part, piece.lo, piece.hi
        if answer.result is None:
            assert answer.failure is not None, "an answer is a result or a failure"
            row = int(part.rows[lo])
            key = self._feed.key_of(part, lo)
            self._failed.append(Failed(piece.route, row, answer.failure.code, answer.failure.message, key))
            self._failed_rows += 1
        else:
            facts = self._prepared.models[piece.route]
            outputs = by_row(answer.result, facts.plan, facts.signature, hi - lo)
            if self._journal.done.add(piece.route, part.number, lo, hi, len(part.rows)):
                carried = _packed(part.carried, lo, hi)
                rows = packed_rows(part.rows[lo:hi])
                head = RecordHead(piece.route, part.number, lo, hi, rows, shapes_of(outputs), carried)
                self._records.append((head, answer.body))
                self._bytes += len(answer.body) + len(carried)
                self.progress.done += hi - lo
        self._answers.append(answer)

    async def _flush(self, *, last: bool = False) -> None:
        """Begin to put on disk what came, once the flush before is over; its answers are acknowledged then."""
        await self._flushed()
        if self._answers:
            records, failed = self._records, self._failed
            self._flushing_answers, self._answers = self._answers, []
            self._records, self._failed, self._bytes = [], [], 0
            loop = asyncio.get_running_loop()
            self._flushing = loop.run_in_executor(None, self._journal.keep, records, failed)
        self._flushed_at = time.monotonic()
        if last:
            await self._flushed()

    async def _flushed(self) -> None:
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            await asyncio.shield(flushing)
            answers, self._flushing_answers = self._flushing_answers, []
            for waiting in acknowledge(answers):
                await waiting

    def _check_rate(self, *, last: bool = False) -> None:
        """Raises TooManyErrors."""
        ask, failed = self._ask, self._failed_rows + self._feed.refused
        self.progress.failed = failed
        seen = failed + self.progress.done
        too_many = ask.max_errors is not None and failed > ask.max_errors
        enough = seen >= RATE_ROWS or last
        if ask.max_error_rate is not None and enough and failed > ask.max_error_rate * seen:
            too_many = True
        if too_many:
            raise TooManyErrors(
                f"{failed} of {seen} rows failed, which is more than the run allows: see {prepared_errors(ask)}, mend "
                "the rows or allow more, and run it again with --resume"
            )

    # --- the end ---------------------------------------------------------------------------------

    async def _finish(self) -> Summary:
        prepared = self._prepared
        await asyncio.to_thread(self._check_models)
        self._tell("writing", force=True)
        answers = Answers(self._journal, [m.plan for m in prepared.models], [m.signature for m in prepared.models])
        rows = await asyncio.to_thread(
            lambda: assemble(
                self._journal,
                answers,
                [facts.model for facts in prepared.models],
                prepared.carried,
                ordered=self._ask.ordered,
                several=prepared.several,
            )
        )
        failed = await asyncio.to_thread(self._write_errors)
        return Summary(
            rows,
            failed,
            time.monotonic() - self._started,
            self.progress.resumed,
            False,
            str(prepared_errors(self._ask)) if failed else None,
            self._tallies(),
        )

    def _write_errors(self) -> int:
        names = [facts.model for facts in self._prepared.models]
        aside = self._journal.folder / "errors.jsonl"
        return write_errors(prepared_errors(self._ask), aside, self._feed.all_failed(), names)

    def _check_models(self) -> None:
        """Raises ModelChanged when a model is not the one any more that the run began with."""
        for facts in self._prepared.models:
            try:
                card = self._cards(facts.model)
            except QworkerError as exc:
                raise ModelChanged(f"{facts.model} was removed during the run ({exc}): register it again") from exc
            if (card.version, card.digest) != (facts.version, facts.digest):
                raise ModelChanged(
                    f"{facts.model} was replaced during the run: it began with version {facts.version}, digest "
                    f"{facts.digest[:12]}, and now there is version {card.version}, digest {card.digest[:12]}: "
                    f"delete {self._journal.folder} and begin anew"
                )

    def _tallies(self) -> dict[str, Tally]:
        return dict(zip((m.model for m in self._prepared.models), self._courier.tallies, strict=True))

    def _tell(self, stage: str, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told_at < 0.1:
            return
        self._told_at = now
        progress = self.progress
        progress.stage = stage
        progress.in_flight, progress.window = self._courier.in_flight, self._window.size
        progress.blocked = self._courier.blocked
        progress.tallies = self._tallies()
        self._told(progress)


def prepared_errors(ask: Ask) -> Any:
    """Where failed rows are told."""
    return ask.output.with_name(ask.output.name + ".errors.jsonl")


def _without(lo: int, hi: int, taken: Sequence[int]) -> list[tuple[int, int]]:
    """The stretch from ``lo`` to ``hi`` without some positions."""
    found: list[tuple[int, int]] = []
    for position in sorted(p for p in taken if lo <= p < hi):
        if lo < position:
            found.append((lo, position))
        lo = position + 1
    if lo < hi:
        found.append((lo, hi))
    return found


def _packed(batches: Any, lo: int, hi: int) -> bytes:
    """The rows ``lo`` to ``hi`` of what goes through, as an Arrow stream."""
    if not batches:
        return b""
    pa = pyarrow()
    table = pa.Table.from_batches(batches).slice(lo, hi - lo)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


__all__ = ["Ask", "Progress", "ScoreError", "Summary", "score_file"]
