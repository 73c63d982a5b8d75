"""A cold store in a folder of a local or shared disk.

::

    <root>/models/<model id, "/" written as "~">/<version>/card.json, model.onnx, ...
    <root>/incoming/<token>/            a publish on its way, with <token>.lock held by who writes it

An id holds no ``~`` and a version no ``/``, so that no two models meet in one folder and none leaves the
root. A version appears by one rename of its finished folder: whoever reads sees all of it or nothing.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from qworker.errors import CorruptModel, InvalidInput, ModelNotFound, StoreError
from qworker.store.base import Fetched
from qworker.store.card import Card
from qworker.store.files import disk_errors, open_regular, read_verified, verify
from qworker.store.staging import Staging
from qworker.wire.names import check_model_id, check_version, shown

CARD: Final = "card.json"
MAX_CARD_BYTES: Final = 4 << 20
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,17}")


class LocalStore:
    """Models in the folder ``root``. Any number of processes may read and publish at once."""

    def __init__(self, root: Path | str, host: str = "") -> None:
        """``host``: what may be loaded here of what was optimised when it was registered; see ``OptimisedEntry``."""
        self._root = Path(root)
        self._host = host

    @property
    def root(self) -> Path:
        return self._root

    # --- reading ---

    def models(self) -> Sequence[str]:
        """Ids of all models, sorted. Raises StoreError."""
        self._check_root()
        with disk_errors(f"the store {self._root} cannot be read"):
            if not self._models.exists():
                return []
            folders = [entry.name for entry in os.scandir(self._models) if entry.is_dir()]
        ids = [name.replace("~", "/") for name in folders if "/" not in name]
        return sorted(model for model in ids if _is_model_id(model) and self._carded(model))

    def versions(self, model: str) -> Sequence[str]:
        """Versions of a model, oldest first; the last one is the default. Raises ModelNotFound.

        The one that was registered last is the default, whatever it is called. A version whose card cannot
        be read keeps its place by the time of its file, so that a damaged default is not silently replaced
        by an older version.
        """
        return [version for _, version in sorted((self._age(model, v), v) for v in self._found(model))]

    def card(self, model: str, version: str | None = None) -> Card:
        """Raises ModelNotFound, CorruptModel (the card itself cannot be read as one), StoreError."""
        if version is None:
            return self._read_card(model, self.versions(model)[-1])
        if version not in self._found(model):
            raise ModelNotFound(
                f"the store {self._root} has no version {shown(version)} of {model}: "
                f"it has {', '.join(self.versions(model))}"
            )
        return self._read_card(model, version)

    def fetch(self, card: Card) -> Fetched:
        """Read and verify. Raises ModelNotFound (gone meanwhile), CorruptModel, StoreError."""
        try:
            return self._fetch(card)
        except CorruptModel:
            if self.card(card.model, card.version) != card:
                raise ModelNotFound(
                    f"version {card.version} of {card.model} was replaced meanwhile: read its card again"
                ) from None
            raise

    # --- writing ---

    def stage(self) -> Staging:
        """A folder that nobody reads, to put a version's files into and publish them (a context manager)."""
        return Staging(self)

    def remove(self, model: str, version: str | None = None) -> list[str]:
        """Remove one version, or all of them; the removed versions. Raises ModelNotFound, StoreError.

        A version disappears at once, by a rename; a worker that has it loaded keeps it.
        """
        with disk_errors(f"{model} cannot be removed"):
            there = sorted(self._folders(model)) if _is_model_id(model) else []
            versions = there if version is None else [v for v in there if v == version]
            if not versions:
                what = model if version is None else f"version {shown(version)} of {model}"
                raise ModelNotFound(f"the store {self._root} has no {what}: see `qworker models list`")
            with self.stage() as staging:
                for each in versions:
                    with suppress(FileNotFoundError):  # somebody else removes it at the same time
                        os.rename(self.version_folder(model, each), staging.folder / each)
            try:
                self._model_folder(model).rmdir()
            except OSError as exc:
                if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR}:
                    raise
        return versions

    # --- for staging ---

    @property
    def incoming(self) -> Path:
        return self._root / "incoming"

    def version_folder(self, model: str, version: str) -> Path:
        """Where a version lies. Raises InvalidInput when the names are none."""
        return self._model_folder(model) / check_version(version)

    def next_version(self, model: str) -> str:
        """The number after the highest one that is taken."""
        return str(1 + max((int(v) for v in self._folders(model) if _NUMBER.fullmatch(v)), default=0))

    def next_created(self, model: str, now: datetime) -> datetime:
        """``now``, or just after the newest version: what is registered last is the default, also with the
        clocks of several machines."""
        ages = [self._age(model, version) for version in self._folders(model) if self._has_card(model, version)]
        return max([now, *(age + timedelta(microseconds=1) for age in ages)])

    # --- inside ---

    @property
    def _models(self) -> Path:
        return self._root / "models"

    def _model_folder(self, model: str) -> Path:
        return self._models / check_model_id(model).replace("/", "~")

    def _folders(self, model: str) -> list[str]:
        """Version folders of a model, also those without a card."""
        folder = self._model_folder(model)
        try:
            return [entry.name for entry in os.scandir(folder) if _is_version(entry.name) and entry.is_dir()]
        except FileNotFoundError:
            return []

    def _has_card(self, model: str, version: str) -> bool:
        return os.path.lexists(self.version_folder(model, version) / CARD)

    def _carded(self, model: str) -> list[str]:
        with disk_errors(f"the store {self._root} cannot be read"):
            return [version for version in self._folders(model) if self._has_card(model, version)]

    def _found(self, model: str) -> list[str]:
        versions = self._carded(model) if _is_model_id(model) else []
        if not versions:
            self._check_root()
            raise ModelNotFound(
                f"the store {self._root} has no model {shown(model)}: register it with `qworker models register`"
            )
        return versions

    def _check_root(self) -> None:
        """A store without models is empty; a root that is not there is a mistake."""
        with disk_errors(f"the store {self._root} cannot be read"):
            if not self._root.exists():
                raise StoreError(
                    f"the store {self._root} does not exist: check --store, or register a first model to make it"
                )
            if not self._root.is_dir():
                raise StoreError(f"the store {self._root} is not a folder: check --store")

    def _age(self, model: str, version: str) -> datetime:
        try:
            return self._read_card(model, version).created
        except CorruptModel:
            path = self.version_folder(model, version) / CARD
            with disk_errors(f"{path} cannot be read"):
                return datetime.fromtimestamp(path.lstat().st_mtime, UTC)
        except ModelNotFound:  # removed since it was listed
            return datetime.min.replace(tzinfo=UTC)

    def _read_card(self, model: str, version: str) -> Card:
        path = self.version_folder(model, version) / CARD
        try:
            with disk_errors(f"{path} cannot be read", pass_missing=True), open_regular(path, self._root) as file:
                raw = file.read(MAX_CARD_BYTES + 1)
        except FileNotFoundError as exc:
            if path.is_symlink():
                raise CorruptModel(f"{path} is a link to nothing: {_advice(model, version)}") from exc
            raise ModelNotFound(f"version {version} of {model} was removed meanwhile") from exc
        if len(raw) > MAX_CARD_BYTES:
            raise CorruptModel(f"{path} has more than {MAX_CARD_BYTES} bytes; no card has: {_advice(model, version)}")
        try:
            card = Card.model_validate_json(raw)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise CorruptModel(
                f"{path} cannot be read as an engine card ({where}: {first['msg']}): {_advice(model, version)}"
            ) from exc
        if (card.model, card.version) != (model, version):
            raise CorruptModel(
                f"{path} is the card of version {shown(card.version)} of {shown(card.model)}: {_advice(model, version)}"
            )
        return card

    def _fetch(self, card: Card) -> Fetched:
        folder = self.version_folder(card.model, card.version)
        advice = _advice(card.model, card.version)
        model_file, *others = card.given_files
        self_contained = all(entry.name == card.sample for entry in others)
        ready = card.optimised
        optimised = ready is not None and ready.host == self._host
        if ready is not None and optimised:  # the model itself need not even be read
            model_file = next(entry for entry in card.files if entry.name == ready.file)
        content: bytes | None = None
        for entry in (model_file, *others):
            path = folder / entry.name
            try:
                if self_contained and entry is model_file:
                    content = read_verified(path, entry, root=self._root, advice=advice)
                else:
                    verify(path, entry, root=self._root, advice=advice)
            except FileNotFoundError as exc:
                if not self._has_card(card.model, card.version):
                    raise ModelNotFound(f"version {card.version} of {card.model} was removed meanwhile") from exc
                raise CorruptModel(f"{path} is missing; its card names it: {advice}") from exc
        sample = None if card.sample is None else folder / card.sample
        return Fetched(card, folder / model_file.name, content, sample, optimised)


def _advice(model: str, version: str) -> str:
    return f"remove it (`qworker models remove {model} --version {version}`) and register the model again"


def _is_model_id(name: str) -> bool:
    try:
        return check_model_id(name) == name
    except InvalidInput:
        return False


def _is_version(name: str) -> bool:
    try:
        return check_version(name) == name
    except InvalidInput:
        return False
