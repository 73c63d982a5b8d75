"""From the journal's answers to the output: complete and synced under another name, then renamed.

In order, blocks are merged by row number: of the answers only those are open whose rows overlap.
"""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qworker.score.arrow import pyarrow
from qworker.score.journal import Failed, Journal, Place, sync_folder, writing
from qworker.score.mapping import Plan
from qworker.score.tables import Block, Columns, by_row
from qworker.score.writers import Layout, make_writer
from qworker.wire.codec import decode_reply
from qworker.wire.messages import MSGPACK, Result
from qworker.wire.signature import Signature


class Answers:
    """The journal's answers as blocks, by where they lie."""

    def __init__(self, journal: Journal, plans: Sequence[Plan], signatures: Sequence[Signature]) -> None:
        self._journal = journal
        self._plans = plans
        self._signatures = signatures

    def blocks(self, *, ordered: bool) -> Iterator[Block]:
        """All rows that have a result; by their numbers, or as they came."""
        with contextlib.ExitStack() as files:
            opened: dict[int, BinaryIO] = {}
            if not ordered:
                for place, _ in self._journal.records():
                    yield self._block(files, opened, place)
                return
            firsts, places = self._by_first_row()
            yield from _merged(firsts, (self._block(files, opened, place) for place in places))

    def _by_first_row(self) -> tuple[list[int], Iterator[Place]]:
        """First rows and places, by first row and model. As numbers, for there may be millions."""
        found = array("q")
        for place, head in self._journal.records():
            found.extend((int(head.row_numbers()[0]), head.model, place.life, place.at))
        table = np.frombuffer(found, np.int64).reshape(-1, 4)
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        return table[:, 0].tolist(), (Place(int(life), int(at)) for life, at in table[:, 2:])

    def _block(self, files: contextlib.ExitStack, opened: dict[int, BinaryIO], place: Place) -> Block:
        file = opened.get(place.life)
        if file is None:
            file = opened[place.life] = files.enter_context(self._journal.results(place.life).open("rb"))
        head, body = self._journal.load(file, place.at)
        result = decode_reply(body, MSGPACK)
        assert isinstance(result, Result), "only results are recorded"
        outputs = by_row(result, self._plans[head.model], self._signatures[head.model], head.hi - head.lo)
        carried = pyarrow().ipc.open_stream(head.carried).read_all() if head.carried else None
        if carried is not None:
            carried = carried.combine_chunks().to_batches()[0]
        return Block(head.model, head.row_numbers(), carried, outputs)


def _merged(firsts: Sequence[int], blocks: Iterator[Block]) -> Iterator[Block]:
    """``blocks`` come by their first row, and their own rows ascend."""
    opened: list[Block] = []
    for number, block in enumerate(blocks):
        opened.append(block)
        limit = firsts[number + 1] if number + 1 < len(firsts) else None
        ready: list[Block] = []
        left: list[Block] = []
        for each in opened:
            cut = len(each.rows) if limit is None else int(np.searchsorted(each.rows, limit))
            if cut:
                ready.append(each.cut(0, cut))
            if cut < len(each.rows):
                left.append(each.cut(cut, len(each.rows)))
        opened = left
        yield from _interleaved(ready)


def _interleaved(blocks: list[Block]) -> Iterator[Block]:
    """The rows of all blocks by number, then by model; in stretches, each of one block."""
    if len(blocks) <= 1:
        yield from blocks
        return
    rows = np.concatenate([block.rows for block in blocks])
    which = np.concatenate([np.full(len(block.rows), i) for i, block in enumerate(blocks)])
    within = np.concatenate([np.arange(len(block.rows)) for block in blocks])
    models = np.array([block.model for block in blocks])
    order = np.lexsort((models[which], rows))
    which, within = which[order], within[order]
    starts = np.flatnonzero(np.r_[True, (which[1:] != which[:-1]) | (within[1:] != within[:-1] + 1)])
    for start, end in zip(starts, np.r_[starts[1:], len(order)], strict=True):
        lo = int(within[start])
        yield blocks[int(which[start])].cut(lo, lo + int(end - start))


def assemble(
    journal: Journal,
    answers: Answers,
    models: Sequence[str],
    carried: Any,
    *,
    ordered: bool,
    several: bool,
) -> int:
    """Write the output; the number of its rows. Raises OutputUnusable; then there is no output, and all is kept."""
    output = journal.output
    row_name = "row" if "row" not in carried.names else "row_number"
    model_name = ("model" if "model" not in carried.names else "scored_by") if several else None
    columns = Columns(models, [row_name, *([model_name] if model_name else []), *carried.names])
    rows = 0
    for _, head in journal.records():
        columns.add(head)
        rows += head.hi - head.lo
    layout = Layout(models, row_name, model_name, carried, columns.found(), rows)
    aside = journal.folder / f"output{output.suffix}"
    with writing(output):
        writer = make_writer(aside, output.suffix.lower(), layout)
        for block in answers.blocks(ordered=ordered):
            writer.write(block)
        writer.close()
        put_in_place(aside, output)
    return rows


def write_errors(path: Path, aside: Path, failed: Iterator[Failed], models: Sequence[str]) -> int:
    """One line of JSON for each row that failed; without any, no file."""
    count = 0
    with writing(path), aside.open("w", encoding="utf-8") as file:
        for each in failed:
            line: dict[str, Any] = {"row": each.row}
            if each.key is not None:
                line["key"] = each.key
            if len(models) > 1 and each.model >= 0:
                line["model"] = models[each.model]
            line |= {"code": each.code, "message": each.message}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    with writing(path):
        if count:
            put_in_place(aside, path)
        else:
            aside.unlink()
            path.unlink(missing_ok=True)
    return count


def put_in_place(aside: Path, target: Path) -> None:
    """Rename a finished file, which is on disk by then, into its place; that is on disk when this returns."""
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, target)
    sync_folder(target.parent)
