"""Carries parts to the workers by the batch lane and brings their answers back, over any loss of a connection.

A window of jobs is on its way at any moment. A failed job is split until the bad row stands alone, or tried again,
as ``policy.offline`` says. Answers are acknowledged by whoever takes them, when they are safe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from qworker.broker.base import Connector, Delivery, MessageTooLarge, Properties
from qworker.errors import (
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    InvalidInput,
    ModelChanged,
    ModelUnavailable,
    PublishFailed,
    QworkerError,
    ResultTooLarge,
    TopologyMismatch,
    UnknownModel,
)
from qworker.policy.flow import Window
from qworker.policy.offline import PAUSES, After, after_failure, pieces
from qworker.score.cargo import Answer, Piece, Route, Tally
from qworker.score.line import Line
from qworker.wire.codec import decode_reply, encode_job
from qworker.wire.messages import MSGPACK, Failure, Job, Result
from qworker.wire.reference import Referenced
from qworker.wire.topology import BATCH, PUBLISHED_HEADER, Queue, QueueType, lane_queue

_LOG = logging.getLogger(__name__)

TICK = 0.1
STALL_SECONDS = 30.0
"""Without any answer for so long, the broker is asked whether it still has the jobs."""
QUIET_SECONDS = 0.5
FLYING_BYTES = 64 << 20


@dataclass(slots=True)
class _Flight:
    piece: Piece
    sent: float
    nbytes: int
    confirmed: bool = False


class Courier:
    """``async with`` connects, and closes. ``deliver`` once.

    Owned here, on the event loop: the jobs on their way, those to be sent, and answers that came before their part
    was reached.
    """

    def __init__(
        self,
        connector: Connector,
        run: str,
        replies: Queue,
        routes: Sequence[Route],
        window: Window,
        *,
        max_body: int,
        queue_type: QueueType = "quorum",
        was_sent: Callable[[int, int], bool] | None = None,
    ) -> None:
        """``was_sent``: whether a former process of this run published a part of a model."""
        self.run = run
        self.tallies = [Tally() for _ in routes]
        self._routes = routes
        self._reply_to = replies.name
        self._line = Line(
            connector,
            replies,
            [(route.model, route.version is not None) for route in routes],
            queue_type,
            take=self._take,
            lost=self._lost,
            reopened=self._reopened,
        )
        self._window = window
        self._max_body = max_body
        self._was_sent = was_sent
        self._reached = [-1] * len(routes)  # the last part of each model that was begun
        self._flying: dict[str, _Flight] = {}
        self._flying_bytes = 0
        self._due: deque[Piece] = deque()
        self._later: list[tuple[float, Piece]] = []
        self._early: dict[str, Delivery] = {}
        self._events: asyncio.Queue[Answer | QworkerError | None] = asyncio.Queue()
        self._stir = asyncio.Event()
        self._heard = time.monotonic()
        self._arrived = asyncio.Event()
        self._fed = False
        self._open = 0
        self._doubles = 0
        self._tasks = asyncio.TaskGroup()
        self._chores: list[asyncio.Task[None]] = []

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Courier:
        await self._line.open()
        await self._tasks.__aenter__()
        self._chores = [self._tasks.create_task(self._watch()), self._tasks.create_task(self._tick())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for chore in self._chores:
            chore.cancel()
        try:
            await self._line.close()
        finally:
            cancelled = (kind, exc, trace) if isinstance(exc, asyncio.CancelledError) else (None, None, None)
            await self._tasks.__aexit__(*cancelled)

    @property
    def blocked(self) -> bool:
        """The broker takes no messages now."""
        return self._line.blocked

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    async def hot(self) -> list[bool]:
        """Which of the models somebody serves now."""
        session = await self._line.ready()
        depths = await session.depths([lane_queue("jobs", route.model) for route in self._routes])
        return [depth is not None and depth.consumers > 0 for depth in depths]

    async def settle_in(self) -> None:
        """Take what answers are there: return once none has come for a moment."""
        while True:
            self._arrived.clear()
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    await self._arrived.wait()
            except TimeoutError:
                return

    async def clear(self) -> None:
        """The run is over: wait a moment for answers that come twice, and delete the reply queue."""
        if self._doubles > 0:
            await self.settle_in()
        await self._line.forget_replies()

    def doubled(self) -> None:
        """A part that a former process sent is sent again: its answer may come twice."""
        self._doubles += 1

    # --- delivering ------------------------------------------------------------------------------

    async def deliver(self, sending: AsyncGenerator[Piece]) -> AsyncGenerator[Answer]:
        """Send all pieces, and yield how each row ended, in the order in which answers come.

        Closes ``sending``. Raises what it raises, and UnknownModel, ModelUnavailable, ModelChanged, BrokerRefused.
        """
        pump = self._tasks.create_task(self._pump(sending))
        try:
            while not (self._fed and not self._open and self._events.empty()):
                event = await self._events.get()
                if isinstance(event, QworkerError):
                    raise event
                if event is not None:
                    self._open -= 1
                    yield event
                    self._stir.set()
        finally:
            pump.cancel()
            await asyncio.wait({pump})

    async def _pump(self, sending: AsyncGenerator[Piece]) -> None:
        """Keep the window full."""
        try:
            while True:
                self._stir.clear()
                while self._has_room():
                    if self._due:
                        await self._publish(self._due.popleft())
                    elif not self._fed:
                        piece = await anext(sending, None)
                        if piece is None:
                            self._fed = True
                            self._events.put_nowait(None)
                            continue
                        self._open += 1
                        await self._begin(piece)
                    else:
                        break
                await self._stir.wait()
        except QworkerError as exc:
            self._events.put_nowait(exc)
        finally:
            await sending.aclose()

    def _has_room(self) -> bool:
        waiting = len(self._flying) + self._events.qsize()
        return waiting < self._window.size and (self._flying_bytes < FLYING_BYTES or not self._flying)

    async def _begin(self, piece: Piece) -> None:
        early = self._early.pop(piece.key, None)
        self._reached[piece.route] = piece.part.number
        if self._early:
            self._forget_passed()
        if early is None:
            await self._publish(piece)
        else:
            self._flying[piece.key] = _Flight(piece, time.monotonic(), 0, confirmed=True)
            self._take(early)

    def _forget_passed(self) -> None:
        """Answers to stretches that are sent in other pieces now."""
        for key in list(self._early):
            route, part, *_ = map(int, key.split("."))
            if part < self._reached[route]:
                self._drop(self._early.pop(key))

    async def _publish(self, piece: Piece) -> None:
        """Send a piece. What goes wrong on the way comes back by itself."""
        try:
            body, properties = self._job(piece)
        except InvalidInput as exc:
            self._end(piece, None, b"", Failure("", self._routes[piece.route].model, exc.code, str(exc)), None)
            return
        flight = self._flying[piece.key] = _Flight(piece, time.monotonic(), len(body))
        self._flying_bytes += len(body)
        self.tallies[piece.route].jobs += 1
        if len(body) > self._max_body:
            self._fail(flight, Failure("", "", MessageTooLarge.code, f"the job has {len(body)} bytes: too many"), None)
            return
        await self._hand_over(flight, body, properties)

    async def _hand_over(self, flight: _Flight, body: bytes, properties: Properties) -> None:
        model = self._routes[flight.piece.route].model

        def told(error: BrokerError | None) -> None:
            if error is None:
                flight.confirmed = True
            elif not isinstance(error, BrokerUnavailable):  # a lost session sends again what has no confirm
                self._unsent(flight, error)

        session = await self._line.ready()
        if session.send(BATCH, model, body, properties, told):
            return
        if session.blocked:
            self._window.choked()
        try:
            await session.publish(BATCH, model, body, properties)
            flight.confirmed = True
        except BrokerUnavailable:
            return
        except BrokerError as exc:
            self._unsent(flight, exc)

    def _job(self, piece: Piece) -> tuple[bytes, Properties]:
        route = self._routes[piece.route]
        job_id = f"{self.run}.{piece.key}.{piece.tries}"
        tensors = piece.part.tensors(route.plan, piece.lo, piece.hi)
        body = encode_job(Job(job_id, route.model, tensors, None, route.outputs), MSGPACK)
        now = int(time.time() * 1000)
        properties = Properties(
            message_id=job_id,
            correlation_id=job_id,
            reply_to=self._reply_to,
            content_type=MSGPACK,
            timestamp_ms=now,
            persistent=True,
            headers={PUBLISHED_HEADER: now},
        )
        return body, properties

    # --- answers ---------------------------------------------------------------------------------

    def _take(self, delivery: Delivery) -> None:
        """An answer came; also twice, also to a former process."""
        self._heard = time.monotonic()
        self._arrived.set()
        run, _, rest = (delivery.properties.correlation_id or "").partition(".")
        key = rest.rpartition(".")[0]
        flight = self._flying.get(key)
        if flight is None:
            if run == self.run and key not in self._early and self._is_early(key):
                self._early[key] = delivery
            else:
                self._doubles -= 1
                self._drop(delivery)
            return
        try:
            outcome = decode_reply(delivery.body, delivery.properties.content_type)
        except Referenced:  # a smaller job's result fits into a message
            outcome = Failure(
                "", "", ResultTooLarge.code, "the row's result travels beside its message, and is not read: use `call`"
            )
        except InvalidInput as exc:
            outcome = Failure("", "", exc.code, f"the reply is none: {exc}")
        if isinstance(outcome, Failure):
            self._fail(flight, outcome, delivery)
            return
        route, tally = self._routes[flight.piece.route], self.tallies[flight.piece.route]
        if route.version is not None and outcome.version != route.version:
            self._drop(delivery)
            self._events.put_nowait(
                ModelChanged(
                    f"{route.model}: the run is of version {route.version}, and now version {outcome.version} answers: "
                    "begin a new run for that, or register the former version again and resume"
                )
            )
            return
        tally.run_seconds += outcome.timing.get("run", 0.0)
        load = outcome.timing.get("load")
        if load is not None:
            tally.load_seconds[load] = load
        elif flight.confirmed:
            piece = flight.piece
            self._window.answered(piece.route, piece.hi - piece.lo, time.monotonic() - flight.sent)
        self._end(flight.piece, outcome, delivery.body, None, delivery)

    def _is_early(self, key: str) -> bool:
        """Whether an answer belongs to a part that a former process sent and that is not reached yet."""
        if self._was_sent is None:
            return False
        try:
            route, part, _, _ = map(int, key.split("."))
        except ValueError:
            return False
        return route < len(self._reached) and part > self._reached[route] and self._was_sent(route, part)

    def _end(
        self, piece: Piece, result: Result | None, body: bytes, failure: Failure | None, delivery: Delivery | None
    ) -> None:
        self._land(piece)
        tally = self.tallies[piece.route]
        if result is None:
            tally.failed += piece.hi - piece.lo
        else:
            tally.rows += piece.hi - piece.lo
        self._events.put_nowait(Answer(piece, result, body, failure, delivery))

    def _land(self, piece: Piece) -> None:
        flight = self._flying.pop(piece.key, None)
        if flight is not None:
            self._flying_bytes -= flight.nbytes
        self._stir.set()

    def _fail(self, flight: _Flight, failure: Failure, delivery: Delivery | None) -> None:
        piece = flight.piece
        rows, model = piece.hi - piece.lo, self._routes[piece.route].model
        after = after_failure(failure.code, retryable=failure.retryable, rows=rows, tries=piece.tries)
        if after is After.REFUSE:
            self._end(piece, None, b"", failure, delivery)
            return
        self._land(piece)
        if delivery is not None:
            self._drop(delivery)
        if after is After.STOP:
            self._events.put_nowait(_stopped(model, failure))
            return
        self.tallies[piece.route].retries += 1
        if after is After.AGAIN:
            pause = PAUSES[min(piece.tries, len(PAUSES)) - 1]
            again = Piece(piece.route, piece.part, piece.lo, piece.hi, piece.tries + 1)
            self._later.append((time.monotonic() + pause, again))
            return
        parts = [Piece(piece.route, piece.part, lo, hi) for lo, hi in pieces(piece.lo, piece.hi)]
        self._open += len(parts) - 1
        self._due.extend(parts)

    def _unsent(self, flight: _Flight, error: BrokerError) -> None:
        code = error.code if isinstance(error, MessageTooLarge) else PublishFailed.code
        self._fail(flight, Failure("", "", code, str(error), retryable=error.retryable), None)

    def _drop(self, delivery: Delivery) -> None:
        if not delivery.ack_soon():
            self._tasks.create_task(delivery.ack())

    # --- what time brings ------------------------------------------------------------------------

    def _lost(self) -> None:
        self._window.choked()
        self._early.clear()  # they come again

    def _reopened(self) -> None:
        """Send again what nobody has confirmed."""
        for flight in [flight for flight in self._flying.values() if not flight.confirmed]:
            self._land(flight.piece)
            self._due.append(flight.piece)
        self._stir.set()

    async def _watch(self) -> None:
        try:
            await self._line.run()
        except (BrokerRefused, TopologyMismatch) as exc:
            self._events.put_nowait(exc)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            ripe = [piece for at, piece in self._later if at <= now]
            if ripe:
                self._later = [(at, piece) for at, piece in self._later if at > now]
                self._due.extend(ripe)
                self._stir.set()
            if self._flying and now - self._heard > STALL_SECONDS:
                self._heard = now
                await self._look_for_lost()

    async def _look_for_lost(self) -> None:
        """Send again what the broker has not any more: a queue was purged, or it gave a job up by itself."""
        if self._line.blocked:
            return
        session = await self._line.ready()
        try:
            for number, route in enumerate(self._routes):
                mine = [flight for flight in self._flying.values() if flight.piece.route == number]
                if not mine:
                    continue
                depth = await session.depth(lane_queue("batch", route.model))
                if depth is None:
                    await self._line.declare_lanes(session, route.model)
                elif depth.ready or depth.consumers:
                    continue  # they wait for a worker, or one has them in hand
                _LOG.warning("%d jobs of %s are nowhere: sent again", len(mine), route.model)
                for flight in mine:
                    self._land(flight.piece)
                    self._due.append(flight.piece)
        except BrokerUnavailable as exc:
            _LOG.debug("lost while looking: %s", exc)


def _stopped(model: str, failure: Failure) -> QworkerError:
    if failure.code == UnknownModel.code:
        return UnknownModel(f"{model} is not registered any more where the workers look: {failure.message}")
    if failure.code == ModelUnavailable.code:
        return ModelUnavailable(f"{model} cannot be loaded by the workers: {failure.message}")
    return failure.error()
