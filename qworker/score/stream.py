"""Rows from a program, results back to it: an async iterator, back-pressured, with nothing on disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from qworker.broker.base import Connector
from qworker.errors import InvalidInput, QworkerError, RowRefused
from qworker.policy.flow import Window
from qworker.score.cargo import Answer, Piece, Route, own_reply_queue
from qworker.score.courier import Courier
from qworker.score.mapping import Binding, Plan
from qworker.score.parts import Part
from qworker.score.tables import by_row
from qworker.wire.datatypes import tensor
from qworker.wire.messages import Tensor
from qworker.wire.rows import RowAxes
from qworker.wire.signature import Signature
from qworker.wire.topology import QueueType

Row = Mapping[str, Any]
"""One row: each input of the model by its name, without the axis that counts rows."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """How one row ended."""

    number: int
    """Counts the rows that were given, from 0."""
    outputs: Mapping[str, NDArray[Any]]
    """By name, without the axis that counts rows; empty where the row failed."""
    error: QworkerError | None = None


async def score_rows(
    connector: Connector,
    rows: Iterable[Row] | AsyncIterable[Row],
    model: str,
    *,
    batch_rows: int,
    in_flight: int | None,
    ordered: bool,
    outputs: tuple[str, ...],
    max_body: int,
    queue_type: QueueType = "quorum",
) -> AsyncGenerator[ScoredRow]:
    """Score rows as they come. Rows of a job must be alike; where they are not, a new job begins.

    Raises UnknownModel, ModelUnavailable and BrokerError; what is wrong with a row is told in its place.
    """
    plan = Plan((), batch_rows > 1, RowAxes({}, {}) if batch_rows > 1 else None)
    route = Route(model, plan, None, outputs)
    window = Window(fixed=in_flight)
    run = uuid4().hex[:16]
    courier = Courier(connector, run, own_reply_queue(run), [route], window, max_body=max_body, queue_type=queue_type)
    refused: list[ScoredRow] = []
    order = _Order() if ordered else None
    async with courier, aclosing(courier.deliver(_pieces(rows, batch_rows, refused))) as answers:
        async for answer in answers:
            for row in _scored(answer, plan, refused):
                if order is None:
                    yield row
                else:
                    for ready in order.put(row):
                        yield ready
        for row in refused:
            for ready in [row] if order is None else order.put(row):
                yield ready


class _Order:
    """Holds rows back until those before them have come. The window bounds how many that are."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, ScoredRow] = {}

    def put(self, row: ScoredRow) -> list[ScoredRow]:
        self._held[row.number] = row
        ready: list[ScoredRow] = []
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        return ready


class _StreamPart(Part):
    """A part that knows the names and types of its inputs."""

    __slots__ = ()

    def tensors(self, plan: Plan, lo: int, hi: int) -> tuple[Tensor, ...]:  # noqa: ARG002
        """See ``Part.tensors``."""
        return super().tensors(Plan(self.carried, True, None), lo, hi)


async def _pieces(
    rows: Iterable[Row] | AsyncIterable[Row], batch_rows: int, refused: list[ScoredRow]
) -> AsyncGenerator[Piece]:
    held: list[tuple[int, tuple[Tensor, ...]]] = []
    number, parts = 0, 0
    async for row in _each(rows):
        try:
            tensors = tuple(tensor(name, value) for name, value in sorted(row.items()))
        except InvalidInput as exc:
            refused.append(ScoredRow(number, {}, RowRefused(str(exc))))
            number += 1
            continue
        if held and (len(held) >= batch_rows or _kind(held[0][1]) != _kind(tensors)):
            yield _piece(parts, held)
            held, parts = [], parts + 1
        held.append((number, tensors))
        number += 1
    if held:
        yield _piece(parts, held)


async def _each(rows: Iterable[Row] | AsyncIterable[Row]) -> AsyncGenerator[Row]:
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            yield row
    else:
        for row in rows:
            yield row


def _kind(tensors: tuple[Tensor, ...]) -> Any:
    return [(t.name, t.datatype, t.array.shape) for t in tensors]


def _piece(number: int, held: list[tuple[int, tuple[Tensor, ...]]]) -> Piece:
    rows = np.array([row for row, _ in held], np.int64)
    columns = tuple(np.stack([tensors[i].array for _, tensors in held]) for i in range(len(held[0][1])))
    bindings = tuple(Binding(t.name, (t.name,), t.datatype, None, "row", 0) for t in held[0][1])
    return Piece(0, _StreamPart(number, rows, columns, bindings), 0, len(rows))


def _scored(answer: Answer, plan: Plan, refused: list[ScoredRow]) -> list[ScoredRow]:
    piece = answer.piece
    numbers = piece.part.rows[piece.lo : piece.hi].tolist()
    if answer.delivery is not None:
        answer.delivery.ack_soon()
    found = [*refused]
    refused.clear()
    if answer.result is None:
        assert answer.failure is not None, "an answer is a result or a failure"
        return [*found, *(ScoredRow(number, {}, answer.failure.error()) for number in numbers)]
    known = Plan(piece.part.carried, plan.together, plan.axes)
    outputs = by_row(answer.result, known, Signature((), ()), len(numbers))
    for at, number in enumerate(numbers):
        found.append(ScoredRow(number, {name: array[at] for name, (_, array) in outputs.items()}))
    return found
