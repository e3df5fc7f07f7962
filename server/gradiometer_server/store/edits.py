"""What people change about a run, and how that and the words of its agents become one description.

Agents repeat their description with every connection. So an edit remembers what of it was replaced: the same words again
change nothing, a new value (a resumed run with another learning rate) does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Row

from gradiometer.wire import RunInfo, limits
from gradiometer_server.errors import InvalidRequest
from gradiometer_server.store.run_rows import get_run
from gradiometer_server.store.run_writes import lock_run, search_text, update_run
from gradiometer_server.store.values import clean_text, dump_json, load_json

_MAX_REPLACED: Final = 8
"""Most replaced values that are remembered of one key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEdit:
    """Changes to a run; None leaves a field alone, and an empty group is none.

    Attributes:
        tags: all of them, replacing those that are there.
        config: merged by key at the top level.
        removed_config: keys at the top level.
    """

    name: str | None = None
    tags: Sequence[str] | None = None
    notes: str | None = None
    group: str | None = None
    config: Mapping[str, Any] | None = None
    removed_config: Sequence[str] = ()


class Edited(msgspec.Struct, kw_only=True):
    """What was edited so far.

    Attributes:
        config: key -> the values that edits replaced, which agents may go on to say.
        tags: of the agents, taken away.
        notes, group: whether they are a person's now.
    """

    config: dict[str, list[Any]] = {}
    tags: list[str] = []
    notes: bool = False
    group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What describes a run and may change."""

    name: str
    config: dict[str, Any]
    tags: list[str]
    notes: str
    group: str | None


def described(row: Row[Any]) -> Description:
    """The description in a row of table `run`."""
    return Description(
        name=row.name, config=load_json(row.config), tags=load_json(row.tags), notes=row.notes, group=row.group_name
    )  # fmt: skip


def edited_of(row: Row[Any]) -> Edited:
    """What was edited of the run in a row of table `run`."""
    return Edited() if row.edited is None else msgspec.convert(load_json(row.edited), Edited)


def merge_hello(now: Description, edited: Edited, info: RunInfo) -> Description:
    """The description after an agent told its own: config by key (newer words win), tags as a union.

    Name, notes and group stay as first said, and what was edited stays as it is unless the agent says something new.
    """
    told = {key: value for key, value in info.config.items() if not _is_replaced(edited, key, value)}
    new_tags = [tag for tag in info.tags if tag not in edited.tags]
    group = None if info.group is None else clean_text(info.group)
    return Description(
        name=now.name,
        config={**now.config, **told},
        tags=list(dict.fromkeys([*now.tags, *new_tags])),
        notes=now.notes if edited.notes else now.notes or clean_text(info.notes),
        group=now.group if edited.group else now.group or group,
    )


def _is_replaced(edited: Edited, key: str, value: object) -> bool:
    # As text: NaN equals itself there, and a list a tuple.
    text = dump_json(value)
    return any(dump_json(replaced) == text for replaced in edited.config.get(key, ()))


def edit_run(conn: Connection, run_id: str, edit: RunEdit, now_s: float) -> None:
    """Change the description of a run.

    Raises:
        NotFound: no such run.
        InvalidRequest: a value that cannot be kept; `field` names it.
    """
    _check(edit)
    row = lock_run(conn, get_run(conn, run_id, now_s).run_key)
    before, edited = described(row), edited_of(row)
    after = _applied(before, edit)
    _check_config(after.config)
    store_description(conn, row, after, edited=_remembered(edited, before, after, edit))


def _check(edit: RunEdit) -> None:
    for field, text in (("name", edit.name), ("group", edit.group or None)):
        if text is not None:
            _refuse(field, limits.label_problem(text))
    if edit.notes is not None:
        _refuse("notes", limits.notes_problem(edit.notes))
    tags = edit.tags or ()
    if len(tags) > limits.MAX_TAGS:
        _refuse("tags", f"there are {len(tags)}; at most {limits.MAX_TAGS} are allowed")
    for place, tag in enumerate(tags):
        _refuse(f"tags.{place}", limits.label_problem(tag))


def _check_config(config: Mapping[str, Any]) -> None:
    try:
        problem = limits.config_problem(config)
    except OverflowError:
        problem = "holds a whole number of more than 64 bits"
    except (UnicodeError, RecursionError):
        problem = "holds text that is not Unicode, or is nested too deeply"
    _refuse("config", problem)


def _refuse(field: str, problem: str | None) -> None:
    if problem is not None:
        raise InvalidRequest(
            f"{field} cannot be set so: {problem}.",
            field=f"body.{field}",
            remedy="Names, groups and tags are one printable line of at most 500 characters; see docs/operations.md.",
        )


def _applied(now: Description, edit: RunEdit) -> Description:
    unknown = sorted(set(edit.removed_config) - set(now.config))
    if unknown:
        raise InvalidRequest(
            f"the config has no key {unknown[0]!r:.100} to remove.", field="body.remove_config_keys",
            remedy="Name keys at the top level of the config as it is now.",
        )  # fmt: skip
    config = {key: value for key, value in now.config.items() if key not in edit.removed_config}
    return Description(
        name=now.name if edit.name is None else edit.name,
        config={**config, **(edit.config or {})},
        tags=now.tags if edit.tags is None else list(dict.fromkeys(edit.tags)),
        notes=now.notes if edit.notes is None else clean_text(edit.notes),
        group=now.group if edit.group is None else edit.group or None,
    )


def _remembered(edited: Edited, before: Description, after: Description, edit: RunEdit) -> Edited:
    config = dict(edited.config)
    for key in [*(edit.config or {}), *edit.removed_config]:
        if key in before.config:
            config[key] = [*config.get(key, ()), before.config[key]][-_MAX_REPLACED:]
    gone = [tag for tag in [*edited.tags, *before.tags] if tag not in after.tags]
    return Edited(
        config=config,
        tags=list(dict.fromkeys(gone)),
        notes=edited.notes or edit.notes is not None,
        group=edited.group or edit.group is not None,
    )


def store_description(
    conn: Connection, row: Row[Any], after: Description, *, edited: Edited | None = None
) -> None:
    """Write what differs from the row, and the text that searches look through."""
    columns: dict[str, object] = {
        "name": after.name, "config": dump_json(after.config), "tags": dump_json(after.tags), "notes": after.notes,
        "group_name": after.group,
    }  # fmt: skip
    if edited is not None:
        columns["edited"] = dump_json(msgspec.to_builtins(edited))
    if all(row._mapping[name] == value for name, value in columns.items()):
        return
    search = search_text(row.public_id, after.name, after.tags, after.group, after.notes)
    update_run(conn, row.run_id, search=search, **columns)
