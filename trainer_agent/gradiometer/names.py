"""What may name a metric or a layer; agent and server judge alike, through `wire`."""

from __future__ import annotations

import unicodedata
from typing import Final

MAX_NAME_CHARS: Final = 500
"""Longest metric or layer name, in Unicode code points."""


def name_problem(name: str) -> str | None:
    """Why `name` cannot name a metric or layer, or None if it can. Used by both ends, so that they agree.

    Any printable text passes, whatever the script; control characters and lone surrogates do not, because no
    database, URL or terminal carries them safely.
    """
    if not name or not name.strip():
        return "the name is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"the name has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed"
    for char in name:
        if unicodedata.category(char) in ("Cc", "Cs"):
            return f"the name contains the control character U+{ord(char):04X}"
    return None
