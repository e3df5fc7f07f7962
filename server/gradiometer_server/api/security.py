"""Who may speak to the server: Host and Origin of every request and socket, and the headers of every answer.

A server on loopback has no token, so these checks are what keeps a web page elsewhere from using it: a foreign
Host name is DNS rebinding, a foreign Origin is another site's script. Pure ASGI, because Starlette's
HTTP middleware does not see WebSockets.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradiometer_server.api.problems import problem_response

_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  compared with, not listened on
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def allowed_hosts(bind_host: str, extra: Iterable[str]) -> frozenset[str]:
    """Names that a Host header may carry (without port): loopback, the bind address, and what the settings add."""
    names = {bind_host.strip("[]").lower(), *(name.strip("[]").lower() for name in extra)}
    return _LOOPBACK_NAMES | (names - _WILDCARDS)


def content_security_policy(index_html: str) -> str:
    """The page's policy; `index_html` may hold inline scripts (the theme line), each allowed by its hash."""
    hashes = [
        "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"
        for script in _INLINE_SCRIPT.findall(index_html)
    ]
    return "; ".join(
        [
            "default-src 'none'",
            " ".join(["script-src", "'self'", *hashes]),
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "font-src 'self'",
            "manifest-src 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
            # The theme line also sets the base that makes the page's addresses work under any path prefix.
            "base-uri 'self'" if "createElement('base')" in index_html else "base-uri 'none'",
            "object-src 'none'",
        ]
    )


def read_index(static_dir: Path) -> str:
    """The built page's index.html, or "" when the page is not built."""
    path = static_dir / "index.html"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


class SecurityMiddleware:
    """Outermost: security headers on every answer, then Host, then Origin."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str], policy: str) -> None:
        self._app, self._hosts = app, hosts
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may come in; refuse the rest with a problem."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await refuse(refusal, scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        name = host_name(hosts[0]) if len(hosts) == 1 else None
        if name not in self._hosts:
            return problem_response(
                421,
                code="host_not_allowed",
                detail=f"this server does not answer to the host name {hosts[0] if hosts else ''!r}",
                remedy="Use localhost, or add the name to GRADIOMETER_ALLOWED_HOSTS and restart the server.",
            )
        origin = headers.get("origin")
        # Only opening the page itself is anybody's: a link from another site leads there.
        opens_page = (
            scope["type"] == "http" and scope["method"] in _SAFE_METHODS and "/api/" not in scope["path"]
        )
        if not opens_page and origin is not None and not same_origin(origin, hosts[0]):
            return problem_response(
                403,
                code="origin_not_allowed",
                detail=f"a page from {origin!r} may not use this server",
                remedy="Open the server's own page.",
            )
        return None


def host_name(host: str) -> str | None:
    """The name in a Host header, lower case, without port and brackets; None if it is not one."""
    parts = _split("//" + host)
    return None if parts is None else parts[0]


def same_origin(origin: str, host: str) -> bool:
    """Whether the page of `origin` came from the server that was addressed as `host`."""
    if not origin.startswith(("http://", "https://")):
        return False
    default = _DEFAULT_PORTS[origin.partition(":")[0]]
    page, server = _split(origin), _split("//" + host)
    if page is None or server is None:
        return False
    return (page[0], page[1] or default) == (server[0], server[1] or default)


def _split(url: str) -> tuple[str, int | None] | None:
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name or "@" in parts.netloc or parts.path.strip("/") or parts.query or parts.fragment:
        return None
    return name.rstrip("."), port


async def refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request, or a socket before it is accepted, with an HTTP response."""
    if scope["type"] == "http":
        await response(scope, receive, send)
        return
    await receive()  # websocket.connect
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    await send(
        {
            "type": "websocket.http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
    )
    await send({"type": "websocket.http.response.body", "body": bytes(response.body)})
