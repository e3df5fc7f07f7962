"""Deleting a run: out of sight in one transaction, its rows away in batches, and its agents refused from then on.

What remains is one row that names it. A purge that a crash cut short goes on at the next start, because that row
says so. Launches after the deletion may use the run's id anew, once everything is purged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Table, bindparam, func, literal, select, tuple_, update

from gradiometer_server.domain.names import run_key as key_of
from gradiometer_server.errors import Conflict, ProtocolError, StoreUnavailable
from gradiometer_server.store.database import Database
from gradiometer_server.store.run_rows import get_run
from gradiometer_server.store.run_writes import lock_run
from gradiometer_server.store.statements import insert_or_update
from gradiometer_server.store.tables import deleted_run, metadata, run, source
from gradiometer_server.store.thinning import first_rows

_BATCH_ROWS: Final = 2000
"""Rows that are deleted in one transaction, or fewer large ones: nobody may wait long for SQLite's only write lock."""
PER_RUN: Final[tuple[Table, ...]] = tuple(
    table for table in metadata.sorted_tables if "run_id" in table.c and table not in (run, deleted_run)
)
"""Every table that holds rows of runs: one that is added later is purged without anybody having to think of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """A run that was deleted; launches (Unix ms) up to `last_launch` are refused."""

    run_key: int
    run_id: str
    last_launch: int
    is_purged: bool


_REMEMBER = insert_or_update(deleted_run, ("project", "deleted_s", "last_launch", "is_purged"))
_DELETED = select(deleted_run).where(deleted_run.c.run_id == bindparam("of_run"))
_PENDING = select(deleted_run).where(deleted_run.c.is_purged.is_(False)).order_by(deleted_run.c.deleted_s)
_PURGED = update(deleted_run).where(deleted_run.c.run_id == bindparam("of_run")).values(is_purged=True)
_LAST_LAUNCH = select(func.max(source.c.attempt)).where(source.c.run_id == bindparam("of_run"))
_DELETE_RUN = run.delete().where(run.c.run_id == bindparam("of_run"))
_DELETE_SOURCES = source.delete().where(source.c.run_id == bindparam("of_run"))


def begin_delete(conn: Connection, run_id: str, now_s: float, *, force: bool = False) -> int:
    """Take a run out of sight and its sources away, so that nothing more is written to it; returns its key.

    Raises:
        NotFound: no such run.
        Conflict: `run_is_live`.
    """
    row = get_run(conn, run_id, now_s)
    lock_run(conn, row.run_key)
    if row.state == "running" and not force:
        raise Conflict(
            f"run {run_id!r} is running; deleting it would throw away what it still sends.",
            code="run_is_live",
            remedy="End the training first, or add force=true.",
        )
    # A trainer's clock may be ahead of ours: what has launched so far is refused in any case.
    launched = conn.execute(_LAST_LAUNCH, {"of_run": row.run_key}).scalar()
    remembered = {
        "run_id": row.run_key, "public_id": run_id, "project": row.project, "deleted_s": now_s, "is_purged": False,
        "last_launch": max(int(now_s * 1000), launched or 0),
    }  # fmt: skip
    conn.execute(_REMEMBER.on(conn), remembered)
    # Without its sources the log takes no more records of the run, and the fold no more offsets.
    conn.execute(_DELETE_SOURCES, {"of_run": row.run_key})
    conn.execute(_DELETE_RUN, {"of_run": row.run_key})
    return row.run_key


def pending(conn: Connection) -> list[Deleted]:
    """Deleted runs of which something may be left, the longest deleted first."""
    return [_deleted(row) for row in conn.execute(_PENDING)]


def find_deleted(conn: Connection, run_key: int) -> Deleted | None:
    """The deleted run with this storage key, None if there is none."""
    row = conn.execute(_DELETED, {"of_run": run_key}).one_or_none()
    return None if row is None else _deleted(row)


def _deleted(row: object) -> Deleted:
    return Deleted(
        run_key=row.run_id, run_id=row.public_id, last_launch=row.last_launch, is_purged=row.is_purged  # type: ignore[attr-defined]
    )  # fmt: skip


def purge_batch(database: Database, run_key: int) -> bool:
    """Delete some rows of a deleted run in one short transaction; False when there are none left.

    Raises:
        StoreUnavailable: nothing was deleted this time.
    """
    with database.write() as conn:
        for table in PER_RUN:
            if _delete_some(conn, table, run_key):
                return True
        conn.execute(_PURGED, {"of_run": run_key})
    return False


def _delete_some(conn: Connection, table: Table, run_key: int) -> int:
    keys = [column for column in table.primary_key.columns if column.name != "run_id"]
    size = func.length(table.c.data) if "data" in table.c else literal(0)
    found = (
        select(*keys, size.label("size")).where(table.c.run_id == run_key).order_by(*keys).limit(_BATCH_ROWS)
    )
    rows = first_rows(conn.execute(found).all())
    if not rows:
        return 0
    # A range of the key, not a list of keys: everything up to the last row that was found.
    values = zip(keys, rows[-1][: len(keys)], strict=True)
    last = tuple_(*(bindparam(None, value, type_=key.type) for key, value in values))
    conn.execute(table.delete().where(table.c.run_id == run_key, tuple_(*keys) <= last))
    return len(rows)


def refuse_deleted(conn: Connection, run_id: str, launches: Iterable[int]) -> None:
    """Refuse launches (Unix ms) of a run that was deleted after them.

    Raises:
        ProtocolError: `run_deleted`, fatal.
        StoreUnavailable: a later launch, but the deleted run's rows are still being removed.
    """
    found = find_deleted(conn, key_of(run_id))
    if found is None:
        return
    if any(launch <= found.last_launch for launch in launches):
        raise deleted_error(run_id)
    if not found.is_purged:
        raise StoreUnavailable(
            f"the deleted run {run_id!r} is still being removed.", remedy="The agent tries again by itself."
        )


def deleted_error(run_id: str) -> ProtocolError:
    """What the agents of a deleted run are told."""
    return ProtocolError(
        f"run {run_id!r} was deleted on the server; what this launch has to say of it is not taken any more",
        code="run_deleted",
        remedy="start the training again (a later launch begins the run anew), and remove this run's folder from the spool",
        fatal=True,
    )


def num_orphans(conn: Connection) -> dict[str, int]:
    """By table, rows of runs that neither exist nor wait to be purged."""
    known = select(run.c.run_id).union(select(deleted_run.c.run_id).where(deleted_run.c.is_purged.is_(False)))
    counts = {
        table.name: int(
            conn.execute(
                select(func.count()).select_from(table).where(table.c.run_id.not_in(known))
            ).scalar_one()
        )
        for table in PER_RUN
    }
    return {name: count for name, count in counts.items() if count}
