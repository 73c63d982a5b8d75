"""Putting a model into the store: find its files, copy them aside, probe the copy, publish."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from qworker.build.inspect import Inspected, inspect
from qworker.build.probe import Probed, Request, probe
from qworker.errors import InvalidInput, ModelNotFound, ModelRefused
from qworker.store.card import Card, FileEntry, OptimisedEntry, TensorEntry
from qworker.store.local import LocalStore
from qworker.store.staging import Staging
from qworker.wire.names import check_model_id, check_version, shown
from qworker.wire.signature import TensorSpec

MODEL: Final = "model.onnx"
SAMPLE: Final = "sample.npz"
MADE_UP: Final = "warmup.npz"
OPTIMISED: Final = "optimised.onnx"
_TAKEN: Final = frozenset({MODEL, SAMPLE, MADE_UP, OPTIMISED, "card.json", "card.json.part"})

PROBE_TIMEOUT: Final = 300.0


def register(
    store: LocalStore,
    path: Path,
    model_id: str | None = None,
    version: str | None = None,
    sample: Path | None = None,
    *,
    timeout: float = PROBE_TIMEOUT,
    tolerance: float | None = None,
    say: Callable[[str], object] = str,
) -> Card:
    """Probe a model and publish it; the card that the store has for it now.

    ``path`` is an ``.onnx`` file, or a folder with ``model.onnx`` and perhaps ``sample.npz``. The id comes
    from its name, the version is the next number. What is there already with the same bytes is left as it
    is (for a chosen version, or else for the newest one). ``say`` hears what is going on, in lines.
    ``tolerance``: how far a row's floats may move among other rows, in place of what is usual for their datatype.

    Raises ModelRefused with the reason, InvalidInput for names that are none, StoreError.
    """
    source, sample = _find(path, sample)
    model = _model_id(path, model_id)
    if version is not None:
        check_version(version)
    inspected = inspect(source)
    with store.stage() as staging:
        files = _copy_in(staging, source, inspected, sample)
        there = _already(store, model, version, files)
        if there is not None:
            say(f"version {there.version} of {model} has the same bytes: nothing changed")
            return there
        say(f"{model}: loading it in a process of its own to measure it")
        probed = probe(_request(staging, inspected, sample, tolerance), timeout=timeout)
        if sample is None and probed.warmed:
            files.append(staging.adopt(MADE_UP))
        if probed.optimised is not None:
            files.append(staging.adopt(OPTIMISED))
        draft = _card(model, version or "1", files, probed, inspected)
        published = staging.publish(draft, choose_version=version is None)
    if not published.fresh:
        say(f"version {published.card.version} of {model} was registered by somebody else meanwhile: nothing changed")
    return published.card


def _find(path: Path, sample: Path | None) -> tuple[Path, Path | None]:
    """The model file of ``path``, and its sample."""
    if path.is_dir():
        if sample is None and (path / SAMPLE).is_file():
            sample = path / SAMPLE
        source = path / MODEL
        if not source.is_file():
            others = sorted(each.name for each in path.glob("*.onnx"))
            found = f"found {', '.join(others)}" if others else "found no .onnx file"
            raise ModelRefused(f"expected {MODEL} in the folder {path}; {found}: give the path of the file itself")
    elif path.is_file():
        source = path
    else:
        raise ModelRefused(f"expected an .onnx file or a folder with {MODEL}; {path} does not exist: check the path")
    if sample is not None and not sample.is_file():
        raise ModelRefused(f"expected a sample as an .npz file; {sample} does not exist: check the path")
    return source, sample


def _model_id(path: Path, model_id: str | None) -> str:
    """The given id, or one made of the file's or folder's name."""
    if model_id is not None:
        return check_model_id(model_id)
    absolute = path.absolute()
    name = absolute.name if path.is_dir() else absolute.stem
    if not path.is_dir() and name == Path(MODEL).stem:
        name = absolute.parent.name  # .../magika/model.onnx is magika's
    made = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")
    try:
        return check_model_id(made)
    except InvalidInput as exc:
        raise InvalidInput(f"no model id can be made of the name {shown(name)}: give one with --id") from exc


def _copy_in(staging: Staging, source: Path, inspected: Inspected, sample: Path | None) -> list[FileEntry]:
    files = [staging.add(MODEL, source)]
    for name in inspected.external:
        if name in _TAKEN:
            raise ModelRefused(f"the model keeps weights in a file named {name!r}, which the store uses: rename it")
        if not (source.parent / name).is_file():
            raise ModelRefused(
                f"the model keeps weights in {name!r}, which does not lie beside {source}: copy it there"
            )
        files.append(staging.add(name, source.parent / name))
    if sample is not None:
        files.append(staging.add(SAMPLE, sample))
    return files


def _already(store: LocalStore, model: str, version: str | None, files: Sequence[FileEntry]) -> Card | None:
    """The card of the chosen or newest version when it has these files (made-up inputs aside)."""
    try:
        card = store.card(model, version)
    except ModelNotFound:
        return None
    same = [entry for entry in card.given_files if entry.name != MADE_UP] == list(files)
    return card if same else None


def _request(staging: Staging, inspected: Inspected, sample: Path | None, tolerance: float | None) -> Request:
    return Request(
        path=str(staging.folder / MODEL),
        self_contained=not inspected.external,
        warmup=str(staging.folder / MADE_UP),
        optimised=None if inspected.external else str(staging.folder / OPTIMISED),
        sample=None if sample is None else str(staging.folder / SAMPLE),
        dynamic_quantization=inspected.dynamic_quantization,
        tolerance=tolerance,
    )


def _card(model: str, version: str, files: Sequence[FileEntry], probed: Probed, inspected: Inspected) -> Card:
    def entry(spec: TensorSpec) -> TensorEntry:
        shape = None if spec.name in inspected.rankless else spec.shape or ()
        return TensorEntry(name=spec.name, datatype=spec.datatype, shape=shape)

    names = {file.name for file in files}
    return Card(
        model=model,
        version=version,
        backend="onnx",
        files=tuple(files),
        sample=next((name for name in (SAMPLE, MADE_UP) if name in names), None),
        inputs=tuple(entry(spec) for spec in probed.signature.inputs),
        outputs=tuple(entry(spec) for spec in probed.signature.outputs),
        resident_bytes=probed.resident_bytes,
        peak_bytes=probed.peak_bytes,
        load_seconds=probed.load_seconds,
        warmed=probed.warmed,
        runtime=probed.runtime,
        created=datetime.now(UTC),
        batching=probed.batching,
        unbatched=probed.unbatched,
        run_times=probed.run_times,
        job_bytes=probed.job_bytes,
        intra_op_threads=probed.intra_op_threads,
        optimised=None if probed.optimised is None else OptimisedEntry(file=OPTIMISED, host=probed.optimised),
    )
