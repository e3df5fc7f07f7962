"""One shape for every error that REST answers: `application/problem+json` (RFC 9457 with our own members).

Domain errors become problems here and nowhere else. What went wrong inside the server is logged with its
traceback and answered without it.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradiometer_server.domain.jsonable import dumps
from gradiometer_server.errors import (
    ConfigurationError,
    Conflict,
    GradiometerError,
    InvalidRequest,
    NotAcceptable,
    NotFound,
    ProtocolError,
    StoreUnavailable,
)

logger = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
MAX_BODY_BYTES: Final = 1024 * 1024
"""Largest request body outside ingest."""

_STATUS: Final[dict[type[GradiometerError], int]] = {
    NotFound: 404,
    InvalidRequest: 422,
    NotAcceptable: 406,
    Conflict: 409,
    ProtocolError: 400,
    StoreUnavailable: 503,
    ConfigurationError: 503,
}


class Problem(BaseModel):
    """Why a request was refused, and what to do about it."""

    status: int = Field(description="HTTP status, repeated")
    code: str = Field(description="stable identifier for programs, e.g. `not_found`")
    title: str = Field(description="short summary of the kind of problem")
    detail: str = Field(description="what was wrong, and where")
    remedy: str = Field(description="what to do; may be empty")
    field: str | None = Field(
        description="the part of the request that is wrong, e.g. `body.series.0.metric`"
    )


def problem_response(
    status: int,
    *,
    code: str,
    detail: str,
    remedy: str = "",
    field: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """The answer for one problem."""
    body = {
        "status": status,
        "code": code,
        "title": HTTPStatus(status).phrase,
        "detail": detail,
        "remedy": remedy,
        "field": field,
    }
    return Response(dumps(body), status_code=status, media_type=MEDIA_TYPE, headers=headers)


def error_response(error: GradiometerError) -> Response:
    """The answer for an error of our own tree."""
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": "2"} if status == 503 else None
    field = getattr(error, "field", None)
    return problem_response(
        status, code=error.code, detail=error.message, remedy=error.remedy, field=field, headers=headers
    )


def install(app: FastAPI) -> None:
    """Answer every kind of error that a route or the router itself raises with a problem, refused sockets too."""
    app.add_exception_handler(GradiometerError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_error(_connection: HTTPConnection, error: Exception) -> Response:
    assert isinstance(error, GradiometerError)
    return error_response(error)


async def _on_invalid(_connection: HTTPConnection, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found: list[dict[str, Any]] = list(error.errors())
    first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    field = ".".join(str(part) for part in first["loc"])
    return problem_response(
        422,
        code="invalid_request",
        detail=f"{field}: {first['msg']}{more}",
        remedy="See /docs for what this operation takes.",
        field=field,
    )


async def _on_http(connection: HTTPConnection, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed", 401: "unauthorized", 413: "body_too_large"}
    details = {
        404: f"there is nothing at {connection.url.path}",
        405: f"{connection.url.path} does not answer {connection.scope.get('method', 'sockets')}",
    }
    return problem_response(
        error.status_code,
        code=codes.get(error.status_code, "invalid_request"),
        detail=details.get(error.status_code, str(error.detail)),
        remedy="See /docs for what there is." if error.status_code in details else "",
        headers=dict(error.headers) if error.headers else None,
    )


class ProblemMiddleware:
    """Innermost of the middlewares: an error nobody expected becomes a problem, a body that is too large a 413."""

    def __init__(self, app: ASGIApp, *, ingest_path: str, max_ingest_bytes: int) -> None:
        self._app, self._ingest_path, self._max_ingest_bytes = app, ingest_path, max_ingest_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; answer what goes wrong before the first byte of the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._max_ingest_bytes if scope["path"] == self._ingest_path else MAX_BODY_BYTES
        exchange = _Exchange(receive, send, limit)
        if _declared_bytes(scope) > limit:
            await _too_large(limit)(scope, receive, send)
            return
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            if exchange.started:
                raise
            await _internal(error, scope)(scope, receive, send)


class _Exchange:
    """Counts what comes in and remembers whether an answer has begun."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive, self._send, self._limit = receive, send, limit
        self._received = 0
        self.started = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            # An HTTPException, because FastAPI turns any other error of a body into a 400.
            raise HTTPException(413, detail=_TOO_LARGE.format(self._limit))
        return message

    async def send(self, message: Message) -> None:
        self.started = self.started or message["type"] == "http.response.start"
        await self._send(message)


_TOO_LARGE: Final = "the request body is larger than {} bytes; send less at once"


def _declared_bytes(scope: Scope) -> int:
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else 0


def _too_large(limit: int) -> Response:
    # The body stays unread, so this connection cannot carry another request.
    return problem_response(
        413, code="body_too_large", detail=_TOO_LARGE.format(limit), headers={"Connection": "close"}
    )


def _internal(error: Exception, scope: Scope) -> Response:
    logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return problem_response(
        500,
        code="internal",
        detail="the server met an error of its own; its log says more",
        remedy="Try again; if it stays, report it with the server's log.",
    )
