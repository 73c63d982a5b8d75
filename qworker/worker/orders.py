"""What an operator can tell this worker, by verb, and what it says to each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import structlog

from qworker.errors import BrokerError, InvalidInput, ModelUnavailable, QworkerError
from qworker.policy.claim import Step
from qworker.policy.pins import Pin, Pins, read_hours
from qworker.policy.residency import State
from qworker.store.card import Card
from qworker.wire.control import OfModel, read_of_model, read_watch
from qworker.worker.control import Verb
from qworker.worker.duty import Duty
from qworker.worker.hot_model import HotModel
from qworker.worker.hot_zone import wait_at_most
from qworker.worker.intake import Hint
from qworker.worker.load_guard import load_mark
from qworker.worker.parts import Parts
from qworker.worker.peers import Peers
from qworker.worker.snapshot import finite
from qworker.worker.watched import Watched

log = structlog.get_logger(__name__)

MIB = 1 << 20
PIN_LOOK = 1.0
STORY = 12
DEFAULT_QUARANTINE = 3600.0
BY_ORDER = "an operator has put this model into quarantine"

Claim = Callable[[str, bool, Hint], bool]
Answer = Callable[[OfModel], Awaitable[Mapping[str, Any]]]


class Orders:
    """The verbs of the operator. Owned here: the pins by order, and which models are pinned without one."""

    def __init__(
        self,
        parts: Parts,
        tenants: Mapping[str, HotModel],
        claim: Claim,
        duty: Duty,
        peers: Peers,
        watched: Watched,
        look: Callable[[], Mapping[str, Any]],
        *,
        pin_quota: float,
        pinned: Iterable[str] = (),
    ) -> None:
        """``look`` is the worker's snapshot; ``pin_quota`` the share of the budget that pins by order may keep;
        ``pinned`` are those that the settings pin."""
        self._parts = parts
        self._tenants = tenants
        self._claim = claim
        self._duty = duty
        self._peers = peers
        self._watched = watched
        self._look = look
        self._pin_quota = pin_quota
        self._pins = Pins()
        self._always = set(pinned)
        self._stirred = asyncio.Event()

    def verbs(self) -> dict[str, Verb]:
        of_model: dict[str, Answer] = {
            "why": self._why,
            "pin": self._pin,
            "unpin": self._unpin,
            "preload": self._preload,
            "evict": self._evict,
            "quarantine": self._quarantine,
            "release": self._release,
        }
        verbs: dict[str, Verb] = {
            "hello": self._hello,
            "status": self._status,
            "watch": self._watch,
            "drain": self._drain,
            "resume": self._resume,
        }
        for name, answer in of_model.items():
            verbs[name] = self._about_a_model(name, answer)
        return {name: self._with_peers(verb) for name, verb in verbs.items()}

    async def run(self) -> None:
        """Let pins begin and end in their time. Runs until cancelled."""
        while True:
            self._stirred.clear()
            self._apply_pins()
            if self._pins.all():
                await wait_at_most(self._stirred, PIN_LOOK)
            else:
                await self._stirred.wait()

    def pins(self) -> dict[str, dict[str, Any]]:
        """For the state: each pin by order, whether it holds now, and until when."""
        now = time.time()
        return {
            model: {"holds": pin.holds(now), "until": pin.until, "hours": _hours(pin), "nbytes": pin.nbytes}
            for model, pin in self._pins.all().items()
        }

    # --- the worker ------------------------------------------------------------------------------

    async def _hello(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    async def _status(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"snapshot": self._look()}

    async def _watch(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._watched.watch(read_watch(arguments))
        return {"snapshot": self._look()}

    async def _drain(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let go of everything, and take nothing until ``resume``. What is in hand is finished."""
        changed = self._duty.turn(drained=True)
        leaving = list(self._tenants.values())
        for tenant in leaving:
            tenant.stop()
        if changed:
            log.info("worker.drained_by_order", models=len(leaving))
        return {"drained": True, "changed": changed, "leaving": [tenant.model for tenant in leaving]}

    async def _resume(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = self._duty.turn(drained=False)
        if changed:
            log.info("worker.resumed")
        return {"drained": False, "changed": changed}

    # --- a model ---------------------------------------------------------------------------------

    async def _pin(self, asked: OfModel) -> Mapping[str, Any]:
        card = await self._parts.loader.card(asked.model)
        nbytes = self._resident(asked.model) or card.resident_bytes
        most = int(self._pin_quota * self._budget_of(card))
        try:
            hours = None if asked.hours is None else read_hours(asked.hours)
        except ValueError as error:
            raise InvalidInput(str(error)) from None
        until = None if asked.seconds is None else time.time() + asked.seconds
        total = self._pins.place(asked.model, Pin(nbytes, until, hours), most)
        if total is not None:
            raise ModelUnavailable(
                f"pins would keep {total / MIB:.1f} MiB, and pin_quota allows them {most / MIB:.1f} MiB "
                f"({self._pin_quota:g} of the budget): "
                "unpin another model, or give the worker a larger pin_quota"
            )
        self._apply_pins()
        self._stirred.set()
        self._note(asked.model, "pinned")
        return {"pinned": True, **self.pins()[asked.model]}

    async def _unpin(self, asked: OfModel) -> Mapping[str, Any]:
        was = self._pins.drop(asked.model) or any(
            row.pinned for row in self._parts.zone.rows() if row.model == asked.model
        )
        self._always.discard(asked.model)
        self._parts.zone.unpin(asked.model)
        self._note(asked.model, "unpinned")
        return {"pinned": False, "changed": was}

    async def _preload(self, asked: OfModel) -> Mapping[str, Any]:
        if self._duty.drained:
            raise ModelUnavailable("this worker is drained: qworker workers resume, or preload on another one")
        await self._parts.loader.card(asked.model)  # an id that the store does not know is told at once
        if self._resident(asked.model):
            return {"claimed": False, "resident": True}
        hint = Hint(None)
        hint.unasked = True
        claimed = self._claim(asked.model, False, hint)
        if claimed:
            self._note(asked.model, "preload")
        return {"claimed": claimed, "resident": False}

    async def _evict(self, asked: OfModel) -> Mapping[str, Any]:
        tenant = self._tenants.get(asked.model)
        if tenant is None:
            return {"leaving": False}
        if any(row.pinned and row.state is not State.WAITING for row in self._rows(asked.model)):
            raise InvalidInput(f"{asked.model} is pinned here: unpin it first")
        self._note(asked.model, "evict")
        tenant.leave()
        return {"leaving": True}

    async def _quarantine(self, asked: OfModel) -> Mapping[str, Any]:
        """Its jobs are answered with ``model_unavailable`` until it is released."""
        seconds = asked.seconds or DEFAULT_QUARANTINE
        reason = f"{BY_ORDER}: {asked.reason}" if asked.reason else BY_ORDER
        self._parts.history.hold(asked.model, self._parts.clock() + seconds, reason)
        tenant = self._tenants.get(asked.model)
        if tenant is not None and not tenant.claim.refusing:
            tenant.leave()
        self._note(asked.model, f"quarantine for {seconds:g} s")
        return {"quarantined": True, "seconds": seconds, "leaving": tenant is not None}

    async def _release(self, asked: OfModel) -> Mapping[str, Any]:
        history = self._parts.history
        builds = [known for known in history.all() if known.rsplit("/", 3)[0] == asked.model]
        lifted = history.lift(asked.model, [*builds, f"card of {asked.model}"])
        lifted = await self._forget_kills(asked.model) or lifted
        tenant = self._tenants.get(asked.model)
        if tenant is not None and tenant.claim.refusing:
            tenant.leave()  # jobs that still come wake somebody, who loads it
        elif tenant is not None:
            tenant.look_again()  # it may wait for its next try
        self._note(asked.model, "release")
        return {"released": lifted}

    async def _why(self, asked: OfModel) -> Mapping[str, Any]:
        """All that this worker knows of one model: see ``watch/why``."""
        model, parts = asked.model, self._parts
        tenant, rows = self._tenants.get(model), self._rows(model)
        key, explained = parts.zone.standing(model)
        hot = [(row.key, row.model) for row in parts.zone.rows() if row.state is State.HOT and row.model != model]
        lowest = min(hot, default=None)
        failures = [
            {"attempts": each.attempts, "seconds": round(each.retry_at - parts.clock(), 1), "reason": each.reason}
            for known, each in parts.history.all().items()
            if known.rsplit("/", 3)[0] == model or known == f"card of {model}"
        ]
        failures += [
            {"attempts": each.attempts, "seconds": round(each.retry_at - time.time(), 1), "reason": each.reason}
            for each in parts.guards.quarantined()
            if each.model == model
        ]
        holds = parts.history.holds(parts.clock()).get(model)
        return {
            "model": model,
            "state": _state(tenant, str(rows[0].state) if rows else None),
            "seconds": round(parts.clock() - rows[0].since, 1) if rows else None,
            "nbytes": rows[0].nbytes if rows else None,
            "in_hand": rows[0].in_hand if rows else 0,
            "pinned": any(row.pinned for row in rows) or model in self._pins.all(),
            "step": None if tenant is None else str(tenant.claim.step),
            "waits": next((why for waiting, _, why in parts.zone.blocked() if waiting == model), None),
            "loading": next((each for each in self._stages() if each["model"] == model), None),
            "key": finite(key),
            "why_key": explained,
            "lowest": None if lowest is None else {"model": lowest[1], "key": finite(lowest[0])},
            "failures": failures,
            "held": None if holds is None else {"seconds": round(holds[0], 1), "reason": holds[1]},
            "drained": self._duty.drained,
            "free": parts.zone.budget - parts.zone.held,
            "budget": parts.zone.budget,
            "card": await self._card(model),
            "story": parts.counters.measures.chronicle.of(model, STORY),
        }

    # --- parts of answers ------------------------------------------------------------------------

    def _about_a_model(self, verb: str, answer: Answer) -> Verb:
        async def carry_out(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            return await answer(read_of_model(verb, arguments))

        return carry_out

    def _with_peers(self, verb: Verb) -> Verb:
        """Each answer tells which other workers there are, so that it is known whose is missing."""

        async def carry_out(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            return {**await verb(arguments), "peers": self._peers.known()}

        return carry_out

    def _apply_pins(self) -> None:
        for model, holds in self._pins.look(time.time()).items():
            if holds or model in self._always:
                self._parts.zone.pin(model)
            else:
                self._parts.zone.unpin(model)

    async def _forget_kills(self, model: str) -> bool:
        """Take what is on the broker's record against the model's build off it; True when there was something."""
        guards, session = self._parts.guards, await self._parts.sessions.current()
        known = any(each.model == model for each in guards.quarantined())
        try:
            card = await self._parts.loader.card(model)
            if session is not None and session.is_open:
                await guards.book.forget(session, load_mark(card))
            guards.found(card, None)
        except BrokerError:
            raise
        except QworkerError as error:
            log.info("order.half_done", verb="release", model=model, reason=str(error))
        return known

    async def _card(self, model: str) -> dict[str, Any]:
        try:
            card = await self._parts.loader.card(model)
        except QworkerError as error:
            return {"error": {"code": error.code, "message": str(error)}}
        return {"version": card.version, "nbytes": card.resident_bytes, "load_seconds": card.load_seconds}

    def _rows(self, model: str) -> list[Any]:
        return [row for row in self._parts.zone.rows() if row.model == model]

    def _resident(self, model: str) -> int:
        """Bytes that it holds, 0 when it holds none."""
        return sum(row.nbytes for row in self._rows(model) if row.state in (State.HOT, State.LOADING))

    def _stages(self) -> list[dict[str, Any]]:
        return self._parts.counters.measures.chronicle.loading()

    def _budget_of(self, card: Card) -> int:
        ledger = self._parts.zone.ledgers().get(card.backend)
        return self._parts.zone.budget if ledger is None else ledger["budget"]

    def _note(self, model: str, order: str) -> None:
        log.info("model.ordered", model=model, order=order)
        self._parts.counters.measures.chronicle.note("ordered", model, order)


def _state(tenant: HotModel | None, state: str | None) -> str:
    if tenant is not None and tenant.claim.refusing:
        return "refusing"
    if state is not None:
        return state
    return "cold" if tenant is None or tenant.claim.step is Step.DONE else "claiming"


def _hours(pin: Pin) -> str | None:
    if pin.hours is None:
        return None
    return "-".join(f"{at // 3600:02d}:{at % 3600 // 60:02d}" for at in pin.hours)
