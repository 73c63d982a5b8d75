"""What ``qworker models`` says of a model's builds: which of them this machine would take, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qworker.build.tensorrt_device import find_device
from qworker.errors import ModelRefused
from qworker.policy.plan_choice import DeviceFacts, refusal
from qworker.store.card import Card
from qworker.store.local import LocalStore
from qworker.store.plans import plan_cards


@dataclass(frozen=True, slots=True)
class Build:
    """One build of a model version. ``refused`` is None where this machine takes it."""

    file: str
    backend: str
    precision: str | None
    nbytes: int
    refused: str | None

    def line(self) -> str:
        return f"{self.file}: {'taken here' if self.refused is None else f'not taken here: {self.refused}'}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Builds:
    """Asks for this machine's device once, and only when there is a plan to ask for."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._device: DeviceFacts | str | None = None

    def of(self, card: Card) -> Sequence[Build]:
        """The ONNX file, which every worker takes, and each plan beside it."""
        source = Build(card.files[0].name, card.backend, None, card.files[0].nbytes, None)
        return [source, *(self._plan(plan) for plan in plan_cards(self._store, card.model, card.version))]

    def _plan(self, card: Card) -> Build:
        entry, precision = card.files[0], None if card.plan is None else card.plan.precision
        return Build(entry.name, card.backend, precision, entry.nbytes, self._refusal(card))

    def _refusal(self, card: Card) -> str | None:
        if self._device is None:
            try:
                self._device = find_device()
            except ModelRefused as missing:
                self._device = str(missing)
        if isinstance(self._device, str):
            return self._device
        return refusal(card.plan, self._device)
