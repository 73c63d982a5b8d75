"""The store as one device sees it: of each model the best build that the device takes, or its ONNX version."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from qworker.errors import CorruptModel, LoadFailed, ModelNotFound, QworkerError
from qworker.policy.plan_choice import DeviceFacts, choose, refusal
from qworker.store.base import Fetched
from qworker.store.card import Card, FileEntry, Plan
from qworker.store.files import disk_errors, open_regular, verify
from qworker.store.local import LocalStore
from qworker.store.plans import plan_cards

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Arena:
    """How plans share a device. ``reserved``: bytes of the lanes' shared blocks; 0: each plan has its own."""

    lanes: int
    reserved: int

    def own_bytes(self, card: Card) -> int:
        """What a plan takes for itself: with the arena, its scratch memory, inputs and outputs are not its own."""
        if card.plan is None:
            return card.resident_bytes
        need = lane_need(card.plan)
        beside = max(card.resident_bytes - need, card.plan.weights_bytes, 1)
        shared = need <= self.reserved // self.lanes
        return beside if shared else beside + self.lanes * need


def lane_need(plan: Plan) -> int:
    """Bytes that one execution takes while it runs: scratch memory, inputs and outputs."""
    return max(plan.context_bytes, default=0) + max(plan.io_bytes, default=0)


class BuildsStore:
    """Gives each model's card and bytes for one device.

    Cards of plans come with ``resident_bytes`` as this device's ledger books them, see ``Arena``.
    """

    def __init__(self, store: LocalStore, device: DeviceFacts, arena: Arena, *, onnx: bool) -> None:
        """``onnx``: models without a plan for the device are served by their ONNX version."""
        self._store = store
        self._device = device
        self._arena = arena
        self._onnx = onnx
        self._told: set[str] = set()

    def models(self) -> Sequence[str]:
        return self._store.models()

    def versions(self, model: str) -> Sequence[str]:
        return self._store.versions(model)

    def card(self, model: str, version: str | None = None) -> Card:
        """The build to load: the ONNX version where the device takes no plan."""
        source = self._store.card(model, version)
        cards = plan_cards(self._store, model, source.version)
        plans = [card.plan for card in cards if card.plan is not None]
        best = choose(plans, self._device)
        if best is not None:
            card = next(card for card in cards if card.plan is best)
            return card.model_copy(update={"resident_bytes": self._arena.own_bytes(card)})
        if self._onnx and source.digest not in self._told:
            self._told.add(source.digest)
            log.info("model.on_onnx", model=model, version=source.version, reason=self._why(cards))
        return source

    def fetch(self, card: Card) -> Fetched:
        """Verified bytes; those of a plan mapped.

        Raises ModelNotFound, CorruptModel, StoreError; LoadFailed with the reasons where only plans are served
        and the device takes none.
        """
        if card.plan is None and not self._onnx:
            why = self._why(plan_cards(self._store, card.model, card.version))
            raise LoadFailed(f"{card.model} has no plan that {self._device.name} takes ({why})")
        if card.plan is None:
            return self._store.fetch(card)
        folder = self._store.version_folder(card.model, card.version)
        advice = "build the plan again"
        entry = card.files[0]
        try:
            mapped = _map_verified(folder / entry.name, entry, self._store.root, advice)
            for other in card.files[1:]:
                verify(folder / other.name, other, root=self._store.root, advice=advice)
        except FileNotFoundError as exc:
            raise ModelNotFound(f"{entry.name} was removed, or is being replaced: read its card again") from exc
        sample = None if card.sample is None else folder / card.sample
        return Fetched(card, folder / entry.name, None, sample, mapped=mapped)

    def _why(self, cards: Sequence[Card]) -> str:
        reasons = "; ".join(f"{card.files[0].name}: {refusal(card.plan, self._device)}" for card in cards)
        return reasons or "it has no plan: build one with `qworker build`"

    def largest_need(self) -> int:
        """The most that an execution of any plan for this device takes. What cannot be read counts nothing."""
        largest = 0
        for model in self.models():
            try:
                card = self.card(model)
            except QworkerError as exc:
                log.debug("card.skipped", model=model, reason=str(exc))
                continue
            if card.plan is not None:
                largest = max(largest, lane_need(card.plan))
        return largest


def _map_verified(path: Path, entry: FileEntry, root: Path, advice: str) -> memoryview:
    """The file where it lies, hashed there. The map keeps the file that was read, whatever its name leads to later."""
    with disk_errors(f"{path} cannot be read", pass_missing=True), open_regular(path, root) as file:
        found = os.fstat(file.fileno()).st_size
        if found != entry.nbytes or not found:
            raise CorruptModel(f"{path} has {found} bytes; its card says {entry.nbytes}: {advice}")
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    digest = hashlib.sha256(view).hexdigest()
    if digest != entry.sha256:
        raise CorruptModel(f"{path} has the sha256 {digest[:16]}...; its card says {entry.sha256[:16]}...: {advice}")
    return view
