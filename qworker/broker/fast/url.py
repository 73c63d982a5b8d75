"""Where the broker is and how we prove who we are, read from an AMQP URL; and the handshake's answers.

The URL's options are those of aio-pika: ``auth``, ``heartbeat``, ``name``, ``cafile``, ``capath``,
``cadata`` (base64), ``certfile``, ``keyfile``, ``no_verify_ssl``.
"""

from __future__ import annotations

import platform
import ssl
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pamqp.commands import Connection

from qworker.broker.fast.fields import write_table
from qworker.broker.fast.frames import FRAME_MAX
from qworker.errors import BrokerError, BrokerRefused, BrokerUnavailable, ConfigError

_PORTS: Final = {"amqp": 5672, "amqps": 5671}
_MECHANISMS: Final = ("PLAIN", "AMQPLAIN", "EXTERNAL")
_CAPABILITIES: Final = (
    "authentication_failure_close",
    "basic.nack",
    "connection.blocked",
    "consumer_cancel_notify",
    "publisher_confirms",
)
CHANNEL_MAX: Final = 2047
_MIN_FRAME_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Address:
    """One virtual host of one broker, and a user of it."""

    host: str
    port: int
    vhost: str
    user: str
    password: str = field(repr=False)
    auth: str = "PLAIN"
    tls: bool = False
    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    def __str__(self) -> str:
        return f"{'amqps' if self.tls else 'amqp'}://{self.host}:{self.port}/{quote(self.vhost, safe='')}"


def parse_address(url: str) -> Address:
    """Read an ``amqp://`` or ``amqps://`` URL. Raises ConfigError; never shows the password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(
            "expected a broker URL like amqp://user:password@host:5672/vhost, found a malformed one"
        ) from exc
    if parts.scheme not in _PORTS:
        raise ConfigError(f"expected a broker URL that starts with amqp:// or amqps://, found {parts.scheme!r}")
    options = dict(parse_qsl(parts.query))
    auth = options.get("auth", "plain").upper()
    if auth not in _MECHANISMS:
        raise ConfigError(f"expected auth to be one of {', '.join(_MECHANISMS)} in the broker URL, found {auth!r}")
    return Address(
        host=parts.hostname or "localhost",
        port=port or _PORTS[parts.scheme],
        vhost=unquote(parts.path[1:]) or "/",
        user=unquote(parts.username) if parts.username else "guest",
        password=unquote(parts.password) if parts.password else "guest",
        auth=auth,
        tls=parts.scheme == "amqps",
        options=options,
    )


def tls_context(address: Address) -> ssl.SSLContext:
    """The context that the URL's options describe. Reads files: call it in a thread. Raises ConfigError."""
    options = address.options
    cadata = options.get("cadata")
    try:
        context = ssl.create_default_context(
            cafile=options.get("cafile"),
            capath=options.get("capath"),
            cadata=b64decode(cadata) if cadata else None,
        )
        if certfile := options.get("certfile"):
            context.load_cert_chain(certfile, options.get("keyfile"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"expected readable PEM files for TLS with {address}, found: {exc}") from exc
    if options.get("no_verify_ssl", "0") != "0":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def tls_refusal(address: Address, error: ssl.SSLError) -> BrokerRefused:
    """The error for a TLS handshake that failed, with what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return BrokerRefused(
            f"expected a certificate of {address} that we can verify: {error.verify_message}. Give the authority's "
            "certificate as ?cafile=PATH in the broker's URL"
        )
    return BrokerRefused(
        f"no TLS with {address}: {error.reason or 'handshake failed'}. Check that the port speaks TLS, and whether the "
        "broker wants a client certificate (?certfile=PATH&keyfile=PATH)"
    )


# --- the handshake's answers ----------------------------------------------------------------------


def start_ok(start: Connection.Start, address: Address, name: str) -> Connection.StartOk:
    """Answer the broker's greeting with our credentials. Raises BrokerRefused when it takes none of that kind."""
    offered = str(start.mechanisms).split()
    if address.auth not in offered:
        raise BrokerRefused(
            f"expected the broker at {address} to offer {address.auth} authentication, "
            f"found {' '.join(offered)}: set auth= in the URL"
        )
    return Connection.StartOk(
        client_properties={
            "product": "qworker",
            "platform": f"Python {platform.python_version()}",
            "connection_name": name,
            "capabilities": dict.fromkeys(_CAPABILITIES, True),
        },
        mechanism=address.auth,
        response=_response(address),
    )


def _response(address: Address) -> str:
    if address.auth == "EXTERNAL":
        return ""
    if address.auth == "PLAIN":
        return f"\0{address.user}\0{address.password}"
    table = write_table({"LOGIN": address.user, "PASSWORD": address.password})
    return table[4:].decode()  # AMQPLAIN is a table without its length


@dataclass(frozen=True, slots=True)
class Limits:
    """What both sides agreed on. ``heartbeat`` in seconds, 0 = off."""

    channel_max: int
    frame_max: int
    heartbeat: int


def negotiate(tune: Connection.Tune, heartbeat: int) -> Limits:
    """The smaller of each pair; 0 from the broker means no limit. Raises BrokerRefused below AMQP's minimum."""
    frame_max = min(tune.frame_max or FRAME_MAX, FRAME_MAX)
    if frame_max < _MIN_FRAME_MAX:
        raise BrokerRefused(f"expected frames of at least {_MIN_FRAME_MAX} bytes, found a broker limit of {frame_max}")
    return Limits(
        channel_max=min(tune.channel_max or CHANNEL_MAX, CHANNEL_MAX),
        frame_max=frame_max,
        heartbeat=min(tune.heartbeat, heartbeat) if tune.heartbeat and heartbeat else heartbeat,
    )


def refusal(code: int, text: str, address: Address) -> BrokerError:
    """The error for a connection that the broker closed before it was open."""
    found = f"the broker at {address} refused the connection: {code} {text}"
    if code == 403:
        return BrokerRefused(f"{found}. Check user and password, and that the user may connect from here")
    if code == 530 and "limit" not in text:
        return BrokerRefused(f"{found}. Check that the virtual host exists and that the user may use it")
    return BrokerUnavailable(found)
