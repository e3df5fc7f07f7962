"""How large a run's own description may be: one set of limits for `init`, which refuses more, and for the server.

Each `..._problem` answers with what is wrong, as the rest of a sentence that begins with the value's name, or None. Each
`fitting_...` gives the value as it can be kept: for what nobody is there to correct, an old spool or a framework's own
settings.
"""

from __future__ import annotations

import unicodedata
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
MAX_SCHEMAS: Final = 10_000
"""Most schemas of one source: a schema per step means that a changing name was used as a metric name."""
HISTOGRAM_BINS: Final = 256
"""Bins of log2 magnitude in a histogram of a gradient."""
LEFT_OUT: Final = "gradiometer: left out"
"""Key of a cut configuration that names what is missing from it."""
_NOTE_BYTES: Final = 8 * 1024
_NAMED_KEYS: Final = 20


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
    try:
        notes.encode()
    except UnicodeEncodeError as error:
        return (
            f"holds U+{ord(notes[error.start]):04X} at character {error.start + 1}, which is half a character"
        )
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


def fitting_label(text: str) -> str:
    """One printable line; empty if nothing is left of it."""
    if label_problem(text) is None:
        return text
    printable = (" " if unicodedata.category(char) in ("Cc", "Cs") else char for char in text)
    return fitting_text("".join(printable).strip(), MAX_LABEL_CHARS)


def fitting_text(text: str, max_chars: int) -> str:
    """The beginning of a text."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def fitting_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """As many of the first keys as fit, and under `LEFT_OUT` which ones do not."""
    if config_problem(config) is None:
        return dict(config)
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    room_bytes = MAX_CONFIG_BYTES - _NOTE_BYTES
    for key, value in config.items():
        fits = isinstance(key, str) and structure_problem(value, depth=1) is None
        num_bytes = len(msgspec.msgpack.encode({key: value})) if fits else 0
        if fits and num_bytes <= room_bytes:
            kept[key] = value
            room_bytes -= num_bytes
        else:
            left_out.append(fitting_text(str(key), 100))
    named = left_out[:_NAMED_KEYS]
    more = len(left_out) - len(named)
    return {**kept, LEFT_OUT: [*named, f"and {more} more"] if more else named}
