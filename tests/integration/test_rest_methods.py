"""HEAD beside GET, paths that are nothing, and characters that no name has: alike on both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.server import Server


@pytest.fixture
def client(server: Callable[..., Server], database_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server(database_url).url) as made:
        yield made


def test_head_is_get_without_the_body(client: httpx.Client) -> None:
    for path in ("/api/v1/runs", "/api/v1/alerts", "/healthz", "/readyz", "/docs", "/", "/api/v1/runs/none"):
        head, get = client.head(path), client.get(path)
        assert head.content == b"", path
        assert (head.status_code, head.headers["content-type"]) == (
            get.status_code,
            get.headers["content-type"],
        )
        assert head.headers["content-length"] == get.headers["content-length"], path
    refused = client.head("/api/v1/series/query")
    assert (refused.status_code, refused.content) == (405, b"")


@pytest.mark.parametrize("query", ["search=%00", "search=a%00b", "project=%00", "cursor=%00"])
def test_a_nul_character_is_refused(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/api/v1/runs?{query}")
    assert answer.status_code == 422
    assert answer.json()["field"] == "query"
    assert "NUL" in answer.json()["detail"]
    assert client.get("/api/v1/runs?search=%2500").status_code == 200
    assert client.head(f"/api/v1/runs?{query}").status_code == 422


def test_pages_that_there_are_not(client: httpx.Client) -> None:
    answer = client.get("/nothing/here")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert client.get("/runs/whatever").status_code == 200
