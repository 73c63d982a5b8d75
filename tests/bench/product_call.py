"""The product's client as a caller uses it: ``python -m tests.bench.product_call --url URL ...``, see ``drive``."""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from numpy.typing import NDArray

from qworker import Client
from tests.bench import drive


def model_of(kilobytes: int) -> str:
    """The identity model whose rows have that size."""
    return f"identity-{kilobytes}k"


async def request(chosen: argparse.Namespace) -> None:
    async with Client(chosen.url) as client:
        models = itertools.cycle(chosen.models or [model_of(chosen.kilobytes)])

        async def call(x: NDArray[np.float32]) -> None:
            result = await client.call(next(models), {"x": x}, timeout=60)
            y = result.outputs[0].array
            if y.shape != x.shape or y[-1, -1] != x[-1, -1]:
                raise SystemExit("a reply is not the request")

        x = np.random.default_rng(7).standard_normal((1, chosen.kilobytes * drive.KILOBYTE // 4), np.float32)
        await drive.measure(call, chosen, x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=lambda text: text.split(","), help="others than the identity of that size")
    chosen = drive.options(parser)
    drive.run(request(chosen), uvloop=chosen.uvloop)


if __name__ == "__main__":
    main()
