"""Sidecar: keeps the pod's deletion cost up to date, so that a fleet that shrinks loses an idle worker.

Kubernetes removes the pods with the lowest `controller.kubernetes.io/pod-deletion-cost` first. Ours is what would be
lost: jobs in hand first of all, then loads in progress, then the bytes that are hot. A pod that drains costs nothing.
Plain Python; the worker's own container has no access to the cluster.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
PERIOD = 10.0
JOB, LOADING, MOST = 1_000_000, 100_000, 2_000_000_000  # the cost is an int32


def cost(state: dict[str, Any]) -> int:
    """What the cluster would lose with this worker."""
    if state["draining"]:
        return 0
    rows = state["models"]
    in_hand = sum(row["in_hand"] for row in rows)
    loading = sum(row["state"] in ("waiting", "loading") for row in rows)
    hot_mib = sum(row["nbytes"] for row in rows if row["state"] == "hot") >> 20
    return min(MOST, in_hand * JOB + loading * LOADING + min(hot_mib, LOADING - 1))


def read_state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


def tell(api: str, account: Path, pod: str, value: int) -> None:
    """Annotate the pod. The token is read each time: it is renewed."""
    body = json.dumps({"metadata": {"annotations": {ANNOTATION: str(value)}}}).encode()
    request = urllib.request.Request(f"{api}/api/v1/namespaces/{pod}", body, method="PATCH")
    request.add_header("Content-Type", "application/merge-patch+json")
    request.add_header("Authorization", f"Bearer {(account / 'token').read_text().strip()}")
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt")) if api.startswith("https") else None
    with urllib.request.urlopen(request, timeout=5, context=trusted):
        pass


def main() -> None:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    api = os.environ.get("KUBERNETES_API") or f"https://{host}:{port}"
    account = Path(os.environ.get("KUBERNETES_ACCOUNT", ACCOUNT))
    pod = f"{os.environ['POD_NAMESPACE']}/pods/{os.environ['POD_NAME']}"
    url = os.environ.get("QWORKER_STATE_URL", "http://127.0.0.1:8080/state")
    told: int | None = None
    while True:
        try:
            value = cost(read_state(url))
            if value != told:
                tell(api, account, pod, value)
                told = value
        except (OSError, ValueError, KeyError) as error:  # it will be tried again, and nothing else depends on it
            print(f"deletion cost not told: {error}", file=sys.stderr, flush=True)
        time.sleep(float(os.environ.get("PERIOD", PERIOD)))


if __name__ == "__main__":
    main()
