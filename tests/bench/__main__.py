"""``python -m tests.bench NAME``; see ``ops/bench``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from tests.bench.figures import Table

NAMES = ("hot", "batch", "score", "cold", "interfere", "scale", "fleet")
ALONE = ("predict",)
"""Not in ``all``: each round takes its minutes."""


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ops/bench", description="Benchmarks against a reference in the same rounds.")
    parser.add_argument("name", choices=[*NAMES, *ALONE, "all"])
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds to wait, at most, for idle CPUs each round")
    parser.add_argument("--json", action="store_true", help="the last line is one flat object of ratios")
    hot = parser.add_argument_group("hot")
    hot.add_argument("--peers", action="store_true", help="also celery, faststream, taskiq and dramatiq")
    hot.add_argument("--calls", type=int, default=12000, help="calls a round at 1 KB; fewer of larger ones")
    hot.add_argument("--sizes", type=lambda text: text.split(","), default=["1k", "64k", "600k"])
    hot.add_argument("--windows", type=_numbers, default=[1, 64, 512])
    hot.add_argument("--no-uvloop", action="store_true", help="asyncio's own loop for us too")
    scale = parser.add_argument_group("scale")
    scale.add_argument("--models", type=_numbers, default=[100, 1000], help="registered models, e.g. 100,1000,10000")
    predict = parser.add_argument_group("predict")
    predict.add_argument("--minutes", type=float, default=10.0, help="of live traffic a round")
    return parser.parse_args(arguments)


def main() -> None:
    chosen = parse(sys.argv[1:])
    names = NAMES if chosen.name == "all" else (chosen.name,)
    tables: dict[str, Table] = {}
    for name in names:
        tables[name] = importlib.import_module(f"tests.bench.{name}").run(chosen)
        sys.stdout.write("\n".join(tables[name].lines()) + "\n")
        sys.stdout.flush()
    if chosen.name == "all":
        from tests.bench.report import write

        sys.stdout.write(f"written: {write(tables)}\n")
    if chosen.json:
        flat = {key: value for table in tables.values() for key, value in table.flat().items()}
        sys.stdout.write(json.dumps(flat) + "\n")


if __name__ == "__main__":
    main()
