"""How large a run's own description may be: one set of limits for `init`, which refuses more, and for the server.

Each function answers with what is wrong, as the rest of a sentence that begins with the value's name, or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from gradiometer.names import name_problem

MAX_ID_CHARS: Final = 128
"""Longest run id and project name."""
MAX_LABEL_CHARS: Final = 500
"""Longest name, group and tag of a run."""
MAX_TAGS: Final = 256
MAX_NOTES_CHARS: Final = 64 * 1024
MAX_CONFIG_BYTES: Final = 1024 * 1024
"""Largest run configuration, encoded: it is read with every run page."""
MAX_DEPTH: Final = 32
"""Deepest nesting of configuration and event attributes."""


def label_problem(text: str, max_chars: int = MAX_LABEL_CHARS) -> str | None:
    """Of a text that people read in one line: an id, a name, a tag."""
    if len(text) > max_chars:
        return f"it has {len(text)} characters; at most {max_chars} are allowed"
    return name_problem(text)


def run_id_problem(run_id: str) -> str | None:
    """Of a run id, which is also a part of its page's address."""
    if run_id in (".", ".."):
        return "a browser takes it out of the address of the run's page"
    return label_problem(run_id, MAX_ID_CHARS)


def notes_problem(notes: str) -> str | None:
    """Of the notes, which may have several lines."""
    if len(notes) > MAX_NOTES_CHARS:
        return f"has {len(notes)} characters; at most {MAX_NOTES_CHARS} are allowed"
    return None


def config_problem(config: Mapping[str, Any]) -> str | None:
    """Of a configuration of numbers, texts, lists and dicts."""
    problem = structure_problem(config)
    if problem is not None:
        return f"cannot be kept: {problem}"
    num_bytes = len(msgspec.msgpack.encode(config))
    if num_bytes > MAX_CONFIG_BYTES:
        return f"takes {num_bytes} bytes; at most {MAX_CONFIG_BYTES} are allowed"
    return None


def structure_problem(value: Any, path: str = "", depth: int = 0) -> str | None:
    """Where `value` is nested too deeply or has a key that is no text, or None. Leaves may be anything."""
    if depth > MAX_DEPTH:
        return f"{path[:200]} is nested deeper than {MAX_DEPTH} levels"
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            return f"{path[:200] or 'the top level'} has the key {wrong!r:.80}, which is not a text"
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    problems = (structure_problem(item, f"{path}[{key!r:.80}]", depth + 1) for key, item in items)
    return next((problem for problem in problems if problem is not None), None)
