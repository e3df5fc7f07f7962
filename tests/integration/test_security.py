"""Who may use a running server: Host, Origin and token, on HTTP and on sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.support.server import Server

TOKEN = "a-token-of-32-characters-0123456"
Factory = Callable[..., Server]
ROUTES = [
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/main.js"),
    ("GET", "/runs/x"),
    ("GET", "/nothing/here"),
    ("GET", "/api/v1/runs"),
    ("GET", "/api/v1/runs/x"),
    ("GET", "/api/v1/alerts"),
    ("GET", "/api/v1/runs/x/histograms"),
    ("POST", "/api/v1/runs/x/commands"),
    ("POST", "/api/v1/series/query"),
    ("POST", "/api/v1/ingest"),
    ("DELETE", "/api/v1/runs/x"),
    ("GET", "/login"),
]
SOCKETS = ["/api/v1/live", "/api/v1/ingest", "/api/v1/nothing"]


def _serving(folder: Path, environment: dict[str, str]) -> Iterator[Server]:
    one = Server(f"sqlite:///{folder / 'x.db'}", folder, arguments=[], environment=environment)
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serving(tmp_path_factory.mktemp("open"), {})


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serving(tmp_path_factory.mktemp("locked"), {"GRADIOMETER_TOKEN": TOKEN})


def raw_status(one: Server, request: str) -> str:
    """Status line of a request written by hand."""
    with socket.create_connection(("127.0.0.1", one.port), timeout=10) as connection:
        connection.sendall(request.encode())
        return connection.makefile().readline()


def live_problem(one: Server, path: str = "/api/v1/live", **headers: str) -> tuple[int, dict[str, object]]:
    """Status and problem of a refused socket."""
    with pytest.raises(InvalidStatus) as raised:
        connect(f"ws://127.0.0.1:{one.port}{path}", additional_headers=headers, proxy=None).close()
    response = raised.value.response
    return response.status_code, json.loads(bytes(response.body or b"null"))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7717", "localhost.evil.example", "192.168.1.5", ""]
)
def test_other_host_names_are_refused(open_server: Server, host: str) -> None:
    for method, path in ROUTES:
        answer = httpx.request(method, open_server.url + path, headers={"Host": host})
        assert answer.status_code == 421, (method, path)
        assert answer.headers["content-type"] == "application/problem+json"
    assert "GRADIOMETER_ALLOWED_HOSTS" in answer.json()["remedy"]
    lines = ["GET /api/v1/live HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", ""]
    assert " 421 " in raw_status(open_server, "\r\n".join(lines))


def test_two_or_no_host_headers_are_refused(open_server: Server) -> None:
    assert " 200 " in raw_status(open_server, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert " 421 " in raw_status(open_server, "GET /healthz HTTP/1.0\r\n\r\n")
    two = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert " 200 " not in raw_status(open_server, two)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "dash.example"])
def test_loopback_and_allowed_names_are_served(server: Factory, name: str) -> None:
    one = server(environment={"GRADIOMETER_ALLOWED_HOSTS": "dash.example"})
    answer = httpx.get(one.url + "/healthz", headers={"Host": f"{name}:{one.port}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", "null", "http://localhost"])
def test_foreign_pages_can_neither_open_a_socket_nor_post(open_server: Server, origin: str) -> None:
    status, problem = live_problem(open_server, Origin=origin)
    assert (status, problem["code"]) == (403, "origin_not_allowed")
    status, problem = live_problem(open_server, "/api/v1/ingest", Origin=origin)
    assert (status, problem["code"]) == (403, "origin_not_allowed")
    answer = httpx.post(open_server.url + "/api/v1/series/query", json={}, headers={"Origin": origin})
    assert (answer.status_code, answer.json()["code"]) == (403, "origin_not_allowed")
    answer = httpx.get(open_server.url + "/api/v1/runs", headers={"Origin": origin})
    assert (answer.status_code, answer.json()["code"]) == (403, "origin_not_allowed")


@pytest.mark.parametrize("path", ["/api/v1/nope", "/runs/x", "/"])
def test_a_socket_to_nowhere_is_refused_with_a_problem(open_server: Server, path: str) -> None:
    status, problem = live_problem(open_server, path)
    assert (status, problem["code"]) == (404, "not_found")
    assert "Traceback" not in open_server.log


def test_the_own_page_and_programs_can(open_server: Server) -> None:
    own = {"Origin": open_server.url}
    with connect(
        f"ws://127.0.0.1:{open_server.port}/api/v1/live", additional_headers=own, proxy=None
    ) as live:
        assert json.loads(live.recv(10))["type"] == "hello"
    with connect(f"ws://127.0.0.1:{open_server.port}/api/v1/live", proxy=None) as live:
        assert json.loads(live.recv(10))["type"] == "hello"
    assert httpx.post(open_server.url + "/api/v1/series/query", json={}, headers=own).status_code == 422


def test_a_link_from_elsewhere_still_opens_the_page(open_server: Server) -> None:
    answer = httpx.get(open_server.url + "/docs", headers={"Origin": "https://wiki.example"})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/docs", "/api/v1/nothing", "/api/v1/runs", "/healthz"])
def test_every_answer_carries_the_security_headers(open_server: Server, path: str) -> None:
    headers = httpx.get(open_server.url + path).headers
    policy = headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert "server" not in headers
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_the_token(locked_server: Server, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong-token-012345"}, {"Authorization": f"Basic {TOKEN}"}):
        answer = httpx.request(method, locked_server.url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["code"] == "unauthorized"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "content-security-policy" in answer.headers
    answer = httpx.request(method, locked_server.url + path, headers=locked_server.headers)
    assert answer.status_code != 401


@pytest.mark.parametrize("path", SOCKETS)
def test_every_socket_asks_for_the_token(locked_server: Server, path: str) -> None:
    assert live_problem(locked_server, path)[0] == 401
    assert live_problem(locked_server, path, Authorization="Bearer wrong-token-012345")[0] == 401


def test_a_socket_with_the_token_is_let_in(locked_server: Server) -> None:
    address = f"ws://127.0.0.1:{locked_server.port}/api/v1/live"
    with connect(address, additional_headers=locked_server.headers, proxy=None) as live:
        assert json.loads(live.recv(10))["type"] == "hello"


def test_a_browser_signs_in_with_a_form(locked_server: Server) -> None:
    browser = {"Accept": "text/html", "Origin": locked_server.url}
    with httpx.Client(base_url=locked_server.url, headers=browser) as client:
        form = client.get("/runs/some%20run")
        assert form.status_code == 401
        assert form.headers["content-type"].startswith("text/html")
        assert 'action="/login"' in form.text
        assert 'value="/runs/some run"' in form.text
        assert "<script" not in form.text
        wrong = client.post("/login", data={"token": "wrong-token-012345", "next": "/docs"})
        assert wrong.status_code == 401
        assert "not the token" in wrong.text
        assert not wrong.cookies
        done = client.post("/login", data={"token": TOKEN, "next": "/docs"})
        assert (done.status_code, done.headers["location"]) == (303, "/docs")
        cookie = done.headers["set-cookie"]
        assert TOKEN not in cookie
        for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age="):
            assert part in cookie
        assert client.get("/docs").status_code == 200
        assert client.get("/api/v1/runs").status_code == 200
        value = client.cookies["gradiometer_session"]
    headers = {"Cookie": f"gradiometer_session={value}", "Origin": locked_server.url}
    address = f"ws://127.0.0.1:{locked_server.port}/api/v1/live"
    with connect(address, additional_headers=headers, proxy=None) as live:
        assert json.loads(live.recv(10))["type"] == "hello"
    forged = {"Cookie": f"gradiometer_session={value[:-1]}{'0' if value[-1] != '0' else '1'}"}
    assert httpx.get(locked_server.url + "/api/v1/runs", headers=forged).status_code == 401
    assert live_problem(locked_server, **forged)[0] == 401


def test_signing_in_is_not_open_to_other_sites(locked_server: Server) -> None:
    other = {"Origin": "https://evil.example"}
    assert httpx.post(locked_server.url + "/login", data={"token": TOKEN}, headers=other).status_code == 403
    own = {"Origin": locked_server.url}
    done = httpx.post(
        locked_server.url + "/login", data={"token": TOKEN, "next": "//evil.example"}, headers=own
    )
    assert done.headers["location"] == "/"
    huge = httpx.post(locked_server.url + "/login", content=b"token=" + b"x" * 100_000, headers=own)
    assert huge.status_code == 401
