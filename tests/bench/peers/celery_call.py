"""Celery's client."""

from __future__ import annotations

from typing import Any

from tests.bench import drive
from tests.bench.peers.celery_app import echo


def wait(handle: tuple[Any, bytes]) -> None:
    result, body = handle
    if bytes(result.get(timeout=60)) != body:
        raise SystemExit("a reply is not the request")


if __name__ == "__main__":
    drive.measure_blocking(lambda body: (echo.delay(body), body), wait, drive.options())
