"""``ops/chaos`` runs this. See ``ops/chaos --help``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time

from tests.chaos import report
from tests.chaos.run import SCENARIOS, Wanted, run


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ops/chaos",
        description="Real workers on a real broker under seeded faults and traffic with known answers. Ends with 0 "
        "only if every accepted job had exactly one outcome and nothing was left behind.",
    )
    parser.add_argument("--minutes", type=float, default=3.0, metavar="N", help="of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the schedule and the traffic (default: the time)")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="mixed", help="default: %(default)s")
    parser.add_argument("--count", type=int, metavar="N", help="evictions, kills, restarts or messages of a scenario")
    parser.add_argument("--data-plane", choices=("fast", "aio-pika"), default="fast", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=3, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument("--window", type=int, default=16, metavar="N", help="jobs that a publisher has open")
    parser.add_argument("--json", action="store_true", help="make the last line of the output one JSON object")
    parser.add_argument("--report", action="store_true", help="add the figures to ops/reports/chaos-<date>.md")
    parser.add_argument("--keep", action="store_true", help="leave the logs of the workers, and say where")
    parser.add_argument("--own-mounts", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = _options()
    logging.getLogger("qworker").setLevel(logging.ERROR)  # that connections are lost is what this is about
    started = time.monotonic()

    def told(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - started:7.1f}  {line}\n")

    wanted = Wanted(
        scenario=options.scenario,
        minutes=options.minutes,
        count=options.count,
        seed=int(time.time()) if options.seed is None else options.seed,
        plane=options.data_plane,
        workers=options.workers,
        mounts=options.own_mounts,
        window=options.window,
        keep=options.keep,
    )
    figures = asyncio.run(run(wanted, told))
    (sys.stderr if options.json else sys.stdout).write(report.text(figures, wanted))
    for complaint in figures.complaints:
        sys.stderr.write(f"Not as it should be: {complaint}\n")
    if options.report:
        told(f"added to {report.add(figures, wanted)}")
    if options.json:
        sys.stdout.write(figures.line() + "\n")
    return 0 if figures.good else 1


if __name__ == "__main__":
    sys.exit(main())
