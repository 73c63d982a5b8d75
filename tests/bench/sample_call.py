"""Callers of one row each of a registered model: ``BENCH_STORE`` and ``BENCH_MODEL`` say which; see ``drive``."""

from __future__ import annotations

import argparse
import os

from qworker import Client
from qworker.store.local import LocalStore
from qworker.wire.messages import Tensor
from tests.bench import drive
from tests.bench.batch import ALONE, one_row


async def request(chosen: argparse.Namespace) -> None:
    model = os.environ["BENCH_MODEL"]
    row = {tensor.name: tensor for tensor in one_row(LocalStore(os.environ["BENCH_STORE"]), model.removesuffix(ALONE))}
    async with Client(chosen.url) as client:

        async def call(inputs: dict[str, Tensor]) -> None:
            await client.call(model, inputs, timeout=120)

        await drive.measure(call, chosen, row)


def main() -> None:
    chosen = drive.options()
    drive.run(request(chosen), uvloop=chosen.uvloop)


if __name__ == "__main__":
    main()
