"""What every request is made into before routes see it: HEAD becomes GET without a body, a NUL character is refused."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradiometer_server.api.problems import problem_response


class RequestMiddleware:
    """HTTP only: RFC 9110, section 9.3.2: HEAD answers what GET would, without the content.

    A NUL character is in no name, and one database takes it in a query while the other does not.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what routes can answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        if b"%00" in scope["query_string"] or b"\0" in scope["query_string"]:
            await _nul()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def _nul() -> ASGIApp:
    return problem_response(
        422,
        code="invalid_request",
        detail="the query holds a NUL character (%00), which no name or text does.",
        remedy="Leave it out.",
        field="query",
    )
