"""Answers that msgspec encodes, and the path parameter that names a run."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Path
from pydantic import BeforeValidator
from starlette.responses import Response

from gradiometer_server.domain.jsonable import dumps

RunId = Annotated[
    str, BeforeValidator(unquote), Path(min_length=1, max_length=128, description="run id, percent-encoded")
]
AlertId = Annotated[str, BeforeValidator(unquote), Path(min_length=1, max_length=200, description="alert id")]


def answer(body: dict[str, Any], status: int = 200) -> Response:
    """A JSON answer. Not FastAPI's own encoder: that would walk every one of a heat map's 150,000 cells twice."""
    headers = {"Cache-Control": "no-store"}
    return Response(dumps(body), status_code=status, media_type="application/json", headers=headers)
