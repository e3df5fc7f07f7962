"""The built page: files of `static/`, and `index.html` for every path that the page routes by itself.

For any other path without a file's ending `index.html` is the body of a 404, because the page says best what there is.
Names with a hash never change and are cached for good; everything else is asked for again. The build leaves `.br`
and `.gz` files beside each file, so nothing is compressed per request.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

NOT_BUILT: Final = (
    "The page is not built: run `npm ci && npm run build` in web/ (or `pip install -e .`), then reload.\n"
)

_ROUTES: Final = re.compile(r"/(?:index\.html|runs(?:/.*)?)?", re.DOTALL)
"""As in `web/src/router.ts`."""
_HASHED = re.compile(r"[-.](?:[A-Z0-9]{8}|(?=[a-f]*[0-9])[0-9a-f]{8,64})\.")
_REFUSED = re.compile(r";\s*q=0(\.0*)?\s*$")
_ENCODINGS: Final = (("br", ".br"), ("gzip", ".gz"))
_MEDIA_TYPES: Final = {".js": "text/javascript", ".mjs": "text/javascript", ".woff2": "font/woff2"}


def page(static_dir: Path) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An ASGI application for whatever no route answers; 404 for what is not a file or a page either."""
    root = static_dir.resolve()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)
        response = respond(root, scope["path"], Headers(scope=scope).get("accept-encoding", ""))
        await response(scope, receive, send)

    return serve


def respond(root: Path, path: str, accept_encoding: str) -> Response:
    """The answer for one path; raises HTTPException 404."""
    if path == "/api" or path.startswith("/api/") or "\0" in path:
        raise HTTPException(404)
    if not (root / "index.html").is_file():
        if path == "/":
            return PlainTextResponse(NOT_BUILT, status_code=503)
        raise HTTPException(404)
    file = _find(root, path)
    if file is not None:
        return _file(file, accept_encoding)
    is_route = _ROUTES.fullmatch(path) is not None
    if "." in path.rsplit("/", 1)[-1] and not is_route:
        raise HTTPException(404)
    return _file(root / "index.html", accept_encoding, status=200 if is_route else 404)


def _find(root: Path, path: str) -> Path | None:
    """The file of this path inside `root`; None if there is none, also for what no file can be named."""
    try:
        file = (root / path.lstrip("/")).resolve()
        return file if file.is_relative_to(root) and file.is_file() else None
    except (OSError, ValueError, RuntimeError):
        # Run ids may be longer than a file name; a loop of links is a RuntimeError.
        return None


def _file(file: Path, accept_encoding: str, status: int = 200) -> Response:
    media_type = (
        _MEDIA_TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    )
    lasting = _HASHED.search(file.name) is not None
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable" if lasting else "no-cache",
        "Vary": "Accept-Encoding",
    }
    wanted = [part for part in accept_encoding.lower().split(",") if not _REFUSED.search(part)]
    accepted = {part.split(";")[0].strip() for part in wanted}
    for encoding, suffix in _ENCODINGS:
        packed = file.with_name(file.name + suffix)
        if encoding in accepted and packed.is_file():
            headers["Content-Encoding"] = encoding
            return FileResponse(packed, status, headers, media_type=media_type)
    return FileResponse(file, status, headers, media_type=media_type)
