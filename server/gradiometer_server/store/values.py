"""How values become columns: JSON text, floats that may be NaN, text that every engine accepts.

JSON is Python's own dialect: NaN, Infinity and -Infinity are bare words and integers have any length, so a config
comes back as it was sent. It is pure ASCII: NUL and lone surrogates, which PostgreSQL refuses in text, are escaped.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from gradiometer_server.errors import ProtocolError


def dump_json(value: Any) -> str:
    """JSON text of a value; what JSON has no form for (bytes, dates) is kept as its text.

    Raises:
        ProtocolError: code `bad_value`, for mappings whose keys are not plain, or nesting without end.
    """
    try:
        return json.dumps(value, default=str, ensure_ascii=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(
            f"a value cannot be stored as JSON: {error}.",
            code="bad_value",
            remedy="Send config values as plain numbers, strings, lists and dictionaries.",
        ) from error


def load_json(text: str) -> Any:
    """Inverse of `dump_json`."""
    if text == "{}":
        return {}
    return [] if text == "[]" else json.loads(text)


def pack_float(value: float | None) -> bytes | None:
    """Eight bytes that keep NaN, infinities and -0 apart; None stays None, meaning absent."""
    return None if value is None else struct.pack("<d", value)


def unpack_float(data: bytes | None) -> float | None:
    """Inverse of `pack_float`."""
    return None if data is None else float(struct.unpack("<d", data)[0])


def read_key(text: str) -> int:
    """A storage key from a cursor; raises ValueError for what no column can hold."""
    key = int(text)
    if not 0 <= key < 2**63:
        raise ValueError(f"{key} is no storage key")
    return key


def clean_text(text: str) -> str:
    """Text without NUL, which PostgreSQL cannot store; shown as U+FFFD instead."""
    return text.replace("\x00", "\ufffd")
