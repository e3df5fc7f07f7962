"""Paths as routes need them: without the prefix of a reverse proxy, and undecoded below `/api/`.

Servers decode a path before the application sees it, which makes `runs/a%2Fb` and `runs/a/b` the same; run ids may
hold slashes. So API paths are routed as they were sent, and parameters are decoded where they are read.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

API_ROOT: Final = "/api/"


class PathMiddleware:
    """The prefix may be there or not: some proxies take it off themselves."""

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on with the path that routes expect."""
        if scope["type"] in ("http", "websocket"):
            path = self._without_prefix(scope["path"])
            if path.startswith(API_ROOT):
                raw = (scope.get("raw_path") or b"").decode("latin-1")
                path = self._without_prefix(raw or quote(scope["path"]))
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)

    def _without_prefix(self, path: str) -> str:
        if self._prefix and (path == self._prefix or path.startswith(self._prefix + "/")):
            return path[len(self._prefix) :] or "/"
        return path
