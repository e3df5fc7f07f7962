"""Checks single arguments of `init`: each gives the value to use, or a `ValueError` that names it and the remedy."""

from __future__ import annotations

import operator
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from gradiometer import address, limits, wire
from gradiometer.plain import encodable, fields_of, plain, shown

_FLAGS: Final = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def text(what: str, value: object) -> str:
    """A text that UTF-8 can carry."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is a {type(value).__name__}: pass a string.")
    if encodable(value) != value:
        raise ValueError(f"{what} {value[:40]!r} holds characters that UTF-8 cannot carry: leave them out.")
    return value


def run_id(value: object) -> str:
    """A run id."""
    return _label(
        "run_id", value, limits.run_id_problem(text("run_id", value)), "Choose a short printable id."
    )


def project(value: object) -> str:
    """A project."""
    problem = limits.label_problem(text("project", value), limits.MAX_ID_CHARS)
    return _label("project", value, problem, "Choose a short printable name.")


def label(what: str, value: object) -> str | None:
    """One printable line, such as a run's name; None for None."""
    if value is None:
        return None
    problem = limits.label_problem(text(what, value))
    return _label(
        what, value, problem, f"Pass one printable line of at most {limits.MAX_LABEL_CHARS} characters."
    )


def _label(what: str, value: object, problem: str | None, remedy: str) -> str:
    if problem is not None:
        raise ValueError(f"{what} {str(value)[:40]!r} cannot be used: {problem}. {remedy}")
    return cast(str, value)


def notes(value: object) -> str:
    """Text of any number of lines; None is none."""
    if value is None:
        return ""
    problem = limits.notes_problem(text("notes", value))
    if problem is not None:
        raise ValueError(f"notes {problem}: keep the rest in a file of your own.")
    return cast(str, value)


def tags(value: object) -> tuple[str, ...]:
    """Labels; None is none."""
    if value is None:
        return ()
    given = None if isinstance(value, (str, bytes, Mapping)) else _items(value)
    found = tuple(tag for tag in given or () if isinstance(tag, str))
    if given is None or len(found) < len(given):
        raise ValueError(f"tags {shown(value)[:80]} is not a list of strings: pass tags=['a', 'b'].")
    if len(found) > limits.MAX_TAGS:
        raise ValueError(f"tags holds {len(found)} tags; at most {limits.MAX_TAGS} are allowed: use fewer.")
    for place, tag in enumerate(found):
        label(f"tags[{place}]", tag)
    return found


def _items(value: Any) -> tuple[object, ...] | None:
    try:
        return tuple(value)
    except Exception:  # noqa: BLE001  no list, or a user's own iterator, which may raise anything
        return None


def config(value: object) -> dict[str, Any]:
    """Hyperparameters as numbers, text, lists and dicts; None is none."""
    if value is None:
        return {}
    fields = fields_of(value)
    if fields is None:
        raise ValueError(
            f"config is a {type(value).__name__}: pass a dict, a dataclass or an argparse.Namespace."
        )
    found = plain(fields)
    if not isinstance(found, dict):
        raise ValueError(f"config is a {type(value).__name__} that cannot be read: pass a dict.")
    problem = limits.config_problem(found)
    if problem is not None:
        raise ValueError(f"config {problem}: keep data out of it, e.g. name the file that holds them.")
    return found


def url(value: object) -> str:
    """The address of a server, without a slash at the end."""
    if isinstance(value, str) and encodable(value) != value:
        raise ValueError(
            f"url {address.shown(value)!a} holds characters that UTF-8 cannot carry: leave them out."
        )
    found = text("url", value).strip().rstrip("/")
    address.refuse_credentials(found)
    try:
        parts = urllib.parse.urlsplit(found)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # urlsplit leaves out line breaks in silence; the address of a server has no query.
        valid = valid and found.isprintable() and not set(" ?#").intersection(found)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(
            f"url {address.shown(found)!r} is not the address of a server: give something like "
            f"{address.DEFAULT_URL} (argument `url` or GRADIOMETER_URL)."
        )
    return found


def folder(what: str, value: object, variable: str) -> Path:
    """Path of a folder, which need not exist."""
    remedy = f"pass a path, or set {variable}."
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"{what} {shown(value)[:80]} is not a folder: {remedy}")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{what} {path[:80]!r} is not a folder ({error}): {remedy}") from error


def step(what: str, value: object) -> int:
    """A step: any integer in range, of numpy's and torch's too, but no bool."""
    remedy = "pass the number of optimizer steps that the checkpoint has completed."
    try:
        number = operator.index(cast(Any, value))
    except Exception:  # noqa: BLE001  a user's own __index__ may raise anything, and says the same thing by it
        number = -1
    if isinstance(value, bool) or not 0 <= number <= wire.MAX_STEP:
        raise ValueError(f"{what} {shown(value)[:80]} is not a step: {remedy}")
    return number


def flag_or_folder(what: str, value: object, variable: str) -> bool | Path:
    """On, off, or the path of a folder."""
    if isinstance(value, str):
        value = _FLAGS.get(value.lower(), value)
    return value if isinstance(value, bool) else folder(what, value, variable)
