"""Settings: precedence, provenance, errors that name the setting, and secrets that stay secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.config import CONFIG_VARIABLE, Settings, explain, load_settings, redact_url, unknown_variables
from qworker.errors import ConfigError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine that runs the tests may set anything."""
    for name in os.environ:
        if name.upper().startswith("QWORKER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "worker.toml"
    path.write_text('prefetch = 11\nheartbeat = 20\nmemory = "300MiB"\npin = ["a", "b/c"]\n')
    return path


def refused(flags: dict[str, object] | None = None, config_file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, config_file)
    return str(caught.value)


def test_flags_win_over_variables_over_the_file_over_defaults(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source is heard exactly where no stronger one speaks."""
    monkeypatch.setenv("QWORKER_HEARTBEAT", "30")
    monkeypatch.setenv("QWORKER_MEMORY", "400MiB")
    settings = load_settings({"memory": "512MiB"}, toml)
    assert (settings.memory, settings.heartbeat, settings.prefetch) == (512 * MIB, 30, 11)
    assert settings.max_concurrent_loads == 2
    assert settings.pin == ("a", "b/c")


def test_explain_tells_where_each_value_came_from(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor shows the source of every setting, once each."""
    monkeypatch.setenv("QWORKER_HEARTBEAT", "30")
    rows = explain(load_settings({"memory": "512MiB", "max_concurrent_loads": 3}, toml))
    sources = {row.name: row.source for row in rows}
    assert sources["memory"] == "--memory"
    assert sources["max_concurrent_loads"] == "--max-concurrent-loads"
    assert sources["heartbeat"] == "QWORKER_HEARTBEAT"
    assert sources["prefetch"] == str(toml)
    assert sources["backend"] == "default"
    assert [row.name for row in rows] == list(Settings.model_fields)


def test_a_flag_that_is_none_was_not_given(toml: Path) -> None:
    """The command line passes None for options that nobody typed."""
    assert load_settings({"prefetch": None}, toml).prefetch == 11


def test_the_file_can_be_named_by_a_variable(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """QWORKER_CONFIG stands in for --config, and --config wins."""
    monkeypatch.setenv(CONFIG_VARIABLE, str(toml))
    assert load_settings().prefetch == 11
    other = toml.with_name("other.toml")
    other.write_text("prefetch = 12\n")
    assert load_settings(config_file=other).prefetch == 12


def test_an_empty_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and unit files like to pass empty variables through."""
    monkeypatch.setenv("QWORKER_HTTP_PORT", "")
    assert load_settings().http_port is None


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512MiB", 512 * MIB), ("2GB", 2_000_000_000), ("1.5 GiB", 1536 * MIB), ("4194304", 4194304), (4194304, 4194304)],
)
def test_byte_sizes_are_read_as_people_write_them(text: object, nbytes: int) -> None:
    """Units of both kinds and plain numbers."""
    assert load_settings({"memory": text}).memory == nbytes


def test_defaults_fit_the_machine() -> None:
    """The budget is never below 256 MiB, and the name tells host and process."""
    settings = load_settings()
    assert settings.memory >= 256 * MIB
    assert settings.threads >= 1
    assert settings.name.endswith(f"-{os.getpid()}")


def test_pins_are_listed_with_commas_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables have no lists; commas and stray blanks do."""
    monkeypatch.setenv("QWORKER_PIN", "magika, audio/vad,")
    assert load_settings().pin == ("magika", "audio/vad")


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        ({"heartbeat": 2}, ["heartbeat", "greater than or equal to 5", "'2'", "--heartbeat"]),
        ({"memory": "lots"}, ["memory", "512MiB", "'lots'", "--memory"]),
        ({"eviction": "fifo"}, ["eviction", "'gdsf', 'rate', 'lru' or 's3fifo'", "'fifo'"]),
        ({"max_concurrent_loads": 0}, ["max_concurrent_loads", "--max-concurrent-loads", "'0'"]),
        ({"prefetch": 1001}, ["prefetch", "1000"]),
        ({"http_port": 70_000}, ["http_port", "65535"]),
        ({"grace": float("nan")}, ["grace", "finite"]),
        ({"broker": "http://here"}, ["broker", "amqp://user:password@host", "'http://here'"]),
        ({"broker_username_file": "/run/user"}, ["broker_password_file", "only one"]),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(flags: dict[str, object], fragments: list[str]) -> None:
    """Setting, expectation, finding and source, in a line a person can act on."""
    message = refused(flags)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_all_wrong_settings_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each, so that nobody mends them one by one."""
    monkeypatch.setenv("QWORKER_SWEEP_INTERVAL", "soon")
    lines = refused({"heartbeat": 2}).splitlines()
    assert len(lines) == 2
    assert any("sweep_interval" in line and "QWORKER_SWEEP_INTERVAL" in line for line in lines)


def test_an_unknown_key_in_the_file_suggests_the_nearest(tmp_path: Path) -> None:
    """A slip of the pen must not leave a default in force."""
    path = tmp_path / "w.toml"
    path.write_text("max-concurent-loads = 3\n")
    message = refused(config_file=path)
    assert "max-concurent-loads" in message
    assert "did you mean max_concurrent_loads?" in message
    assert str(path) in message


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config file that was asked for and is not there never counts as empty."""
    assert "--config" in refused(config_file=tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("prefetch = = 3")
    monkeypatch.setenv(CONFIG_VARIABLE, str(broken))
    assert "is not TOML" in refused()
    assert CONFIG_VARIABLE in refused()


SECRET = "s3cr3t"


@pytest.mark.parametrize("url", [f"amqp://bob:{SECRET}@host/v", f"amqp://bob:{SECRET}@x@host/v"])
def test_the_password_is_shown_nowhere(url: str) -> None:
    """Not in repr, not in explain, not in an error about the URL itself."""
    settings = load_settings({"broker": url})
    assert settings.broker_url == url
    assert SECRET not in repr(settings)
    assert SECRET not in str(explain(settings))
    assert SECRET not in refused({"broker": url.replace("amqp", "http")})
    assert SECRET not in refused({"broker": url, "heartbeat": 1})


def test_a_url_that_a_stray_slash_breaks_is_masked_too() -> None:
    """What no parser sees as a password may still be one."""
    assert SECRET not in refused({"broker": f"amqp://bob:{SECRET}/x@host/v"})


@given(
    st.text("abc:/@?#%", min_size=0, max_size=8),
    st.sampled_from(["amqp://u:", "amqps://:", "u:", "s3://u:"]),
    st.sampled_from(["@h", "@h:5672/v", "@h/v?heartbeat=5"]),
)
def test_redaction_holds_for_any_password(middle: str, before: str, after: str) -> None:
    """Whatever stray characters surround it, the secret part never survives."""
    shown = redact_url(f"{before}{middle}{SECRET}{middle}{after}")
    assert SECRET not in shown
    assert "***" in shown


def test_redaction_leaves_the_rest_alone() -> None:
    """A message must still tell which broker it is about."""
    assert redact_url("amqp://bob:pw@host:5672/v") == "amqp://bob:***@host:5672/v"
    assert redact_url("amqp://host:5672/v") == "amqp://host:5672/v"
    assert redact_url("/srv/models") == "/srv/models"
    assert redact_url("s3://b/p?secret_access_key=x&region=eu") == "s3://b/p?secret_access_key=***&region=eu"


def test_settings_cannot_be_changed_afterwards() -> None:
    """What doctor printed is what runs."""
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.prefetch = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_unknown_variables_are_found_but_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor warns of a misspelt variable; Kubernetes' own QWORKER_PORT must not stop a worker."""
    monkeypatch.setenv("QWORKER_MEMROY", "1GiB")
    load_settings()
    assert unknown_variables() == ["QWORKER_MEMROY"]
    assert unknown_variables({"QWORKER_PORT": "tcp://x", "QWORKER_STORE": "m", "PATH": ""}) == ["QWORKER_PORT"]
