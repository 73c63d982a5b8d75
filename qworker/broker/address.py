"""Broker URLs: credentials from files, and what may be shown of a URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from qworker.errors import ConfigError

_SECRET_BYTES = 4096


def broker_url(url: str, username_file: Path | None = None, password_file: Path | None = None) -> str:
    """``url`` with its user name and password replaced by the contents of the files that are given.

    Reads the files at each call, so that a rotated secret is found by the next connect. Raises ConfigError.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
        raise ConfigError(f"expected a broker URL like amqps://host/vhost, found {shown(url)!r}")
    userinfo, at, host = parts.netloc.rpartition("@")
    user, colon, password = userinfo.partition(":")
    if username_file is not None:
        user, at = quote(_secret(username_file), safe=""), "@"
    if password_file is not None:
        password, colon, at = quote(_secret(password_file), safe=""), ":", "@"
    return urlunsplit(parts._replace(netloc=f"{user}{colon}{password}{at}{host}"))


def shown(url: str) -> str:
    """What may be logged of a broker URL: scheme, host, port and virtual host."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _secret(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"expected the broker's credential in {path}: {error.strerror}") from error
    if len(content) > _SECRET_BYTES:
        raise ConfigError(f"expected a credential of at most {_SECRET_BYTES} bytes in {path}, found a longer file")
    try:
        return content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"expected UTF-8 text in {path}, found other bytes") from None
