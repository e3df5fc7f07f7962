"""Files of the built page: encodings, caching, and which paths are pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from gradiometer_server.api.page import respond


@pytest.fixture
def built(tmp_path: Path) -> Path:
    root = tmp_path / "static"
    root.mkdir()
    for name in ("index.html", "main-ABCD2345.js", "plain.css", "plotly-cartesian.js"):
        for suffix in ("", ".br", ".gz"):
            (root / (name + suffix)).write_text(name + suffix)
    (root / "bare.png").write_bytes(b"png")
    (tmp_path / "secret.txt").write_text("secret")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    return root.resolve()


def body_of(response: Response) -> str:
    assert isinstance(response, FileResponse)
    return Path(response.path).read_text()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/index.html",
        "/runs/abc",
        "/runs/v1.2",
        "/runs/a/b",
        "/runs",
        "/runs/",
        "/runs/" + "\u4e2d" * 128,
        "/runs/" + "x" * 5000,
    ],
)
def test_pages_get_the_index_and_never_a_cached_one(built: Path, path: str) -> None:
    response = respond(built, path, "")
    assert body_of(response) == "index.html"
    assert response.headers["cache-control"] == "no-cache"
    assert (response.status_code, response.media_type) == (200, "text/html")


@pytest.mark.parametrize("path", ["/alerts", "/settings/x", "/metrics", "/run", "/runsx", "/index", "//"])
def test_a_page_that_there_is_not_is_told_by_the_page_and_by_the_status(built: Path, path: str) -> None:
    response = respond(built, path, "")
    assert body_of(response) == "index.html"
    assert (response.status_code, response.headers["cache-control"]) == (404, "no-cache")


@pytest.mark.parametrize(
    "path",
    ["/missing.js", "/api", "/api/v1/nothing", "/../secret.txt", "/%2e%2e/x.txt", "/link.txt", "/a\0b"],
)
def test_what_is_no_file_and_no_page_is_not_found(built: Path, path: str) -> None:
    with pytest.raises(HTTPException) as raised:
        respond(built, path, "")
    assert raised.value.status_code == 404


def test_hashed_names_are_cached_for_good_and_others_are_not(built: Path) -> None:
    assert "immutable" in respond(built, "/main-ABCD2345.js", "").headers["cache-control"]
    assert respond(built, "/plotly-cartesian.js", "").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("accepted", "suffix", "encoding"),
    [
        ("gzip, deflate, br", ".br", "br"),
        ("gzip", ".gz", "gzip"),
        ("br;q=0, gzip;q=0.5", ".gz", "gzip"),
        ("", "", None),
        ("identity", "", None),
    ],
)
def test_packed_siblings_are_served_to_who_takes_them(
    built: Path, accepted: str, suffix: str, encoding: str | None
) -> None:
    response = respond(built, "/main-ABCD2345.js", accepted)
    assert body_of(response) == "main-ABCD2345.js" + suffix
    assert response.headers.get("content-encoding") == encoding
    assert response.headers["vary"] == "Accept-Encoding"
    assert response.media_type == "text/javascript"


def test_files_without_siblings_are_served_as_they_are(built: Path) -> None:
    response = respond(built, "/bare.png", "br, gzip")
    assert "content-encoding" not in response.headers
    assert response.media_type == "image/png"


def test_a_page_that_was_not_built_says_how(tmp_path: Path) -> None:
    response = respond(tmp_path, "/", "")
    assert response.status_code == 503
    assert b"npm run build" in bytes(response.body)
    with pytest.raises(HTTPException):
        respond(tmp_path, "/runs/a", "")
