"""The rows of each model as parts: read, sorted by model where a column says so, and cut; all in threads.

Rows of several models are first put into a file for each model, so that each model's rows come together however the
input mixes them, and memory holds little of them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qworker.errors import RowRefused
from qworker.score.arrow import pyarrow
from qworker.score.journal import Failed, Journal, writing
from qworker.score.parts import Cutter, Part, Refused, Rows
from qworker.score.prepare import Prepared

ROW = "__row__"
SPILL_BYTES = 64 << 20
"""Rows held, of all models together, before they are written to their files."""
ENVELOPE = 64 << 10
"""What a message may have besides its row: names, shapes, properties."""
STEP = 64
"""Parts that a thread cuts in one go, at most."""


class Feed:
    """Gives the parts of each model. Owns the file of refused rows, which is written anew by each process."""

    def __init__(self, prepared: Prepared, journal: Journal, max_body: int) -> None:
        self._prepared = prepared
        self._journal = journal
        self._max_body = max_body
        self._folder = journal.folder / "rows"
        self._refused_path = journal.folder / "refused.jsonl"
        self._refused: Any = None
        self.refused = 0
        self._failed_rows: dict[int, set[int]] = {}
        for each in journal.failed:
            self._failed_rows.setdefault(each.model, set()).add(each.row)
        names = [prepared.ask.key, *prepared.ask.columns]
        self._through = list(dict.fromkeys(name for name in names if name is not None))
        self._spilled = prepared.model_column is None or len(prepared.models) == 1

    async def parts(self, model: int) -> AsyncGenerator[Part | Refused]:
        """Parts in their order, and rows that none can be made of. Raises InputUnreadable."""
        if not self._spilled:
            await asyncio.to_thread(self._spill)
            self._spilled = True
        loop = asyncio.get_running_loop()
        steps = self._steps(model)
        ahead = loop.run_in_executor(None, next, steps, None)
        try:
            while (found := await ahead) is not None:
                ahead = loop.run_in_executor(None, next, steps, None)  # the next one, while this one is sent
                for each in found:
                    yield each
        finally:
            ahead.cancel()

    def failed_before(self, model: int, part: Part) -> list[int]:
        """Positions of a part's rows that failed in a former process."""
        failed = self._failed_rows.get(model)
        if not failed:
            return []
        return [position for position, row in enumerate(part.rows.tolist()) if row in failed]

    def key_of(self, part: Part, at: int) -> Any:
        """The key of one row of a part, as JSON can hold it."""
        return None if part.carried is None else self._key(pyarrow().Table.from_batches(part.carried), at)

    def all_failed(self) -> Iterator[Failed]:
        """Rows without a result: those that were refused here, then those that failed at the workers."""
        if self._refused is not None:
            self._refused.flush()
        if self._refused_path.exists():
            with self._refused_path.open(encoding="utf-8") as file:
                for line in file:
                    yield Failed(*json.loads(line))
        seen: set[tuple[int, int]] = set()
        for each in self._journal.failed:
            if (each.model, each.row) not in seen:
                seen.add((each.model, each.row))
                yield each

    # --- in a thread -------------------------------------------------------------------------------

    def _steps(self, model: int) -> Iterator[list[Part | Refused]]:
        facts = self._prepared.models[model]
        cutter = Cutter(
            facts.plan,
            facts.batch_rows,
            job_bytes=max(1 << 20, self._max_body // 4) if self._prepared.ask.batch_rows else 1 << 20,
            most_bytes=self._max_body - ENVELOPE,
        )
        held: list[Part | Refused] = []
        for rows, batch in self._chunks(model):
            columns = [[batch.column(name) for name in binding.columns] for binding in facts.plan.bindings]
            carried = batch.select(self._through) if self._through else None
            for found in cutter.feed(rows, columns, carried):
                if isinstance(found, Refused):
                    self._note(model, found.row, found.error, found.carried)
                held.append(found)
                if len(held) >= STEP:
                    yield held
                    held = []
            if held:
                yield held
                held = []
        yield [*held, *cutter.rest()]

    def _chunks(self, model: int) -> Iterator[tuple[Rows, Any]]:
        prepared = self._prepared
        column = prepared.model_column
        if column is not None and len(prepared.models) > 1:
            yield from _read_spilled(self._folder / f"{model}.arrow")
            return
        for chunk in prepared.source.chunks(prepared.ask.limit, self._needed([model])):
            rows = np.arange(chunk.first, chunk.first + len(chunk.batch), dtype=np.int64)
            if column is None or not chunk.batch.column(column).null_count:
                yield rows, chunk.batch
            else:
                there = self._named(chunk.batch, rows)
                yield rows[there], chunk.batch.filter(pyarrow().array(there))

    def _needed(self, models: list[int]) -> list[str]:
        prepared = self._prepared
        fed = [n for m in models for b in prepared.models[m].plan.bindings for n in b.columns]
        more = [] if prepared.model_column is None else [prepared.model_column]
        return list(dict.fromkeys([*fed, *self._through, *more]))

    def _named(self, batch: Any, rows: Rows) -> Any:
        """Which rows name a model; the others are refused."""
        column = self._prepared.model_column
        there = batch.column(column).is_valid().to_numpy(zero_copy_only=False)
        error = RowRefused(f"the column {column} is null: say which model should score the row")
        for position in np.flatnonzero(~there).tolist():
            carried = batch.select(self._through).slice(position, 1) if self._through else None
            self._note(-1, int(rows[position]), error, carried)
        return there

    def _note(self, model: int, row: int, error: RowRefused, carried: Any) -> None:
        self.refused += 1
        with writing(self._refused_path):
            if self._refused is None:
                self._refused = self._refused_path.open("w", encoding="utf-8")
            key = None if carried is None else self._key(carried, 0)
            self._refused.write(json.dumps([model, row, error.code, str(error), key]) + "\n")

    def _key(self, table: Any, at: int) -> Any:
        if self._prepared.ask.key is None:
            return None
        value = table.column(self._prepared.ask.key)[at].as_py()
        return value if isinstance(value, (int, str)) else str(value)

    def close(self) -> None:
        """Close the file of refused rows."""
        if self._refused is not None:
            self._refused.close()

    # --- rows sorted by model ----------------------------------------------------------------------

    def _spill(self) -> None:
        """Put each model's rows into a file of its own."""
        prepared = self._prepared
        numbers = {facts.model: number for number, facts in enumerate(prepared.models)}
        held: dict[int, list[Any]] = {}
        nbytes = 0
        with writing(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
            for chunk in prepared.source.chunks(prepared.ask.limit, self._needed(list(numbers.values()))):
                for model, batch in self._sorted(chunk.first, chunk.batch, numbers):
                    held.setdefault(model, []).append(batch)
                    nbytes += batch.nbytes
                if nbytes > SPILL_BYTES:
                    self._write(held)
                    held, nbytes = {}, 0
            self._write(held)

    def _sorted(self, first: int, batch: Any, numbers: dict[str, int]) -> Iterator[tuple[int, Any]]:
        pa = pyarrow()
        rows = np.arange(first, first + len(batch), dtype=np.int64)
        names = batch.column(self._prepared.model_column)
        if names.null_count:
            self._named(batch, rows)
        encoded = names if pa.types.is_dictionary(names.type) else names.dictionary_encode()
        which = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        batch = batch.append_column(ROW, pa.array(rows))
        for index, name in enumerate(encoded.dictionary.to_pylist()):
            positions = np.flatnonzero(which == index)
            if len(positions):
                yield numbers[str(name)], batch.take(pa.array(positions))

    def _write(self, held: dict[int, list[Any]]) -> None:
        pa = pyarrow()
        for model, batches in held.items():
            table = pa.Table.from_batches(batches).combine_chunks()
            with (self._folder / f"{model}.arrow").open("ab") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)


def _read_spilled(path: Path) -> Iterator[tuple[Rows, Any]]:
    """Rows and batches of a model's file: Arrow streams one after another."""
    pa = pyarrow()
    with writing(path), pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            with pa.ipc.open_stream(file) as reader:
                for batch in reader:
                    rows = batch.column(ROW).to_numpy()
                    yield rows, batch.drop_columns([ROW])
