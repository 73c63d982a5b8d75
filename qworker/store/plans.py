"""TensorRT plans in the store: any number of builds beside the ONNX version that they were made from.

::

    <root>/models/<model>/<version>/<model>-<version>.trt11.4.sm_90.fp16.engine
                                    <model>-<version>.trt11.4.sm_90.fp16.engine.json    its card

The card is written last and read first. A rebuild takes the old card away before it puts the new file in:
for a moment there is no such build, and never a card that does not match.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from qworker.errors import CorruptModel, ModelNotFound
from qworker.store.card import Card, Plan
from qworker.store.files import disk_errors, open_regular, sync_folder, write_new
from qworker.store.local import MAX_CARD_BYTES, LocalStore
from qworker.store.staging import Staging

SUFFIX: Final = ".engine"
CARD_SUFFIX: Final = ".engine.json"


def plan_name(model: str, version: str, plan: Plan) -> str:
    """The file name of a build: what it runs on can be read from it."""
    major, minor = [*plan.library_version.split("."), "0"][:2]
    device = "any" if plan.compute_capability is None else f"sm_{plan.compute_capability.replace('.', '')}"
    return f"{model.replace('/', '~')}-{version}.{plan.target}{major}.{minor}.{device}.{plan.precision}{SUFFIX}"


def plan_cards(store: LocalStore, model: str, version: str | None = None) -> list[Card]:
    """The builds of a version (the default one when left out), oldest first.

    Raises ModelNotFound, CorruptModel for a card that cannot be read, StoreError.
    """
    chosen = store.card(model, version).version
    folder = store.version_folder(model, chosen)
    with disk_errors(f"{folder} cannot be read"):
        names = sorted(name for name in os.listdir(folder) if name.endswith(CARD_SUFFIX))
    cards = [_read(store, folder / name, model, chosen) for name in names]
    return sorted((card for card in cards if card is not None), key=lambda card: card.created)


def orphans(store: LocalStore, model: str, version: str) -> Sequence[str]:
    """Plan files without a card, which nobody may load: left over, or put there by hand."""
    folder = store.version_folder(model, version)
    with disk_errors(f"{folder} cannot be read"):
        names = set(os.listdir(folder))
    return sorted(name for name in names if name.endswith(SUFFIX) and f"{name}.json" not in names)


def publish_plan(store: LocalStore, staging: Staging, draft: Card) -> Card:
    """Move a staged plan and its card beside the version that ``draft`` names; the card as it is now.

    Raises ModelNotFound when that version was removed meanwhile, StoreError.
    """
    folder = store.version_folder(draft.model, draft.version)
    name = draft.files[0].name
    card = Card.model_validate(draft.model_dump() | {"created": datetime.now(UTC)})
    card_name = f"{name}.json"
    write_new(staging.folder / card_name, card.model_dump_json(indent=2).encode())
    sync_folder(staging.folder)
    with disk_errors(f"{folder / name} cannot be written"):
        if not folder.is_dir():
            raise ModelNotFound(
                f"version {draft.version} of {draft.model} was removed while its plan was built: "
                "register the model, and build it again"
            )
        (folder / card_name).unlink(missing_ok=True)
        sync_folder(folder)
        os.replace(staging.folder / name, folder / name)
        sync_folder(folder)
        os.replace(staging.folder / card_name, folder / card_name)
        sync_folder(folder)
    return card


def remove_plan(store: LocalStore, card: Card) -> None:
    """Take one build out of the store, its card first. Raises StoreError."""
    folder = store.version_folder(card.model, card.version)
    with disk_errors(f"{folder / card.files[0].name} cannot be removed"):
        (folder / f"{card.files[0].name}.json").unlink(missing_ok=True)
        sync_folder(folder)
        (folder / card.files[0].name).unlink(missing_ok=True)


def _read(store: LocalStore, path: Path, model: str, version: str) -> Card | None:
    """None when it was taken away meanwhile."""
    try:
        with disk_errors(f"{path} cannot be read", pass_missing=True), open_regular(path, store.root) as file:
            raw = file.read(MAX_CARD_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        card = Card.model_validate_json(raw)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise CorruptModel(
            f"{path} cannot be read as a card ({where}: {first['msg']}): remove it, and build the plan again"
        ) from exc
    if (card.model, card.version) != (model, version) or card.plan is None or f"{card.files[0].name}.json" != path.name:
        raise CorruptModel(f"{path} is the card of something else: remove it, and build the plan again")
    return card
