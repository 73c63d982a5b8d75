"""A private broker as a process of its own: ``python -m ops.demo_app.broker FOLDER``.

Writes ``FOLDER/broker.json`` once the broker answers, and stops it on SIGTERM or SIGINT.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from qworker.broker.node import PrivateNode


def main() -> None:
    folder = Path(sys.argv[1])
    # Blocked before the node starts, so that a signal that comes meanwhile waits for sigwait.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with PrivateNode(folder / "broker") as node:
        partial = folder / "broker.json.partial"
        partial.write_text(json.dumps({"url": node.url, "pid": node.pid}), encoding="utf-8")
        partial.replace(folder / "broker.json")
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
