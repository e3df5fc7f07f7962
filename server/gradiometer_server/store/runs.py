"""Writing runs and sources: hello, heartbeat, exit, counters. Reading is in `run_rows`, offered here as well.

Every writer first locks the run's row (`run_writes`). What people change about a run is in `edits`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, func, select, update

from gradiometer.wire import MAX_NAME_CHARS, MAX_STEP, RunInfo, SourceInfo
from gradiometer_server.domain.names import run_key as key_of
from gradiometer_server.errors import ProtocolError
from gradiometer_server.store import edits
from gradiometer_server.store.run_rows import (
    LOST_AFTER_S,
    RunPage,
    RunRow,
    SourceRow,
    State,
    get_run,
    get_run_by_key,
    get_source,
    list_projects,
    list_runs,
    list_sources,
    source_from,
)
from gradiometer_server.store.run_writes import UPDATE_RUN as _UPDATE_RUN
from gradiometer_server.store.run_writes import lock_run, search_text, update_run
from gradiometer_server.store.statements import insert_or_ignore
from gradiometer_server.store.tables import run, source
from gradiometer_server.store.values import clean_text, dump_json, load_json

__all__ = [
    "LOST_AFTER_S", "RunPage", "RunRow", "SourceRow", "State", "add_unavailable", "count_rejected", "ensure_run",
    "ensure_source", "get_run", "get_run_by_key", "get_source", "heartbeat", "list_projects", "list_runs", "list_sources",
    "lock_run", "set_exit", "update_run",
]  # fmt: skip

_MAX_TEXT_CHARS: Final = 10_000
"""Longest text kept of an exit or a reason: they are read with every row of the runs list."""
_MAX_SIGNAL_CHARS: Final = 64
_MAX_UNAVAILABLE: Final = 1000
"""Most metrics that a run remembers as unavailable."""
_MAX_FACTS = 256
"""Most entries of a source's environment."""
_INSERT_RUN = insert_or_ignore(run)
_SOURCE = select(source).where(
    source.c.run_id == bindparam("of_run"),
    source.c.attempt == bindparam("launch"),
    source.c.rank == bindparam("of_rank"),
)
_LAUNCHES = (
    select(source.c.attempt, source.c.ordinal).where(source.c.run_id == bindparam("of_run")).distinct()
)
_LAUNCH_SIZES = (
    select(
        source.c.attempt,
        func.count().label("num_ranks"),
        func.max(source.c.world_size).label("world_size"),
    )
    .where(source.c.run_id == bindparam("of_run"))
    .group_by(source.c.attempt)
)
_EXITS = (
    select(source.c.exit, source.c.exit_s)
    .where(
        source.c.run_id == bindparam("of_run"),
        source.c.attempt == bindparam("launch"),
        source.c.exit.is_not(None),
    )
    .order_by(source.c.rank)
)
_UPDATE_SOURCE = update(source).where(
    source.c.run_id == bindparam("of_run"), source.c.source_id == bindparam("of_source")
)
_ENVIRONMENT = select(source.c.environment).where(
    source.c.run_id == bindparam("of_run"), source.c.source_id == bindparam("of_source")
)
_DROPPED = _UPDATE_SOURCE.where(source.c.dropped_reports < bindparam("dropped")).values(
    dropped_reports=bindparam("dropped")
)
_HEARTBEAT = _UPDATE_RUN.where(run.c.heartbeat_s < bindparam("now_s")).values(
    heartbeat_s=bindparam("now_s"), updated_s=bindparam("now_s")
)


def ensure_run(conn: Connection, info: RunInfo, now_s: float) -> RunRow:
    """Create the run, or merge what this hello says into it: config by key (the newer value wins), tags as a union.

    Name, notes, group and creation time stay as first said, and what people edited stays theirs (`edits`). Counts as
    a sign of life.

    Raises:
        ProtocolError: `run_in_other_project`; `run_id_collision`; `bad_value`.
    """
    key = key_of(info.run_id)
    conn.execute(_INSERT_RUN.on(conn), _new_run(info, key, now_s))
    row = lock_run(conn, key)
    _check_identity(row, info)
    merged = edits.merge_hello(edits.described(row), edits.edited_of(row), info)
    edits.store_description(conn, row, merged)
    _touch(conn, key, now_s)
    return get_run_by_key(conn, key, now_s)


def _new_run(info: RunInfo, key: int, now_s: float) -> dict[str, object]:
    created_s = info.created_s if math.isfinite(info.created_s) else now_s
    name, notes, group = clean_text(info.name), clean_text(info.notes), _clean(info.group)
    return {
        "run_id": key, "public_id": clean_text(info.run_id), "project": clean_text(info.project), "name": name,
        "config": dump_json(dict(info.config)), "tags": dump_json(list(info.tags)), "notes": notes, "group_name": group,
        "search": search_text(info.run_id, name, list(info.tags), group, notes), "created_s": created_s,
        "heartbeat_s": now_s, "updated_s": now_s, "outcome": "open", "attempts": 0, "world_size": 0, "unavailable": "{}",
        "rejected_records": 0, "next_source_id": 1, "next_series_id": 1, "next_layout_id": 1,
    }  # fmt: skip


def _check_identity(row: Row[Any], info: RunInfo) -> None:
    if row.public_id != info.run_id:
        raise ProtocolError(
            f"run id {info.run_id!r} has the same storage key as {row.public_id!r}.",
            code="run_id_collision",
            remedy="Choose another run id.",
            fatal=True,
        )
    if row.project != info.project:
        raise ProtocolError(
            f"run {info.run_id!r} belongs to project {row.project!r}, not to {info.project!r}.",
            code="run_in_other_project",
            remedy="Use that project's name, or another run id.",
            fatal=True,
        )


def _clean(text: str | None) -> str | None:
    return None if text is None else clean_text(text)


def ensure_source(conn: Connection, run_key: int, info: SourceInfo, now_s: float) -> SourceRow:
    """Register a rank of an attempt, or find it again. A known source stays as it was first described.

    Raises:
        NotFound: `ensure_run` was not called.
        ProtocolError: `bad_source`: a number that is negative or beyond 2**53; `second_writer`: another process has
            said hello as this rank of this attempt before. Both number their records from 1, so one's would be taken
            for repetitions of the other's.
    """
    row = lock_run(conn, run_key)
    find = {"of_run": run_key, "launch": info.attempt, "of_rank": info.rank}
    _check_numbers(info)
    known = conn.execute(_SOURCE, find).one_or_none()
    if known is not None:
        _check_writer(known, info, row.public_id)
    else:
        # Of launches, not of sources: a thousand ranks say hello at the same time.
        ordinals = {one.attempt: one.ordinal for one in conn.execute(_LAUNCHES, {"of_run": run_key})}
        ordinal = ordinals.get(info.attempt, max(ordinals.values(), default=0) + 1)
        conn.execute(source.insert(), _new_source(info, run_key, row.next_source_id, ordinal))
        update_run(conn, run_key, next_source_id=row.next_source_id + 1)
        _refresh_outcome(conn, run_key)
    _touch(conn, run_key, now_s)
    return source_from(conn.execute(_SOURCE, find).one())


def _check_numbers(info: SourceInfo) -> None:
    for name in ("rank", "attempt", "world_size", "local_rank", "pid", "start_step"):
        value = getattr(info, name)
        if not 0 <= value <= MAX_STEP:
            raise ProtocolError(
                f"the source of rank {info.rank} has {name} {value}; it must be from 0 to {MAX_STEP}.",
                code="bad_source",
                fatal=True,
            )


def _check_writer(known: Row[Any], info: SourceInfo, run_id: str) -> None:
    """An uplink says what stands in the spool, so the writer is the same whoever delivers, and whenever."""
    theirs, ours = (
        (known.host, known.pid, known.started_s),
        (clean_text(info.host), info.pid, _started_s(info)),
    )
    if theirs == ours:
        return
    raise ProtocolError(
        f"run {run_id!r}, attempt {info.attempt}, rank {info.rank} is written by two processes: {_writer(*theirs)} said "
        f"hello first, now {_writer(*ours)} does. Its records are not taken.",
        code="second_writer",
        remedy="Give each process a rank of its own (RANK and WORLD_SIZE), or start this one with another "
        "GRADIOMETER_ATTEMPT (or none) or another run id. Its spool is kept.",
        fatal=True,
    )


def _writer(host: str, pid: int, started_s: float) -> str:
    return f"process {pid} on {host or 'a host without a name'} (run opened at {started_s:.3f})"


def _started_s(info: SourceInfo) -> float:
    return info.started_s if math.isfinite(info.started_s) else 0.0


def _new_source(info: SourceInfo, run_key: int, source_id: int, ordinal: int) -> dict[str, object]:
    return {
        "run_id": run_key, "source_id": source_id, "rank": info.rank, "attempt": info.attempt, "ordinal": ordinal,
        "world_size": info.world_size, "local_rank": info.local_rank, "host": clean_text(info.host), "pid": info.pid,
        "started_s": _started_s(info), "start_step": info.start_step,
        "environment": dump_json(dict(info.environment)), "acked_seq": 0, "folded_seq": 0, "dropped_reports": 0, "closed": False,
    }  # fmt: skip


def heartbeat(conn: Connection, run_key: int, now_s: float, dropped: Mapping[int, int] | None = None) -> None:
    """A sign of life; `dropped`: reports that the agent had to discard so far, by source id."""
    _touch(conn, run_key, now_s)
    if dropped:
        rows = [{"of_run": run_key, "of_source": key, "dropped": count} for key, count in dropped.items()]
        conn.execute(_DROPPED, rows)


def _touch(conn: Connection, run_key: int, now_s: float) -> None:
    conn.execute(_HEARTBEAT, {"of_run": run_key, "now_s": now_s})


def set_exit(
    conn: Connection,
    run_key: int,
    source_id: int,
    exit: Mapping[str, Any],
    now_s: float,
    *,
    exception: str | None = None,
) -> None:
    """How a source ended: `code`, `signal`, `reason`, `inferred`. Repeating it changes nothing; closes the source.

    Args:
        exception: the exception that ended it, as "Type: message".
    """
    lock_run(conn, run_key)
    signal = exit.get("signal")
    kept = {
        "code": exit.get("code"),
        "signal": None if signal is None else str(signal)[:_MAX_SIGNAL_CHARS],
        "reason": str(exit.get("reason") or "")[:_MAX_TEXT_CHARS],
        "inferred": bool(exit.get("inferred")),
        "exception": None if exception is None else exception[:_MAX_TEXT_CHARS],
    }
    open_source = _UPDATE_SOURCE.where(source.c.closed.is_(False))
    conn.execute(
        open_source.values(closed=True, exit=dump_json(kept), exit_s=now_s),
        {"of_run": run_key, "of_source": source_id},
    )
    update_run(conn, run_key, updated_s=now_s)
    _refresh_outcome(conn, run_key)


def outcome_of(exit: Mapping[str, Any]) -> str:
    """finished, failed or crashed. A process that vanished without a code or signal that anyone saw has crashed."""
    if exit["signal"]:
        return "crashed"
    if exit["code"] is None:
        return "crashed" if exit["inferred"] else "finished"
    return "finished" if exit["code"] == 0 else "failed"


def _refresh_outcome(conn: Connection, run_key: int) -> None:
    # The latest attempt decides; among its ranks crashed > failed > open > finished. Only what the answer needs is
    # read: a thousand ranks come and go at the same time.
    launches = conn.execute(_LAUNCH_SIZES, {"of_run": run_key}).all()
    latest = max(launches, key=lambda row: row.attempt)
    ranks = conn.execute(_EXITS, {"of_run": run_key, "launch": latest.attempt}).all()
    exits = [(load_json(row.exit), row.exit_s or 0.0) for row in ranks]
    ended = {outcome_of(exit): exit for exit, _ in reversed(exits)}
    is_open = latest.num_ranks > len(exits)
    outcome = next(
        (kind for kind in ("crashed", "failed") if kind in ended), "open" if is_open else "finished"
    )
    last = ended.get(outcome)
    update_run(
        conn,
        run_key,
        outcome=outcome,
        exit=None if last is None else dump_json(last),
        finished_s=None if last is None else max(exit_s for _, exit_s in exits),
        attempts=len(launches),
        world_size=latest.world_size,
    )


def add_unavailable(conn: Connection, run_key: int, metric: str, reason: str) -> None:
    """Note that the agent cannot collect a metric, and why."""
    row = lock_run(conn, run_key)
    known = load_json(row.unavailable)
    name = metric[:MAX_NAME_CHARS]
    if name in known or len(known) < _MAX_UNAVAILABLE:
        update_run(conn, run_key, unavailable=dump_json({**known, name: reason[:_MAX_TEXT_CHARS]}))


def add_environment(conn: Connection, run_key: int, source_id: int, facts: Mapping[str, object]) -> None:
    """Add what an agent learned of its process after its hello to the source's environment; newer words win."""
    lock_run(conn, run_key)
    find = {"of_run": run_key, "of_source": source_id}
    known = load_json(conn.execute(_ENVIRONMENT, find).scalar_one())
    new = {name[:MAX_NAME_CHARS]: str(text)[:_MAX_TEXT_CHARS] for name, text in facts.items()}
    joined = dict(list({**known, **new}.items())[:_MAX_FACTS])
    conn.execute(_UPDATE_SOURCE.values(environment=dump_json(joined)), find)


def count_rejected(conn: Connection, run_key: int, n: int, last_reason: str) -> None:
    """Add to the run's count of refused records and keep the last reason."""
    statement = _UPDATE_RUN.values(
        rejected_records=run.c.rejected_records + bindparam("more"), last_rejection=bindparam("reason")
    )
    conn.execute(
        statement, {"of_run": run_key, "more": n, "reason": clean_text(last_reason)[:_MAX_TEXT_CHARS]}
    )
