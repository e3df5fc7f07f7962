"""Episodes and the state of rules. An episode is JSON in one column, beside the columns that lists are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from sqlalchemy import Connection, Row, and_, bindparam, or_, select

from gradiometer_server.domain.alerts import Episode, EpisodeState
from gradiometer_server.errors import InvalidRequest, NotFound
from gradiometer_server.store.statements import insert_or_update
from gradiometer_server.store.tables import alert, rule_state, run
from gradiometer_server.store.values import dump_json, load_json, read_key

MAX_PAGE: Final = 500

RuleKey = tuple[str, str]
"""(rule, key)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """An episode with the run that it belongs to."""

    run_key: int
    run_id: str
    episode: Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePage:
    """Episodes, latest opened first, and where the next page starts (None: there is none)."""

    episodes: tuple[EpisodeRow, ...]
    next_cursor: str | None


_CHANGING = ("attempt", "rule", "state", "severity", "opened_s", "first_step", "episode")
_UPSERT = insert_or_update(alert, _CHANGING)
_ONE = select(alert.c.episode).where(
    alert.c.run_id == bindparam("of_run"), alert.c.alert_id == bindparam("of_alert")
)
_OPEN = (
    select(alert.c.episode)
    .where(alert.c.run_id == bindparam("of_run"), alert.c.state == EpisodeState.FIRING.value)
    .order_by(alert.c.opened_s, alert.c.alert_id)
)
_UPSERT_RULE_STATE = insert_or_update(rule_state, ("state",))
_DELETE_RULE_STATE = rule_state.delete().where(
    rule_state.c.run_id == bindparam("run_id_"),
    rule_state.c.rule == bindparam("rule_"),
    rule_state.c.key == bindparam("key_"),
)
_RULE_STATES = select(rule_state).where(rule_state.c.run_id == bindparam("of_run"))


def encode_episode(episode: Episode) -> str:
    """JSON text of an episode; NaN and infinities are kept."""
    return dump_json(msgspec.to_builtins(episode, enc_hook=_plain))


def _plain(value: Any) -> Any:
    """A numpy number, which rules may well put into a breach, as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"an episode cannot hold a {type(value).__name__}")


def decode_episode(text: str) -> Episode:
    """Inverse of `encode_episode`."""
    return msgspec.convert(load_json(text), Episode)


def upsert_episode(conn: Connection, run_key: int, episode: Episode) -> None:
    """Write an episode as it now stands; the same `alert_id` replaces the earlier state."""
    columns = {
        "run_id": run_key, "alert_id": episode.alert_id, "attempt": episode.attempt, "rule": episode.first.rule,
        "state": episode.state.value, "severity": episode.severity.value, "opened_s": episode.opened_s,
        "first_step": episode.first.step, "episode": encode_episode(episode),
    }  # fmt: skip
    conn.execute(_UPSERT.on(conn), columns)


def get_episode(conn: Connection, run_key: int, alert_id: str) -> Episode:
    """One episode. Raises `NotFound`."""
    text = conn.execute(_ONE, {"of_run": run_key, "of_alert": alert_id}).scalar()
    if text is None:
        raise NotFound("alert", alert_id)
    return decode_episode(text)


def open_episodes(conn: Connection, run_key: int) -> list[Episode]:
    """Episodes of a run that are firing, oldest first."""
    return [decode_episode(text) for text in conn.execute(_OPEN, {"of_run": run_key}).scalars()]


def list_episodes(
    conn: Connection,
    run_key: int | None = None,
    state: EpisodeState | str | None = None,
    limit: int = 100,
    cursor: str | None = None,
) -> EpisodePage:
    """Episodes of one run or of all (None), latest opened first.

    Raises:
        InvalidRequest: an unknown state, a limit outside 1..500, or a cursor that no page gave out.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit is {limit}; it must be from 1 to {MAX_PAGE}.", field="limit")
    order = (alert.c.opened_s.desc(), alert.c.run_id.desc(), alert.c.alert_id.desc())
    statement = select(alert, run.c.public_id).join(run, run.c.run_id == alert.c.run_id).order_by(*order)
    if run_key is not None:
        statement = statement.where(alert.c.run_id == run_key)
    if state is not None:
        statement = statement.where(alert.c.state == _state(state).value)
    if cursor is not None:
        statement = statement.where(_after(cursor))
    found = conn.execute(statement.limit(limit + 1)).all()
    next_cursor = _cursor(found[limit - 1]) if len(found) > limit else None
    rows = tuple(
        EpisodeRow(run_key=row.run_id, run_id=row.public_id, episode=decode_episode(row.episode))
        for row in found[:limit]
    )
    return EpisodePage(episodes=rows, next_cursor=next_cursor)


def _state(state: str) -> EpisodeState:
    try:
        return EpisodeState(state)
    except ValueError as error:
        known = ", ".join(EpisodeState)
        raise InvalidRequest(
            f"no alert state is named {state!r}.", field="state", remedy=f"Use one of {known}."
        ) from error


def _cursor(row: Row[Any]) -> str:
    return f"{row.opened_s!r}_{row.run_id}_{row.alert_id}"


def _after(cursor: str) -> Any:
    try:
        opened_text, key_text, alert_id = cursor.split("_", 2)
        opened_s, key = float(opened_text), read_key(key_text)
    except ValueError as error:
        raise InvalidRequest(
            f"the cursor {cursor[:50]!r} was not given out by this server.",
            field="cursor",
            remedy="Ask for the first page without a cursor.",
        ) from error
    same_time, same_run = alert.c.opened_s == opened_s, alert.c.run_id == key
    return or_(
        alert.c.opened_s < opened_s,
        and_(same_time, alert.c.run_id < key),
        and_(same_time, same_run, alert.c.alert_id < alert_id),
    )


def load_rule_states(conn: Connection, run_key: int) -> dict[RuleKey, Any]:
    """State of every rule of a run, as it was given to `chunks.commit_flush`."""
    return {
        (row.rule, row.key): load_json(row.state) for row in conn.execute(_RULE_STATES, {"of_run": run_key})
    }


def save_rule_states(conn: Connection, run_key: int, states: Mapping[RuleKey, Any]) -> None:
    """Write states that JSON can hold (NaN allowed); None removes one."""
    kept = [
        {"run_id": run_key, "rule": rule, "key": key, "state": dump_json(state)}
        for (rule, key), state in states.items()
        if state is not None
    ]
    gone = [
        {"run_id_": run_key, "rule_": rule, "key_": key}
        for (rule, key), state in states.items()
        if state is None
    ]
    if kept:
        conn.execute(_UPSERT_RULE_STATE.on(conn), kept)
    if gone:
        conn.execute(_DELETE_RULE_STATE, gone)
