"""Broker URLs: credentials from files, and nothing secret in what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from qworker.broker.address import broker_url, shown
from qworker.broker.direct_reply import Suspects
from qworker.errors import ConfigError

SECRETS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0", exclude_categories=["Cs"]), min_size=1)


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secrets") / "secret"


@given(secret=SECRETS)
def test_any_secret_survives_the_url(secret_file: Path, secret: str) -> None:
    """Whatever stands in the credential files is what the AMQP library reads out of the URL."""
    secret_file.write_bytes(secret.encode() + b"\n")
    url = broker_url("amqps://old:older@host:5671/v?cafile=/x", secret_file, secret_file)
    assert (URL(url).user, URL(url).password) == (secret, secret)
    assert shown(url) == "amqps://host:5671/v"


def test_files_replace_only_what_they_give(tmp_path: Path) -> None:
    """A password file keeps the URL's user name; without files the URL stays as it is."""
    (tmp_path / "password").write_text("p")
    assert broker_url("amqp://user:x@h/", password_file=tmp_path / "password") == "amqp://user:p@h/"
    assert broker_url("amqp://user:x@h/v") == "amqp://user:x@h/v"


@pytest.mark.parametrize("url", ["http://user:hush@h/", "amqp://", "h:5672", ""])
def test_no_broker_url(url: str) -> None:
    """What is no broker URL is refused without showing its password."""
    with pytest.raises(ConfigError, match="broker URL") as refused:
        broker_url(url)
    assert "hush" not in str(refused.value)


def test_unreadable_secrets(tmp_path: Path) -> None:
    """A missing, huge or binary credential file is named."""
    (tmp_path / "huge").write_bytes(b"x" * 5000)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "huge", "binary"):
        with pytest.raises(ConfigError, match=name):
            broker_url("amqp://h/", password_file=tmp_path / name)


def test_two_deaths_convict() -> None:
    """A reply name is convicted by two deaths, one connection counting once, and the memory is bounded."""
    suspects = Suspects()
    suspects.died_with(["a", "a", "b"])
    assert not suspects.is_convicted("a")
    suspects.died_with(["a"])
    assert suspects.is_convicted("a")
    assert not suspects.is_convicted("b")
    suspects.died_with(str(number) for number in range(2_000))
    assert not suspects.is_convicted("a")
