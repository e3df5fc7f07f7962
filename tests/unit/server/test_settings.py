"""Settings: options over variables over defaults, and what a server refuses to start with."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradiometer_server.errors import ConfigurationError
from gradiometer_server.settings import Settings, is_loopback, settings_from

URL = "sqlite:////nowhere/x.db"
TOKEN = "0123456789abcdef"


def test_defaults_are_loopback_without_a_token() -> None:
    made = settings_from({}, database_url=URL)
    assert (made.host, made.port, made.token, made.path_prefix, made.allowed_hosts) == (
        "127.0.0.1",
        7717,
        None,
        "",
        (),
    )


def test_variables_are_read() -> None:
    environ = {
        "GRADIOMETER_HOST": "10.0.0.5",
        "GRADIOMETER_PORT": "81",
        "GRADIOMETER_TOKEN": TOKEN,
        "GRADIOMETER_ALLOWED_HOSTS": "gpu-01, Dash.Example ,",
        "GRADIOMETER_PATH_PREFIX": "/g",
    }
    made = settings_from(environ, database_url=URL)
    assert (made.host, made.port, made.token, made.path_prefix) == ("10.0.0.5", 81, TOKEN, "/g")
    assert made.allowed_hosts == ("gpu-01", "dash.example")


def test_options_win_over_variables(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("fedcba9876543210\n")
    environ = {"GRADIOMETER_HOST": "10.0.0.5", "GRADIOMETER_PORT": "81", "GRADIOMETER_TOKEN": TOKEN}
    made = settings_from(
        environ, database_url=URL, host="127.0.0.1", port=0, token_file=str(file), path_prefix=""
    )
    assert (made.host, made.port, made.token) == ("127.0.0.1", 0, "fedcba9876543210")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]", "LOCALHOST"])
def test_loopback_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    assert Settings(database_url=URL, host=host).token is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu-01", "localhost.example"])
def test_any_other_host_needs_a_token(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigurationError, match="GRADIOMETER_TOKEN"):
        Settings(database_url=URL, host=host)
    assert Settings(database_url=URL, host=host, token=TOKEN).host == host


@pytest.mark.parametrize("token", ["", "short", "0123456789abcde", "sixteen chars öö", "has spaces in it ok"])
def test_weak_or_unsendable_tokens_are_refused(token: str) -> None:
    with pytest.raises(ConfigurationError, match="at least 16"):
        Settings(database_url=URL, token=token)


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_that_do_not_exist_are_refused(port: int) -> None:
    with pytest.raises(ConfigurationError, match="port"):
        Settings(database_url=URL, port=port)


def test_a_port_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigurationError, match="GRADIOMETER_PORT is 'http'"):
        settings_from({"GRADIOMETER_PORT": "http"}, database_url=URL)


@pytest.mark.parametrize("prefix", ["g", "/g/", "/", "//x", "/a b", "/g?x"])
def test_path_prefixes_that_cannot_be_used_are_refused(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="path prefix"):
        Settings(database_url=URL, path_prefix=prefix)


def test_a_token_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no-such-file"):
        settings_from({}, database_url=URL, token_file=str(tmp_path / "no-such-file"))
