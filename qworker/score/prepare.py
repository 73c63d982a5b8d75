"""What a run is going to do, looked at before anything is sent: input, output, models, mapping, keys. Blocks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np

from qworker.errors import (
    ColumnMissing,
    ConfigError,
    DuplicateKey,
    EmptyInput,
    OutputUnusable,
    RunChanged,
)
from qworker.policy.offline import JOB_BYTES, rows_per_job
from qworker.score.arrow import pyarrow
from qworker.score.journal import Journal, writing
from qworker.score.mapping import Plan, plan
from qworker.score.parts import row_bytes
from qworker.score.readers import Source, open_source
from qworker.score.writers import SUFFIXES
from qworker.store.card import Card
from qworker.wire.signature import Signature, check_outputs

Cards = Callable[[str], Card]
"""The newest card of a model, read now. Raises ModelNotFound, StoreError."""
MODEL_COLUMN = "model"


@dataclass(frozen=True, slots=True)
class Ask:
    """What a user wants scored."""

    input: str
    output: Path
    models: tuple[str, ...] = ()
    """Each row goes to all of them. None: the column says."""
    model_column: str | None = None
    mapping: Mapping[str, str] = field(default_factory=dict[str, str])
    columns: tuple[str, ...] = ()
    """Go through to the output."""
    key: str | None = None
    """A column that tells rows apart; goes through as well."""
    outputs: tuple[str, ...] = ()
    """The outputs that are wanted; empty: all."""
    batch_rows: int | None = None
    in_flight: int | None = None
    ordered: bool = False
    resume: bool = False
    limit: int | None = None
    max_errors: int | None = None
    max_error_rate: float | None = None
    models_at_once: int = 2


@dataclass(frozen=True, slots=True)
class Facts:
    """One model of the run."""

    model: str
    version: str
    digest: str
    signature: Signature
    plan: Plan
    batch_rows: int
    rows: int | None


@dataclass(frozen=True, slots=True)
class Prepared:
    ask: Ask
    source: Source
    models: tuple[Facts, ...]
    model_column: str | None
    rows: int | None
    """Of all models together."""
    carried: Any
    """The Arrow schema of what goes through."""
    head: dict[str, Any]

    @property
    def several(self) -> bool:
        return self.model_column is not None or len(self.models) > 1

    @property
    def marker(self) -> Path:
        """Left beside a finished output: says what it was made of."""
        return self.ask.output.with_name(self.ask.output.name + ".score.json")


def prepare(ask: Ask, cards: Cards) -> Prepared:
    """Raises the kinds of ScoreError, ModelNotFound, StoreError, InvalidInput (an output that is none)."""
    source = open_source(ask.input)
    _check_output(ask, source)
    _check_columns(ask, source)
    column, models = _models(ask, source)
    counts = _count_models(source, column, ask.limit) if column is not None else dict.fromkeys(models)
    rows_each = source.rows if ask.limit is None or source.rows is None else min(source.rows, ask.limit)
    first = next(source.chunks(ask.limit), None)
    if first is None:
        raise EmptyInput(f"{ask.input} has no rows: nothing to score")
    reserved = [name for name in (column, ask.key, *ask.columns) if name is not None]
    facts = tuple(
        _facts(ask, cards(model), source, first.batch, reserved, rows_each if count is None else count)
        for model, count in counts.items()
    )
    if ask.key is not None:
        _check_keys(source, ask.key, ask.limit)
    total = [each.rows for each in facts]
    through = list(dict.fromkeys(name for name in (ask.key, *ask.columns) if name is not None))
    schema = pyarrow().schema([source.schema.field(name) for name in through])
    return Prepared(
        ask,
        source,
        facts,
        column,
        None if None in total else sum(count for count in total if count is not None),
        schema,
        _head(ask, source, facts, column),
    )


# --- checks --------------------------------------------------------------------------------------


def _check_output(ask: Ask, source: Source) -> None:
    output = ask.output
    if output.suffix.lower() not in SUFFIXES:
        raise OutputUnusable(f"expected an output of {', '.join(SUFFIXES)}; found {output.name}: name it so")
    if not output.parent.is_dir():
        raise OutputUnusable(f"the folder {output.parent} of the output does not exist: make it first")
    if output.is_dir():
        raise OutputUnusable(f"the output {output} is a folder: give a file's name")
    if any(output.exists() and output.samefile(path) for path in source.files):
        raise OutputUnusable(f"the output {output} is the input: choose another one")
    if Path(ask.input).is_dir() and output.parent.samefile(ask.input):
        raise OutputUnusable(f"the output {output} lies in the input's folder, and would be read as one: move it")
    if not os.access(output.parent, os.W_OK):
        raise OutputUnusable(f"this user may not write into {output.parent}: choose another output")


def _check_columns(ask: Ask, source: Source) -> None:
    there = source.schema.names
    for name, option in [
        (ask.key, "--key"),
        (ask.model_column, "--model-column"),
        *((c, "--columns") for c in ask.columns),
    ]:
        if name is not None and name not in there:
            raise ColumnMissing(f"expected the column {name} of {option}; found {', '.join(there)}: correct {option}")


def _models(ask: Ask, source: Source) -> tuple[str | None, tuple[str, ...]]:
    if ask.models and ask.model_column is not None:
        raise ConfigError("expected --model, --models or --model-column, one of them")
    if ask.models:
        return None, tuple(dict.fromkeys(ask.models))
    column = ask.model_column or (MODEL_COLUMN if MODEL_COLUMN in source.schema.names else None)
    if column is None:
        raise ConfigError("expected --model, --models or --model-column: which model should score the rows?")
    return column, ()


def _count_models(source: Source, column: str, limit: int | None) -> dict[str, int | None]:
    """Rows of each model that the column names, in the order of their first row."""
    counts: dict[str, int] = {}
    for chunk in source.chunks(limit, [column]):
        for entry in chunk.batch.column(0).value_counts().to_pylist():
            if entry["values"] is not None:
                name = str(entry["values"])
                counts[name] = counts.get(name, 0) + int(entry["counts"])
    if not counts:
        raise EmptyInput(f"the column {column} names no model in any row: nothing to score")
    return cast("dict[str, int | None]", counts)


def _check_keys(source: Source, key: str, limit: int | None) -> None:
    """Raises DuplicateKey. Eight bytes a row are kept for it."""
    found: list[Any] = []
    for chunk in source.chunks(limit, [key]):
        column = chunk.batch.column(0)
        if column.null_count:
            row = chunk.first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise DuplicateKey(f"the key column {key} is null in row {row}: fill it, or leave --key out")
        hashed = (_hash_of(value) for value in column.to_pylist())
        found.append(np.fromiter(hashed, np.uint64, len(column)))
    hashes = np.concatenate(found)
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    if len(same):
        rows = ", ".join(f"{a} and {b}" for a, b in ((order[i], order[i + 1]) for i in same[:3]))
        raise DuplicateKey(f"{len(same)} keys of column {key} come more than once (rows {rows}): make them unique")


def _hash_of(value: Any) -> int:
    content = value if isinstance(value, bytes) else repr(value).encode()
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


# --- models --------------------------------------------------------------------------------------


def _facts(ask: Ask, card: Card, source: Source, batch: Any, reserved: Sequence[str], rows: int | None) -> Facts:
    signature = card.signature()
    check_outputs(signature, ask.outputs)
    batching = card.batching
    axes = None if batching is None else batching.axes()
    found = plan(card.model, signature, axes, source.columns(), ask.mapping, reserved)
    if ask.batch_rows is not None:
        batch_rows = ask.batch_rows
    elif not found.together or batching is None:
        batch_rows = 1
    else:
        measured = [(run.rows, run.seconds) for run in card.run_times]
        batch_rows = rows_per_job(batching.max_rows, measured, row_bytes(found, batch), job_bytes=JOB_BYTES)
    return Facts(card.model, card.version, card.digest, signature, found, batch_rows, rows)


def _head(ask: Ask, source: Source, facts: Sequence[Facts], column: str | None) -> dict[str, Any]:
    """What must be the same for two processes to be of one run."""
    return {
        "input": source.digest(),
        "models": {each.model: {"version": each.version, "digest": each.digest} for each in facts},
        "options": {
            "model_column": column,
            "map": {
                each.model: {binding.input: list(binding.columns) for binding in each.plan.bindings} for each in facts
            },
            "columns": list(ask.columns),
            "key": ask.key,
            "outputs": list(ask.outputs),
            "batch_rows": {each.model: each.batch_rows for each in facts},
            "limit": ask.limit,
        },
    }


# --- runs from before ----------------------------------------------------------------------------


def finished_already(prepared: Prepared) -> bool:
    """The output is there, and is of this very run. Raises OutputUnusable when it is of something else."""
    output = prepared.ask.output
    if not output.exists():
        return False
    if not prepared.marker.exists() and Journal(output).exists:
        return False  # it was killed between putting the output in place and saying so
    if not prepared.marker.exists():
        raise OutputUnusable(
            f"the output {output} is there already, and not of a finished run: choose another, or delete it"
        )
    with writing(prepared.marker):
        made_of = json.loads(prepared.marker.read_text(encoding="utf-8"))
    differing = _differing(made_of, prepared.head)
    if differing or made_of.get("nbytes") != output.stat().st_size:
        what = "; ".join(differing) or "its size is not what was written"
        raise OutputUnusable(
            f"the output {output} is there already, of another run ({what}): choose another, or delete it"
        )
    return True


def mark_finished(prepared: Prepared, rows: int, failed: int) -> None:
    """Say beside the output what it was made of."""
    made_of = {**prepared.head, "rows": rows, "failed": failed, "nbytes": prepared.ask.output.stat().st_size}
    with writing(prepared.marker):
        prepared.marker.write_text(json.dumps(made_of, indent=1) + "\n", encoding="utf-8")


def differences(prepared: Prepared, journal: Journal) -> None:
    """Raises RunChanged unless the journal is of this run, and the user wants to go on with it."""
    differing = _differing(journal.head, prepared.head)
    if differing:
        raise RunChanged(
            f"{journal.folder} is of another run: {'; '.join(differing)}. Nothing was mixed: give the former input, "
            "models and options to resume it, or delete that folder to begin anew"
        )
    if not prepared.ask.resume:
        raise RunChanged(
            f"a run into {prepared.ask.output} was interrupted: add --resume to go on where it stopped, or delete "
            f"{journal.folder} to begin anew"
        )


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    if was.get("input") != now["input"]:
        found.append("the input's content is another")
    before = cast("dict[str, Any]", was.get("models") or {})
    for model in dict.fromkeys([*before, *now["models"]]):
        a, b = before.get(model), now["models"].get(model)
        if a != b:
            found.append(f"model {model} was {_model_words(a)} and is {_model_words(b)}")
    options = cast("dict[str, Any]", was.get("options") or {})
    for name, value in now["options"].items():
        if options.get(name) != value:
            found.append(f"{name} was {json.dumps(options.get(name))} and is {json.dumps(value)}")
    return found


def _model_words(model: Mapping[str, str] | None) -> str:
    return "not in it" if model is None else f"version {model['version']} (digest {model['digest'][:12]})"
