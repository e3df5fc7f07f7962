"""What may name a metric or a layer; agent and server judge alike, through `wire`."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Container
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


def fitting_name(name: str, max_chars: int = MAX_NAME_CHARS, taken: Container[str] = ()) -> str:
    """`name` where it can name a metric or layer, otherwise one that can: for names that nobody chose for this.

    Control characters and lone surrogates are written as escapes. What is too long, or is in `taken`, ends with a hash
    of the whole name, so that it differs from others, and is the same on every rank.
    """
    found = name if name.isprintable() else "".join(map(_printable, name))
    found = found if found.strip() else "unnamed"
    if len(found) <= max_chars and found not in taken:
        return found
    for attempt in range(1, 1_000):
        digest = hashlib.sha256(f"{attempt}:{name}".encode("utf-8", "surrogatepass")).hexdigest()[:8]
        shortened = f"{found[: max_chars - 9]}~{digest}"
        if shortened not in taken:
            break
    return shortened


def _printable(char: str) -> str:
    is_printable = unicodedata.category(char) not in ("Cc", "Cs")
    return char if is_printable else char.encode("unicode_escape", "surrogatepass").decode("ascii")
