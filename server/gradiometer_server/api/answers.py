"""Answers that msgspec encodes, and the path parameter that names a run."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Header, Path
from pydantic import BeforeValidator
from starlette.responses import Response

from gradiometer_server.domain.jsonable import dumps

RunId = Annotated[
    str, BeforeValidator(unquote), Path(min_length=1, max_length=128, description="run id, percent-encoded")
]
Accept = Annotated[str | None, Header(include_in_schema=False)]
AlertId = Annotated[str, BeforeValidator(unquote), Path(min_length=1, max_length=200, description="alert id")]


def answer(body: dict[str, Any], status: int = 200) -> Response:
    """A JSON answer. Not FastAPI's own encoder: that would walk every one of a heat map's 150,000 cells twice."""
    return json_answer(dumps(body), status)


def json_answer(body: bytes, status: int = 200) -> Response:
    """JSON that is encoded already."""
    headers = {"Cache-Control": "no-store", "Vary": "Accept"}
    return Response(body, status_code=status, media_type="application/json", headers=headers)
