"""Dramatiq's client, which is a worker for the answers too."""

from __future__ import annotations

import itertools
import os
import threading

from dramatiq.worker import Worker

from tests.bench import drive
from tests.bench.peers import dramatiq_app as app


def main() -> None:
    answers: dict[int, bytes] = {}
    came = threading.Condition()
    numbers = itertools.count()

    def take(number: int, body: bytes) -> None:
        with came:
            answers[number] = body
            came.notify()

    def send(body: bytes) -> tuple[int, bytes]:
        number = next(numbers)
        app.echo.send(number, body)
        return number, body

    def wait(handle: tuple[int, bytes]) -> None:
        number, body = handle
        with came:
            if not came.wait_for(lambda: number in answers, 60) or answers.pop(number) != body:
                raise SystemExit("a reply is missing, or not the request")

    app.answered.append(take)
    worker = Worker(app.broker, queues={"bench.dramatiq-answers"}, worker_threads=1)
    worker.start()
    drive.measure_blocking(send, wait, drive.options())
    os._exit(0)  # its threads take seconds to stop, and nothing is left to save


if __name__ == "__main__":
    main()
