"""Giving up what costs most of old runs, in short transactions: single ranks' details, and raw points.

A thinned chunk keeps its summary: every extreme and every count of values that are not finite survives, in windows of
about 64 points. `data` is empty then; `run.thinned_s` says when the last chunk of a run was thinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, null, select, tuple_, update

from gradiometer_server.store.database import Database
from gradiometer_server.store.run_rows import LOST_AFTER_S
from gradiometer_server.store.run_writes import lock_run, update_run
from gradiometer_server.store.tables import chunk, detail, run, source

BATCH_ROWS: Final = 256
BATCH_BYTES: Final = 1024 * 1024
"""Most in one transaction (at least one row), which holds SQLite's only write lock."""
OPEN_GRACE_S: Final = 24 * 3600.0
"""A run that did not end but fell silent is left alone for so long: it may come back."""

Place = tuple[int, int]
"""(series id, first step) of a chunk."""

_IS_QUIET = select(run.c.outcome, run.c.heartbeat_s).where(run.c.run_id == bindparam("of_run"))
_UNFOLDED = (
    select(source.c.source_id)
    .where(source.c.run_id == bindparam("of_run"), source.c.acked_seq > source.c.folded_seq)
    .limit(1)
)
_CHUNK_KEY = tuple_(chunk.c.series_id, chunk.c.step0)
_RAW = (
    select(chunk.c.series_id, chunk.c.step0, (func.length(chunk.c.data) + func.coalesce(func.length(chunk.c.steps), 0)).label("size"))
    .where(
        chunk.c.run_id == bindparam("of_run"),
        _CHUNK_KEY > tuple_(bindparam("after_series"), bindparam("after_step")),  # noqa: SIM300
        func.length(chunk.c.data) > 0,
    )
    .order_by(chunk.c.series_id, chunk.c.step0)
    .limit(BATCH_ROWS)
)  # fmt: skip
_EMPTY = (
    update(chunk)
    .where(
        chunk.c.run_id == bindparam("of_run"),
        chunk.c.series_id == bindparam("of_series"),
        chunk.c.step0 == bindparam("begin"),
    )
    .values(data=b"", steps=null())
)
_DETAILS = (
    select(detail.c.source_id, detail.c.seq, func.length(detail.c.data).label("size"))
    .where(detail.c.run_id == bindparam("of_run"))
    .order_by(detail.c.source_id, detail.c.seq)
    .limit(BATCH_ROWS)
)
_DELETE_DETAIL = detail.delete().where(
    detail.c.run_id == bindparam("of_run"),
    detail.c.source_id == bindparam("of_source"),
    detail.c.seq == bindparam("of_seq"),
)


def is_quiet(conn: Connection, run_key: int, now_s: float, since_s: float = 0.0) -> bool:
    """Whether nothing more is to be expected of a run: it says nothing, has ended, and all of it is folded.

    Args:
        since_s: when somebody began to listen. That a run without an end says nothing is only known from then on: its
            agents may have trained on for weeks while the server was away.
    """
    row = conn.execute(_IS_QUIET, {"of_run": run_key}).one_or_none()
    if row is None:
        return False
    if now_s - row.heartbeat_s < LOST_AFTER_S:
        return False
    if row.outcome == "open" and now_s - max(row.heartbeat_s, since_s) < OPEN_GRACE_S:
        return False
    return conn.execute(_UNFOLDED, {"of_run": run_key}).first() is None


def first_rows(rows: Sequence[Any], limit_bytes: int = BATCH_BYTES) -> Sequence[Any]:
    """The first of the rows, by their `size`, that one transaction may touch; at least one, if there is any."""
    total = 0
    for place, row in enumerate(rows):
        total += row.size
        if place and total > limit_bytes:
            return rows[:place]
    return rows


def thin_batch(
    database: Database, run_key: int, after: Place, now_s: float, since_s: float = 0.0
) -> tuple[Place | None, int]:
    """Empty some chunks after `after`, in order of series and step, if the run is still quiet.

    Returns the last one's place (None: there are no more, or the run has come back) and the bytes given up.
    Raises `StoreUnavailable`.
    """
    with database.write() as conn:
        if not is_quiet(conn, run_key, now_s, since_s):
            return None, 0
        find = {"of_run": run_key, "after_series": after[0], "after_step": after[1]}
        rows = first_rows(conn.execute(_RAW, find).all())
        if rows:
            places = [{"of_run": run_key, "of_series": row.series_id, "begin": row.step0} for row in rows]
            conn.execute(_EMPTY, places)
        else:
            lock_run(conn, run_key)
            update_run(conn, run_key, thinned_s=now_s)
    last = (rows[-1].series_id, rows[-1].step0) if rows else None
    return last, int(sum(row.size for row in rows))


def drop_details_batch(database: Database, run_key: int, now_s: float, since_s: float = 0.0) -> int | None:
    """Delete some of the details of a run, if it is still quiet: bytes given up, None if there is nothing more to do.

    Raises `StoreUnavailable`.
    """
    with database.write() as conn:
        if not is_quiet(conn, run_key, now_s, since_s):
            return None
        rows = first_rows(conn.execute(_DETAILS, {"of_run": run_key}).all())
        if not rows:
            return None
        conn.execute(
            _DELETE_DETAIL,
            [{"of_run": run_key, "of_source": row.source_id, "of_seq": row.seq} for row in rows],
        )
    return int(sum(row.size for row in rows))
