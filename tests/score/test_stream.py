"""``client.score``: rows of a program, back-pressured, in order if wanted, and ended at any moment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from qworker import Client
from qworker.errors import InferenceFailed, InvalidInput, RowRefused, UnknownModel
from tests.e2e.fleet import Fleet
from tests.score.scoring import TABLE_ROWS, rows_of

pytestmark = pytest.mark.e2e


async def test_rows_in_results_out(fleet: Fleet) -> None:
    """Any order, each row's own result; in order where that is asked for; from an async iterator too."""
    fleet.start(1)
    x = rows_of(200)

    async def endless() -> AsyncIterator[dict[str, Any]]:
        number = 0
        while True:
            yield {"x": x[number % 200]}
            number += 1

    async with Client(fleet.url) as client:
        found = [row async for row in client.score(({"x": row} for row in x), model="double", batch_rows=16)]
        assert sorted(row.number for row in found) == list(range(200))
        assert all((row.outputs["y"] == 2 * x[row.number]).all() for row in found)
        numbers = [r.number async for r in client.score(({"x": row} for row in x), model="echo", ordered=True)]
        assert numbers == list(range(200))
        async with aclosing(client.score(endless(), model="echo", batch_rows=8, ordered=True)) as scored:
            first = [(await anext(scored)).number for _ in range(50)]
        assert first == list(range(50))
    fleet.finish()


async def test_no_more_rows_are_taken_than_are_on_their_way(fleet: Fleet) -> None:
    """Who does not take results is not given more rows to hold."""
    fleet.start(1)
    taken = 0

    def rows() -> Any:
        nonlocal taken
        for row in rows_of(1000):
            taken += 1
            yield {"x": row}

    async with Client(fleet.url) as client, aclosing(client.score(rows(), model="echo", in_flight=5)) as scored:
        for _ in range(20):
            await anext(scored)
        assert taken <= 20 + 2 * 5
    fleet.finish()


async def test_bad_rows_and_unknown_models(fleet: Fleet) -> None:
    """A row's error comes in its place; an unknown model is raised."""
    fleet.start(1)
    ids = [{"ids": np.int64(TABLE_ROWS + 5 if i % 10 == 3 else i)} for i in range(50)]
    async with Client(fleet.url) as client:
        found = {
            row.number: row async for row in client.score([*ids, {"ids": [[1], [2, 3]]}], model="lookup", batch_rows=7)
        }
        assert sorted(found) == list(range(51))
        for number, row in found.items():
            if number == 50:
                assert isinstance(row.error, RowRefused)
            elif number % 10 == 3:
                assert isinstance(row.error, InvalidInput | InferenceFailed)
            else:
                assert row.outputs["y"] == number
        with pytest.raises(UnknownModel):
            async for _ in client.score([{"x": [1.0]}], model="nope"):
                pass
    fleet.finish()
