"""One plain AMQP connection of aiormq: opened with typed errors, watched, and closed in bounded time."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, cast

import aiormq
from yarl import URL

from qworker.broker.address import shown
from qworker.broker.reference.errors import LIBRARY_ERRORS, described
from qworker.broker.reference.reader import GuardedReader
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable, ConfigError

CLOSE_TIMEOUT = 5.0
_MOST_CHANNELS = 2047  # RabbitMQ's own limit

# aiormq logs whole bodies of returned messages, and every error that we raise anyway. An application that
# has chosen a level itself keeps it.
for _name in ("aiormq", "aio_pika"):
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.CRITICAL)

_NOT_ALLOWED = 530  # no such virtual host, or too many connections
_ACCESS_REFUSED = 403
_INTERNAL_ERROR = 541


class Link:
    """A connection with a fixed role. It is never reopened: a session that loses a link ends."""

    def __init__(
        self, url: str, *, name: str, heartbeat: int, connect_timeout: float, tls: ssl.SSLContext | None = None
    ) -> None:
        address = URL(url)
        if "heartbeat" not in address.query:
            address = address.update_query(heartbeat=str(heartbeat))
        self._address = address
        self._shown = shown(url)
        self._name = name
        self._timeout = connect_timeout
        self._tls = tls
        self._transport = _Transport()
        self._connection: aiormq.Connection | None = None
        self._last_number = 0

    async def open(self, on_lost: Callable[[BrokerUnavailable], None]) -> None:
        """Connect and log in. ``on_lost`` is called once, when the connection ends for whatever reason.

        Raises BrokerUnavailable, BrokerRefused, ConfigError (TLS files that cannot be read).
        """
        connection = _Connection(
            self._address,
            context=self._tls,
            transport_factory=self._transport,
            client_properties={"connection_name": self._name, "product": "qworker"},
        )
        try:
            async with asyncio.timeout(self._timeout):
                await connection.connect()  # pyright: ignore[reportUnknownMemberType]  # decorated, untyped
        except TimeoutError as error:
            self._transport.abort()
            raise BrokerUnavailable(f"no answer from {self._shown} within {self._timeout:g} s") from error
        except LIBRARY_ERRORS as error:
            raise self._connect_error(error) from None  # the original's arguments may hold what we do not show
        self._connection = connection
        when_closed(connection, lambda error: on_lost(self._lost(error)))

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_opened

    @property
    def blocked(self) -> bool:
        """True while the broker has told this connection to wait (memory or disk alarm)."""
        return self._connection is not None and not _finishes_at_once(self._connection.ready())

    async def channel(self, *, confirms: bool) -> aiormq.Channel:
        """Open a channel. Cancelling closes that channel alone. Raises BrokerUnavailable."""
        if self._connection is None or not self._connection.is_opened:
            raise BrokerUnavailable(f"the connection to {self._shown} is closed")
        try:
            channel = await self._connection.channel(self._next_number(), publisher_confirms=confirms)
        except LIBRARY_ERRORS as error:
            raise BrokerUnavailable(f"{self._shown} opened no channel: {described(error)}") from error
        assert isinstance(channel, aiormq.Channel)
        return channel

    async def close(self) -> None:
        """Say goodbye and close; after a few seconds without an answer just close. Never raises."""
        if self._connection is None:
            return
        reason = aiormq.ConnectionClosed(0, "closed by us")  # the library's own choice is a CancelledError
        for _ in range(2):
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self._connection.close(reason)
                return
            except TimeoutError:
                self._transport.abort()
            except LIBRARY_ERRORS:
                return

    @property
    def died_inside(self) -> bool:
        """True when the broker ended the connection because of an error of its own."""
        goodbye = self._transport.goodbye
        return goodbye is not None and goodbye.reply_code == _INTERNAL_ERROR

    def may_send(self, channel: aiormq.Channel) -> bool:
        """False from the moment when the broker's close of the channel was read.

        A publish that follows our close-ok is a fatal error to the broker, and aiormq lets it through for a
        few steps of the event loop.
        """
        return not channel.is_closed and channel.number not in self._transport.closed_channels

    def _next_number(self) -> int:
        """A number that was not in use lately.

        aiormq takes one again as soon as it has read the broker's close; an open that is written before
        our close-ok is ignored by the broker, and waits for ever.
        """
        assert self._connection is not None
        for _ in range(_MOST_CHANNELS):
            self._last_number = self._last_number % _MOST_CHANNELS + 1
            if self._last_number not in self._connection.channels:
                self._transport.closed_channels.discard(self._last_number)
                return self._last_number
        raise BrokerUnavailable(f"all {_MOST_CHANNELS} channels to {self._shown} are in use: close some consumers")

    def _lost(self, error: BaseException | None) -> BrokerUnavailable:
        goodbye = self._transport.goodbye
        if goodbye is not None:
            why = f"{goodbye.reply_code} {goodbye.reply_text}"
        else:
            why = described(error) if error is not None else "closed"
        return BrokerUnavailable(f"the connection to {self._shown} was lost: {why}")

    def _connect_error(self, error: BaseException) -> BrokerError:
        goodbye = self._transport.goodbye
        code, text = (goodbye.reply_code, goodbye.reply_text) if goodbye is not None else (None, described(error))
        cause = error.__cause__
        if (
            isinstance(error, aiormq.AuthenticationError | aiormq.ProbableAuthenticationError)
            or code == _ACCESS_REFUSED
        ):
            return BrokerRefused(f"{self._shown} refused the login: {text}. Check the user name and the password")
        if code == _NOT_ALLOWED:
            return BrokerRefused(
                f"{self._shown} refused the virtual host: {text}. Check the URL's path, or create the virtual host "
                "and give the user permissions in it"
            )
        if isinstance(cause, ssl.SSLCertVerificationError):
            return BrokerRefused(
                f"expected a certificate of {self._shown} that we can verify: {cause.verify_message}. Give the "
                "authority's certificate as ?cafile=PATH in the broker's URL"
            )
        if isinstance(cause, ssl.SSLError):
            return BrokerRefused(
                f"no TLS with {self._shown}: {cause.reason or 'handshake failed'}. Check that the port speaks TLS, "
                "and whether the broker wants a client certificate (?certfile=PATH&keyfile=PATH)"
            )
        if isinstance(error, aiormq.IncompatibleProtocolError | aiormq.InvalidFrameError) and goodbye is None:
            return BrokerUnavailable(f"{self._shown} does not speak AMQP 0-9-1: {text}. Check host and port")
        return BrokerUnavailable(f"cannot connect to {self._shown}: {text}")


class _Connection(aiormq.Connection):
    # Frames to be written wait in an unbounded queue. In aiormq's own, of 10 frames, a sender that waits for
    # room writes to a channel that was closed meanwhile, the close-ok is dropped when there is no room, and
    # whoever waits when the connection dies waits for ever. The senders limit themselves: they wait for confirms.
    FRAME_BUFFER_SIZE = 0


class _Transport(aiormq.TransportFactory):
    """Opens the socket, and keeps what aiormq hides: the writer to abort, the broker's goodbye."""

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._reader: GuardedReader | None = None

    @property
    def goodbye(self) -> Any:
        return self._reader.close_frame if self._reader is not None else None

    @property
    def closed_channels(self) -> set[int]:
        return self._reader.closed_channels if self._reader is not None else set()

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        provider: aiormq.SSLContextProvider = kwargs.pop("ssl_context_provider")
        context = None
        if url.scheme == "amqps":
            try:
                context = await provider.get_context()
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                raise ConfigError(f"expected readable PEM files for TLS, found: {error}") from error
        try:
            reader, self._writer = await asyncio.open_connection(url.host, url.port, ssl=context, **kwargs)
        except OSError as error:
            raise aiormq.AMQPConnectionError(*error.args) from error
        self._reader = GuardedReader(reader)
        return cast("asyncio.StreamReader", self._reader), self._writer


def when_closed(resource: aiormq.Connection | aiormq.Channel, callback: Callable[[BaseException | None], None]) -> None:
    """Call ``callback`` with the cause when a connection or channel of aiormq closes, for whatever reason."""

    def closed(ended: asyncio.Future[object]) -> None:
        callback(None if ended.cancelled() else ended.exception())

    cast("asyncio.Future[object]", resource.closing).add_done_callback(closed)


def _finishes_at_once(waiting: Any) -> bool:
    """True when the coroutine would not wait: how to ask aiormq's public ``ready()`` without waiting for it."""
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False
