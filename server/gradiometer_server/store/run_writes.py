"""The lock that every writer of a run takes first, and the columns that all of them may set.

On PostgreSQL the run's row is locked; SQLite has one writer anyway. So ids are given out once and read-modify-write of
the JSON columns is safe between several servers.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, bindparam, select, update

from gradiometer_server.errors import NotFound
from gradiometer_server.store.tables import run
from gradiometer_server.store.values import clean_text

_LOCKED_RUN = select(run).where(run.c.run_id == bindparam("of_run")).with_for_update()
UPDATE_RUN = update(run).where(run.c.run_id == bindparam("of_run"))


def lock_run(conn: Connection, run_key: int) -> Row[Any]:
    """The run's row, locked until the transaction ends. Raises `NotFound`."""
    row = conn.execute(_LOCKED_RUN, {"of_run": run_key}).one_or_none()
    if row is None:
        raise NotFound("run", str(run_key))
    return row


def update_run(conn: Connection, run_key: int, **columns: object) -> None:
    """Set columns of a run."""
    conn.execute(UPDATE_RUN.values(**columns), {"of_run": run_key})


def search_text(public_id: str, name: str, tags: list[str], group: str | None, notes: str) -> str:
    """What the search of the runs list looks through."""
    return clean_text("\n".join([public_id, name, *tags, group or "", notes[:1000]]).casefold())
