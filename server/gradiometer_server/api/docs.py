"""`/docs`: the operations of `/openapi.json` as one plain HTML page.

FastAPI's own page loads its scripts from a CDN, which neither the content security policy nor a cluster without
internet allows. This one is rendered here and needs no script.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 980px; margin: 0 auto; padding: 24px; }
h2 { margin-top: 40px; border-bottom: 1px solid #8886; }
h3 code { font-size: 15px; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 4px 12px 4px 0; border-bottom: 1px solid #8884; }
code, pre { font-family: ui-monospace, monospace; font-size: 13px; }
"""


def docs_router(app: FastAPI, path_prefix: str) -> APIRouter:
    """The route `/docs` for `app`."""
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    def docs(_request: Request) -> HTMLResponse:
        return HTMLResponse(render(app.openapi(), path_prefix))

    return router


def render(spec: dict[str, Any], path_prefix: str) -> str:
    """An OpenAPI document as HTML."""
    info = spec["info"]
    operations = "".join(
        _operation(path, method, operation)
        for path, methods in spec["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(
        _schema(name, schema) for name, schema in spec.get("components", {}).get("schemas", {}).items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info.get('description', ''))}</p>"
        f'<p>For programs: <a href="{escape(path_prefix)}/openapi.json">openapi.json</a></p>'
        f"<main><h2>Operations</h2>{operations}<h2>Schemas</h2>{schemas}</main></body></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        (f"{item['name']} ({item['in']})", _type_of(item.get("schema", {})), _note(item))
        for item in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {})
    rows += [("body", _type_of(item.get("schema", {})), escape(kind)) for kind, item in body.items()]
    for status, answer in operation.get("responses", {}).items():
        content: dict[str, Any] = next(iter(answer.get("content", {}).values()), {})
        rows.append(
            (f"answer {status}", _type_of(content.get("schema", {})), escape(answer.get("description", "")))
        )
    return (
        f"<section><h3><code>{escape(method.upper())} {escape(path)}</code></h3>"
        f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>{_table(rows)}</section>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    rows = [(field, _type_of(item), _note(item)) for field, item in schema.get("properties", {}).items()]
    return (
        f'<section id="{escape(name)}"><h3><code>{escape(name)}</code></h3>'
        f"<p>{escape(schema.get('description', ''))}</p>{_table(rows)}</section>"
    )


def _table(rows: list[tuple[str, str, str]]) -> str:
    cells = "".join(f"<tr><th><code>{escape(a)}</code></th><td>{b}</td><td>{c}</td></tr>" for a, b, c in rows)
    return f"<table>{cells}</table>" if rows else ""


def _note(item: dict[str, Any]) -> str:
    return escape(str(item.get("description", "")))


def _type_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " | ".join(dict.fromkeys(_type_of(item) for item in schema[key]))
    if "enum" in schema:
        return " | ".join(f"<code>{escape(json.dumps(item))}</code>" for item in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"text to {_type_of(schema['additionalProperties'])}"
    return escape(str(schema.get("type", "any")))
