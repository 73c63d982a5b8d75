"""The client as a caller meets it: made from a URL. A composition root beside ``app``, without the worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from qworker.broker.base import Connector
from qworker.broker.fast.session import FastConnector
from qworker.broker.reference.session import DEFAULT_MAX_MESSAGE_BYTES, AioPikaConnector
from qworker.client.client import BLOB_LIMIT
from qworker.client.client import Client as _Client
from qworker.client.replies import Reply, ReplyQueue
from qworker.client.sync import SyncClient as _SyncClient
from qworker.config import Settings
from qworker.score.stream import Row, ScoredRow, score_rows
from qworker.store.blobs import Blobs, open_blobs
from qworker.telemetry.trace import client_traces

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["Client", "Reply", "ReplyQueue", "ScoredRow", "SyncClient", "client_for", "connector_for"]

_CONNECTORS: dict[str, type[FastConnector | AioPikaConnector]] = {
    "fast": FastConnector,
    "aio-pika": AioPikaConnector,
}


class Client(_Client):
    """A caller's connection to the workers behind one RabbitMQ.

    ``Client("amqp://user:password@host/vhost")`` for most; ``username_file`` and ``password_file`` for
    mounted secrets; ``connector`` for another implementation of the broker contract (it brings its own settings).
    ``max_body`` must not exceed the broker's ``max_message_size``.

    ``blobs`` is the blob store of the workers, an absolute folder or ``s3://bucket/prefix``: what a message does not
    hold (the largest tensors, until ``blob_limit`` bytes are left) then travels through it, both ways.

    ``traces``: a span for each call, whose context travels with the job; True for the tracer provider that the program
    has set, or another one. Needs the extra ``otel``.
    """

    def __init__(
        self,
        url: str = "",
        *,
        connector: Connector | None = None,
        username_file: Path | None = None,
        password_file: Path | None = None,
        max_body: int = DEFAULT_MAX_MESSAGE_BYTES,
        blobs: str | Path | Blobs | None = None,
        blob_limit: int = BLOB_LIMIT,
        traces: TracerProvider | bool = False,
    ) -> None:
        if bool(url) == (connector is not None):
            raise TypeError("expected Client(url) or Client(connector=...), one of the two")
        connector = connector or FastConnector(
            url,
            username_file=username_file,
            password_file=password_file,
            name="qworker-client",
            max_message_bytes=max_body,
        )
        self._connector, self._max_body = connector, max_body
        self._store = blobs if isinstance(blobs, Blobs) else open_blobs(str(blobs) if blobs is not None else None)
        super().__init__(
            connector,
            self._store,
            blob_limit=blob_limit,
            traces=client_traces(traces),
        )

    async def __aenter__(self) -> Client:
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, exc, trace)
        finally:
            if self._store is not None:
                self._store.close()

    def score(
        self,
        rows: Iterable[Row] | AsyncIterable[Row],
        *,
        model: str,
        batch_rows: int = 1,
        in_flight: int | None = None,
        ordered: bool = False,
        outputs: Sequence[str] = (),
    ) -> AsyncGenerator[ScoredRow]:
        """Score rows by the offline lane, out of the way of calls: ``async for row in client.score(rows, model=...)``.

        A row is ``{input: value}`` without the axis that counts rows. ``batch_rows`` of them share a job, for models
        that take rows together along their first axis. No more rows are taken than are on their way (``in_flight``
        jobs; found out when left out), so ``rows`` may be endless. Leaving the loop ends it; files that must survive
        that are for ``qworker score``. It has a connection of its own.

        A row that fails comes with its ``error``. Raises UnknownModel, ModelUnavailable, BrokerError.
        """
        return score_rows(
            self._connector,
            rows,
            model,
            batch_rows=batch_rows,
            in_flight=in_flight,
            ordered=ordered,
            outputs=tuple(outputs),
            max_body=self._max_body,
        )


class SyncClient(_SyncClient):
    """``Client`` for code without asyncio: ``with SyncClient(url) as c: c.call(...)``, from any thread."""

    def __init__(
        self,
        url: str = "",
        *,
        connector: Connector | None = None,
        username_file: Path | None = None,
        password_file: Path | None = None,
        max_body: int = DEFAULT_MAX_MESSAGE_BYTES,
        blobs: str | Path | Blobs | None = None,
        blob_limit: int = BLOB_LIMIT,
        traces: TracerProvider | bool = False,
    ) -> None:
        super().__init__(
            Client(
                url,
                connector=connector,
                username_file=username_file,
                password_file=password_file,
                max_body=max_body,
                blobs=blobs,
                blob_limit=blob_limit,
                traces=traces,
            )
        )

    def __enter__(self) -> SyncClient:
        super().__enter__()
        return self


def connector_for(settings: Settings, name: str = "qworker-client") -> Connector:
    """The broker of these settings; ``name`` is what the broker's list of connections shows."""
    return _CONNECTORS[settings.data_plane](
        settings.broker_url,
        username_file=settings.broker_username_file,
        password_file=settings.broker_password_file,
        name=name,
        heartbeat=settings.heartbeat,
        confirm_timeout=settings.confirm_timeout,
        max_message_bytes=int(settings.max_body),
    )


def client_for(settings: Settings) -> Client:
    """A client of the broker of these settings."""
    return Client(connector=connector_for(settings), blobs=blobs_of(settings), blob_limit=int(settings.blob_limit))


def blobs_of(settings: Settings, *, memory: int | None = None) -> Blobs | None:
    """The blob store of these settings, if they have one. ``memory``: see ``Blobs``."""
    return open_blobs(
        settings.blob_store,
        settings.blob_stores_read,
        quota=int(settings.blob_quota),
        ttl=settings.blob_ttl,
        memory=memory,
    )
