"""Makes what users hand over harmless: any object as text, any config as numbers, text, lists and dicts. Never raises."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any, Final

_MAX_DEPTH: Final = 16
_MAX_SHOWN_CHARS: Final = 1000


def encodable(text: str) -> str:
    """`text` with what UTF-8 cannot carry (lone surrogates, as in badly decoded file names) replaced by "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


def text_of(value: object) -> str:
    """`str(value)`, or its type's name where that fails."""
    try:
        return encodable(str(value))
    except Exception:  # noqa: BLE001  a user's __str__ may fail in any way, and the training must go on
        return f"<{type(value).__name__}>"


def shown(value: object) -> str:
    """`repr(value)`, cut to 1,000 characters, or its type's name where that fails."""
    try:
        return encodable(repr(value)[:_MAX_SHOWN_CHARS])
    except Exception:  # noqa: BLE001  as above, of __repr__
        return f"<{type(value).__name__}>"


def fields_of(value: object) -> Mapping[Any, Any] | None:
    """What a config object holds, by name: a mapping, a dataclass, a Namespace; None if it is none of these."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        # Not `vars`: with slots=True there is none. A field may be without a value.
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None


def plain(value: object, outer: tuple[int, ...] = ()) -> Any:
    """`value` as numbers, text, lists and dicts, for a run's config; what is neither becomes its `repr`."""
    try:
        return _plain(value, outer)
    except Exception:  # noqa: BLE001  a user's own number or mapping may fail in any way
        return shown(value)


def _plain(value: object, outer: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if abs(number) < 2**63 else str(number)
    if isinstance(value, numbers.Real):
        return _plain_float(float(value))
    # Something that holds itself is shown, not followed: with two such places the walk would double at each level.
    if len(outer) >= _MAX_DEPTH or id(value) in outer:
        return shown(value)
    outer = (*outer, id(value))
    if isinstance(value, Mapping):
        return {text_of(key): plain(item, outer) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, outer) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(fields_of(value), outer)
    return shown(value)


def _plain_float(number: float) -> float | str:
    # JSON has no NaN and no infinity; the spool's files are JSON. The server answers with the same three words.
    if number - number == 0.0:
        return number
    return "NaN" if number != number else "Infinity" if number > 0 else "-Infinity"
