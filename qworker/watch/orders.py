"""Gives an order to workers and collects what they say, until all that are known have answered or time is up.

Each answer names the other workers that it has heard of. One that does not answer is asked for at the broker: where it
still has a queue, its connection stands and it is *silent*; else it has gone, and nobody has to wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from qworker.broker.base import Properties, Session
from qworker.errors import BrokerError, InvalidInput, QworkerError, Unroutable
from qworker.wire.control import Order, OrderReply, decode_order_reply, encode_order
from qworker.wire.messages import MSGPACK
from qworker.wire.topology import ALL_WORKERS, CONTROL, order_key

PATIENCE = 5.0
LINGER = 0.25
"""Seconds for those of whom nobody has heard yet: they have just started."""


class NoWorker(QworkerError):
    """Nobody is there to take the order."""

    code = "no_worker"
    retryable = True


@dataclass(frozen=True, slots=True)
class Answers:
    """``silent``: workers that are connected and have not answered in time, and seconds since they were heard."""

    verb: str
    replies: tuple[OrderReply, ...]
    silent: Mapping[str, float | None]
    waited: float

    def results(self) -> dict[str, dict[str, Any]]:
        """By worker, of those who carried it out."""
        return {reply.worker: reply.result for reply in self.replies if reply.result is not None}

    def errors(self) -> dict[str, dict[str, Any]]:
        """By worker, of those who did not."""
        return {reply.worker: reply.error for reply in self.replies if reply.error is not None}

    def as_dict(self) -> dict[str, Any]:
        told = [
            {"worker": worker, **{name: value for name, value in result.items() if name != "peers"}}
            for worker, result in sorted(self.results().items())
        ]
        told += [{"worker": worker, "error": error} for worker, error in sorted(self.errors().items())]
        return {"verb": self.verb, "answers": told, "silent": dict(self.silent)}

    def complaints(self) -> list[str]:
        """A line for each worker that did not answer, or did not do it."""
        lines = [f"{worker}: {error['message']}" for worker, error in sorted(self.errors().items())]
        for worker, heard in sorted(self.silent.items()):
            last = "" if heard is None else f", its last sign of life was {heard:.0f} s ago"
            lines.append(
                f"{worker} did not answer within {self.waited:g} s{last}: its connection stands, so it hangs or is "
                "stopped; it carries the order out if it comes back"
            )
        return lines


class Desk:
    """Gives orders over one session. Owned here: the channel for replies, and who waits for which."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: dict[str, asyncio.Queue[OrderReply]] = {}

    async def __aenter__(self) -> Desk:
        self._rpc = await self._session.open_rpc(self._take)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._rpc.close()

    async def give(
        self,
        verb: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        worker: str | None = None,
        expect: Iterable[str] = (),
        patience: float = PATIENCE,
    ) -> Answers:
        """The answers of ``worker``, or of all. Raises NoWorker when there is none, BrokerError."""
        if not await self.is_there(worker or ALL_WORKERS):
            if worker is None:
                raise NoWorker("no worker is connected to this broker: start one with qworker worker")
            known = await self._names()
            raise NoWorker(f"no worker {worker} is connected to this broker: those that are there: {known}")
        asked, answers = uuid4().hex, asyncio.Queue[OrderReply]()
        self._waiting[asked] = answers
        try:
            await self._rpc.publish(
                CONTROL,
                order_key(verb, worker or ALL_WORKERS),
                encode_order(Order(verb, dict(arguments or {}))),
                Properties(message_id=asked, correlation_id=asked, content_type=MSGPACK),
            )
            replies, known = await _collect(answers, worker, expect, patience)
        finally:
            del self._waiting[asked]
        silent = {name: known.get(name) for name in known if not any(reply.worker == name for reply in replies)}
        silent = {name: heard for name, heard in silent.items() if await self.is_there(name)}
        if not replies and not silent:
            silent = {"(unnamed)": None}  # somebody has a queue, and nobody is there to name him
        return Answers(verb, tuple(replies), silent, patience)

    async def _names(self) -> str:
        try:
            answers = await self.give("hello", patience=1.0)
        except NoWorker:
            return "none"
        return ", ".join(sorted({*answers.results(), *answers.silent}))

    async def is_there(self, worker: str) -> bool:
        """Whether a worker of that name has a queue at the broker. It is told ``hello``, which does nothing."""
        try:
            body = encode_order(Order("hello"))
            key = order_key("hello", worker)
            await self._session.publish(CONTROL, key, body, Properties(content_type=MSGPACK), mandatory=True)
        except Unroutable:
            return False
        except BrokerError as error:
            if "there is no exchange" in str(error):
                return False  # no worker has ever been there
            raise
        return True

    def _take(self, body: bytes, properties: Properties) -> None:
        answers = self._waiting.get(properties.correlation_id or "")
        if answers is None:
            return
        try:
            answers.put_nowait(decode_order_reply(body, properties.content_type))
        except InvalidInput:
            return  # none of our workers sends such a thing; whoever did is reported as silent


async def _collect(
    answers: asyncio.Queue[OrderReply], worker: str | None, expect: Iterable[str], patience: float
) -> tuple[list[OrderReply], dict[str, float | None]]:
    """The replies, and all workers that are known with the seconds since they were heard."""
    loop = asyncio.get_running_loop()
    known: dict[str, float | None] = dict.fromkeys(expect if worker is None else (worker,))
    replies: list[OrderReply] = []
    deadline, linger = loop.time() + patience, 0.0
    while True:
        missing = known.keys() - {reply.worker for reply in replies}
        if not replies or missing:
            until = deadline
        elif worker is not None:
            return replies, known
        else:
            linger = linger or loop.time() + LINGER
            until = min(deadline, linger)
        try:
            async with asyncio.timeout_at(until):
                reply = await answers.get()
        except TimeoutError:
            return replies, known
        replies.append(reply)
        if worker is None:
            for name, heard in _peers(reply).items():
                known[name] = min((each for each in (known.get(name), heard) if each is not None), default=None)


def _peers(reply: OrderReply) -> dict[str, float]:
    """Workers that the one who answers has heard of. An answer may be anybody's: what makes no sense is left out."""
    peers = (reply.result or {}).get("peers", {})
    if not isinstance(peers, dict):
        return {}
    found: dict[Any, Any] = peers  # pyright: ignore[reportUnknownVariableType]  # a map of anything
    return {name: float(s) for name, s in found.items() if isinstance(name, str) and isinstance(s, int | float)}
