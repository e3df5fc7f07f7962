"""The token: asked for on every route and socket once one is set, health checks included.

Programs send `Authorization: Bearer <token>`. A browser gets a small form instead of a bare 401; what its cookie
holds is derived from the token with HMAC-SHA-256 and an end date, so the token itself never lies in a browser.
Changing the token ends every session.
"""

from __future__ import annotations

import hashlib
import hmac
from html import escape
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gradiometer_server.api.problems import problem_response
from gradiometer_server.api.security import refuse
from gradiometer_server.clock import Clock

COOKIE: Final = "gradiometer_session"
SESSION_S: Final = 30 * 24 * 3600
_MAX_FORM_BYTES: Final = 4096

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Gradiometer: sign in</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; display: grid; place-items: center; min-height: 90vh; }}
form {{ display: grid; gap: 12px; width: min(90vw, 340px); }}
h1 {{ font-size: 20px; margin: 0; }}
input, button {{ font: inherit; padding: 8px 10px; }}
[role=alert] {{ color: #cf222e; margin: 0; }}
</style></head><body><main>
<form method="post" action="{action}">
<h1>Gradiometer</h1>
<label for="token">Token of this server (its <code>GRADIOMETER_TOKEN</code>)</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<input name="next" type="hidden" value="{next}">
{problem}<button>Sign in</button>
</form></main></body></html>
"""


class Sessions:
    """Checks tokens and cookies in constant time."""

    def __init__(self, token: str, clock: Clock) -> None:
        self._token, self._clock = token.encode(), clock

    def token_matches(self, offered: str) -> bool:
        """Whether `offered` is the token."""
        return hmac.compare_digest(offered.encode("utf-8", "surrogateescape"), self._token)

    def new_cookie(self) -> str:
        """A session value that is good for `SESSION_S`."""
        expires = str(int(self._clock.now_s()) + SESSION_S)
        return f"{expires}.{self._sign(expires)}"

    def cookie_is_good(self, value: str) -> bool:
        """Whether `value` was made by `new_cookie` with this token and has not run out."""
        expires, _, signature = value.partition(".")
        if not hmac.compare_digest(
            signature.encode("utf-8", "surrogateescape"), self._sign(expires).encode()
        ):
            return False
        return expires.isdigit() and int(expires) > self._clock.now_s()

    def _sign(self, expires: str) -> str:
        message = b"gradiometer session until " + expires.encode("utf-8", "surrogateescape")
        return hmac.new(self._token, message, hashlib.sha256).hexdigest()

    def admits(self, scope: Scope) -> bool:
        """Whether the request or socket shows the token or a good session."""
        scheme, _, offered = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.token_matches(offered.strip()):
            return True
        return self.cookie_is_good(HTTPConnection(scope).cookies.get(COOKIE, ""))


class AuthMiddleware:
    """Lets in who is admitted, answers the sign-in form, refuses the rest."""

    def __init__(self, app: ASGIApp, *, sessions: Sessions, path_prefix: str) -> None:
        self._app, self._sessions, self._prefix = app, sessions, path_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer in place of the application."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/login" and scope["method"] == "POST":
            response = await self._sign_in(Request(scope, receive))
            await response(scope, receive, send)
        elif self._sessions.admits(scope):
            await self._app(scope, receive, send)
        else:
            await refuse(self._refusal(scope), scope, receive, send)

    def _refusal(self, scope: Scope) -> Response:
        if scope["type"] == "http" and scope["method"] == "GET" and _wants_page(scope):
            return self._form(scope["path"])
        return problem_response(
            401,
            code="unauthorized",
            detail="this server asks for its token",
            remedy="Send the header 'Authorization: Bearer <token>'; agents read it from GRADIOMETER_TOKEN.",
            headers={"WWW-Authenticate": "Bearer"},
        )

    async def _sign_in(self, request: Request) -> Response:
        body = await _read_form(request)
        target = _local_path(body.get("next", "/"))
        if not self._sessions.token_matches(body.get("token", "")):
            return self._form(target, problem="That is not the token of this server.")
        response = RedirectResponse(self._prefix + target, status_code=303)
        response.set_cookie(
            COOKIE,
            self._sessions.new_cookie(),
            max_age=SESSION_S,
            path=self._prefix or "/",
            secure=_is_https(request),
            httponly=True,
            samesite="strict",
        )
        return response

    def _form(self, target: str, problem: str = "") -> Response:
        alert = f'<p role="alert">{escape(problem)}</p>' if problem else ""
        page = _PAGE.format(
            action=escape(self._prefix + "/login"), next=escape(_local_path(target)), problem=alert
        )
        return HTMLResponse(page, status_code=401, headers={"Cache-Control": "no-store"})


def _wants_page(scope: Scope) -> bool:
    return "text/html" in Headers(scope=scope).get("accept", "") and not scope["path"].startswith("/api/")


def _is_https(request: Request) -> bool:
    return request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"


def _local_path(target: str) -> str:
    # "//elsewhere" and "/\\elsewhere" are other sites to a browser, and control characters vanish on the way.
    if not target.startswith("/") or target.startswith(("//", "/\\")) or not target.isprintable():
        return "/"
    return target


async def _read_form(request: Request) -> dict[str, str]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_FORM_BYTES:
            return {}
    fields = parse_qs(body.decode("utf-8", "replace"))
    return {name: values[0] for name, values in fields.items()}
