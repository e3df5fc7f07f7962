"""Looking after a database: figures, space given back, an online backup. Safe beside a running server."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Table, create_engine, func, select, text

from gradiometer_server.errors import ConfigurationError, StoreUnavailable
from gradiometer_server.store.checking import Problem, check
from gradiometer_server.store.database import Database
from gradiometer_server.store.migrate import current_revision
from gradiometer_server.store.space import file_bytes, free_bytes, release_batch
from gradiometer_server.store.tables import (
    alert,
    chunk,
    deleted_run,
    detail,
    dump,
    frame,
    metadata,
    run,
    series,
    source,
)

__all__ = ["Problem", "StoreStats", "backup", "check", "stats", "vacuum"]

_INCREMENTAL: Final = 2
"""SQLite's number for `auto_vacuum = INCREMENTAL`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Figures of a database.

    Attributes:
        num_thinned: runs whose raw points were dropped; num_purging: deleted runs that are still being removed.
        log_bytes: records not yet folded.
        detail_bytes: rings and histograms of single ranks.
        free_bytes: pages of a SQLite file that hold nothing; `db vacuum` gives them back. 0 on PostgreSQL.
        wal_bytes: 0 on PostgreSQL.
    """

    engine: str
    revision: str | None
    num_runs: int
    num_sources: int
    num_series: int
    num_chunks: int
    num_points: int
    num_frames: int
    num_alerts: int
    num_details: int
    num_dumps: int
    num_thinned: int
    num_purging: int
    log_bytes: int
    chunk_bytes: int
    detail_bytes: int
    free_bytes: int
    file_bytes: int
    wal_bytes: int


def stats(database: Database) -> StoreStats:
    """Figures of a database. Raises `StoreUnavailable`."""
    with database.read() as conn:
        blobs = (
            func.length(chunk.c.summary)
            + func.length(chunk.c.data)
            + func.coalesce(func.length(chunk.c.steps), 0)
        )
        return StoreStats(
            engine="sqlite" if database.is_sqlite else "postgresql",
            revision=current_revision(conn),
            num_runs=_count(conn, run),
            num_sources=_count(conn, source),
            num_series=_count(conn, series),
            num_chunks=_count(conn, chunk),
            num_points=_total(conn, chunk.c.n),
            num_frames=_count(conn, frame),
            num_alerts=_count(conn, alert),
            num_details=_count(conn, detail),
            num_dumps=_count(conn, dump),
            num_thinned=_count(conn, run, run.c.thinned_s.is_not(None)),
            num_purging=_count(conn, deleted_run, deleted_run.c.is_purged.is_(False)),
            log_bytes=_total(conn, func.length(frame.c.data)),
            chunk_bytes=_total(conn, blobs),
            detail_bytes=_total(conn, func.length(detail.c.data)),
            free_bytes=free_bytes(conn, database),
            file_bytes=_file_bytes(conn, database),
            wal_bytes=file_bytes(database.path.with_name(database.path.name + "-wal"))
            if database.path
            else 0,
        )


def _count(conn: Connection, table: Table, *where: Any) -> int:
    return int(conn.execute(select(func.count()).select_from(table).where(*where)).scalar_one())


def _total(conn: Connection, expression: Any) -> int:
    return int(conn.execute(select(func.coalesce(func.sum(expression), 0))).scalar_one())


def _file_bytes(conn: Connection, database: Database) -> int:
    if database.path is not None:
        return file_bytes(database.path)
    return int(conn.execute(text("SELECT pg_database_size(current_database())")).scalar_one())


def vacuum(database: Database, *, full: bool = False) -> int:
    """Give space that deleting has freed back to the disk; returns how many bytes the files became smaller.

    Without `full` in short transactions, beside a running server. `full` writes everything anew, holding everybody up:
    on SQLite nobody else may use the file (the caller holds its lock).

    Raises:
        ConfigurationError: a SQLite file that was made without `auto_vacuum` needs `full` once.
        StoreUnavailable: the disk is full (`full` needs as much space again), or the database does not answer.
    """
    with database.read() as conn:
        before = _file_bytes(conn, database)
    if database.path is None:
        _vacuum_postgresql(database, full=full)
    elif full:
        _vacuum_file(database.path)
    else:
        _release_all(database)
    with database.read() as conn:
        return before - _file_bytes(conn, database)


def _vacuum_postgresql(database: Database, *, full: bool) -> None:
    # VACUUM cannot run inside a transaction.
    engine = create_engine(database.url, isolation_level="AUTOCOMMIT")
    with database.translated("vacuumed"), engine.connect() as conn:
        for table in metadata.sorted_tables:
            conn.execute(text(f'VACUUM ({"FULL, " if full else ""}ANALYZE) "{table.name}"'))
    engine.dispose()


def _release_all(database: Database) -> None:
    with database.read() as conn:
        mode = int(conn.execute(text("PRAGMA auto_vacuum")).scalar_one())
    if mode != _INCREMENTAL:
        raise ConfigurationError(
            f"the file {database.path} cannot shrink in small steps: another program made it so.",
            remedy="Stop the server and run `gradiometer db vacuum --full` once.",
        )
    while release_batch(database, keep_pages=0):
        pass
    with database.read() as conn:
        conn.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))


def _vacuum_file(path: Path) -> None:
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise StoreUnavailable(
            f"the database {path} cannot be vacuumed: {error}.",
            remedy="End other programs that use it; its folder needs as much free space as the file is large.",
        ) from error


def backup(database: Database, path: Path) -> None:
    """Copy a SQLite database to a new file, consistent, while the server runs.

    Raises:
        ConfigurationError: not SQLite, or the target exists or cannot be written.
        StoreUnavailable: the copy failed; no target is left behind.
    """
    if database.path is None:
        raise ConfigurationError(
            "PostgreSQL brings its own tools for backups; Gradiometer copies only SQLite files.",
            remedy=f"While the server runs: pg_dump --format=custom --file={path} '{_for_tools(database)}'; pg_restore "
            "brings it back. Both take the password from PGPASSWORD or ~/.pgpass.",
        )
    if not database.path.exists():
        raise ConfigurationError(
            f"there is no database {database.path}.", remedy="Name the file with GRADIOMETER_DATABASE_URL."
        )
    if path.exists():
        raise ConfigurationError(f"the file {path} exists.", remedy="Name a file that does not exist.")
    partial = path.with_name(path.name + ".partial")
    try:
        _copy(database.path, partial)
        partial.rename(path)
    except (sqlite3.Error, OSError) as error:
        partial.unlink(missing_ok=True)
        raise StoreUnavailable(
            f"the backup to {path} failed: {error}.",
            remedy="Check that its folder exists, is writable and has space.",
        ) from error


def _for_tools(database: Database) -> str:
    """The URL as PostgreSQL's own programs read it, without the password."""
    return database.url.set(drivername="postgresql", password=None).render_as_string()


def _copy(origin: Path, target: Path) -> None:
    # In one step: it holds one snapshot, so writers need not wait and the copy never starts over.
    target.unlink(missing_ok=True)
    with closing(sqlite3.connect(origin)) as reader, closing(sqlite3.connect(target)) as writer:
        reader.backup(writer, pages=-1)
