"""Host, Origin, content policy and tokens, as tables."""

from __future__ import annotations

import base64
import hashlib

import pytest

from gradiometer_server.api.auth import SESSION_S, Sessions, _local_path
from gradiometer_server.api.security import allowed_hosts, content_security_policy, host_name, same_origin

TOKEN = "0123456789abcdef"


class FixedClock:
    def __init__(self, now_s: float) -> None:
        self.at_s = now_s

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:7717", "localhost"),
        ("LocalHost", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:7717", "::1"),
        ("example.org.", "example.org"),
        ("", None),
        ("a b", "a b"),
        ("localhost:port", None),
        ("localhost@evil.example", None),
        ("localhost/evil", None),
        ("localhost?x", None),
        ("[::1", None),
    ],
)
def test_host_headers(header: str, name: str | None) -> None:
    assert host_name(header) == name


def test_allowed_hosts_are_loopback_bind_and_extra_but_never_a_wildcard() -> None:
    assert allowed_hosts("0.0.0.0", ["Dash.example"]) == {"localhost", "127.0.0.1", "::1", "dash.example"}
    assert "10.1.2.3" in allowed_hosts("10.1.2.3", [])
    assert "::" not in allowed_hosts("::", [])


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost:7717", "localhost:7717", True),
        ("http://LOCALHOST:7717", "localhost:7717", True),
        ("http://localhost", "localhost", True),
        ("http://localhost:80", "localhost", True),
        ("https://dash.example", "dash.example", True),
        ("https://dash.example", "dash.example:443", True),
        ("http://[::1]:7717", "[::1]:7717", True),
        ("http://localhost:3000", "localhost:7717", False),
        ("http://127.0.0.1:7717", "localhost:7717", False),
        ("https://evil.example", "localhost:7717", False),
        ("http://localhost:7717.evil.example", "localhost:7717", False),
        ("http://user@localhost:7717", "localhost:7717", False),
        ("null", "localhost:7717", False),
        ("file://", "localhost:7717", False),
        ("", "localhost:7717", False),
    ],
)
def test_origins(origin: str, host: str, same: bool) -> None:
    assert same_origin(origin, host) is same


def test_the_policy_allows_exactly_the_inline_scripts_of_the_page() -> None:
    script = "document.documentElement.dataset.theme='dark'"
    policy = content_security_policy(f"<head><script>{script}</script><script src='./a.js'></script></head>")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'self' 'sha256-{digest}';" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'self';" in content_security_policy("")
    for part in ("frame-ancestors 'none'", "base-uri 'none'", "object-src 'none'", "connect-src 'self'"):
        assert part in policy


def test_a_session_ends_and_cannot_be_made_up() -> None:
    clock = FixedClock(1_800_000_000.0)
    sessions = Sessions(TOKEN, clock)
    cookie = sessions.new_cookie()
    assert TOKEN not in cookie
    assert sessions.cookie_is_good(cookie)
    expires, _, signature = cookie.partition(".")
    assert not sessions.cookie_is_good(f"{int(expires) + 1}.{signature}")
    assert not sessions.cookie_is_good(f"{expires}.{signature[:-1]}0")
    for bad in ("", ".", expires, f"{expires}.", f"{expires}.é", f"²{expires}.{signature}", TOKEN):
        assert not sessions.cookie_is_good(bad)
    assert not Sessions("another token 456", clock).cookie_is_good(cookie)
    clock.at_s += SESSION_S + 1
    assert not sessions.cookie_is_good(cookie)


@pytest.mark.parametrize("offered", ["", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é" * 16])
def test_only_the_token_is_the_token(offered: str) -> None:
    sessions = Sessions(TOKEN, FixedClock(0.0))
    assert not sessions.token_matches(offered)
    assert sessions.token_matches(TOKEN)


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        ("/runs/a", "/runs/a"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example", "/"),
        ("/a\tb", "/"),
        ("", "/"),
    ],
)
def test_signing_in_never_leads_elsewhere(target: str, kept: str) -> None:
    assert _local_path(target) == kept
