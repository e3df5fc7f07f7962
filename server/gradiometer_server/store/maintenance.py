"""Looking after a database: figures, a full check, an online backup. Safe beside a running server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Row, Table, bindparam, func, select, text

from gradiometer_server.domain.series import Series
from gradiometer_server.errors import ConfigurationError, StoreUnavailable
from gradiometer_server.store.chunks import BLOCK_COLUMNS
from gradiometer_server.store.database import Database
from gradiometer_server.store.migrate import current_revision
from gradiometer_server.store.series import series_from
from gradiometer_server.store.tables import alert, chunk, frame, run, series, source
from gradiometer_server.store.values import unpack_float
from gradiometer_server.summaries.blocks import Block, problem_of

_CHUNKS_A_READ: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Figures of a database. `log_bytes`: records not yet folded; `wal_bytes`: 0 on PostgreSQL."""

    engine: str
    revision: str | None
    num_runs: int
    num_sources: int
    num_series: int
    num_chunks: int
    num_points: int
    num_frames: int
    num_alerts: int
    log_bytes: int
    chunk_bytes: int
    file_bytes: int
    wal_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that a check found: where, and what is wrong there."""

    where: str
    what: str


_OF_SERIES = (chunk.c.run_id == bindparam("of_run"), chunk.c.series_id == bindparam("of_series"))
_CHUNKS = (
    select(*BLOCK_COLUMNS)
    .where(*_OF_SERIES, chunk.c.step0 > bindparam("after"))
    .order_by(chunk.c.step0)
    .limit(_CHUNKS_A_READ)
)
_TOTALS = select(
    func.coalesce(func.sum(chunk.c.n), 0).label("num_points"),
    func.min(chunk.c.step0).label("first_step"),
    func.max(chunk.c.step1).label("last_step"),
    func.min(chunk.c.min).label("min"),
    func.max(chunk.c.max).label("max"),
    func.coalesce(func.sum(chunk.c.num_nonfinite), 0).label("num_nonfinite"),
).where(*_OF_SERIES)
_SERIES_ROW = select(series).where(
    series.c.run_id == bindparam("of_run"), series.c.series_id == bindparam("of_series")
)
_LOGS = (
    select(
        source.c.run_id, source.c.source_id, source.c.acked_seq, source.c.folded_seq, run.c.public_id,
        run.c.rejected_records, func.count(frame.c.seq).label("num_frames"), func.min(frame.c.seq).label("lowest"),
        func.max(frame.c.seq).label("highest"),
    )
    .join(run, run.c.run_id == source.c.run_id)
    .outerjoin(frame, (frame.c.run_id == source.c.run_id) & (frame.c.source_id == source.c.source_id))
    .group_by(
        source.c.run_id, source.c.source_id, source.c.acked_seq, source.c.folded_seq, run.c.public_id,
        run.c.rejected_records,
    )
)  # fmt: skip


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
            log_bytes=_total(conn, func.length(frame.c.data)),
            chunk_bytes=_total(conn, blobs),
            file_bytes=_file_bytes(conn, database),
            wal_bytes=_size(database.path.with_name(database.path.name + "-wal")) if database.path else 0,
        )


def _count(conn: Connection, table: Table) -> int:
    return int(conn.execute(select(func.count()).select_from(table)).scalar_one())


def _total(conn: Connection, expression: Any) -> int:
    return int(conn.execute(select(func.coalesce(func.sum(expression), 0))).scalar_one())


def _file_bytes(conn: Connection, database: Database) -> int:
    if database.path is not None:
        return _size(database.path)
    return int(conn.execute(text("SELECT pg_database_size(current_database())")).scalar_one())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def check(database: Database) -> Iterator[Problem]:
    """Everything that is wrong, as it is found; nothing: all is well.

    Every chunk decodes (checksum), equals its summary and its row, and overlaps no other; every series agrees with
    its chunks; every source's log holds what was acknowledged and is not folded. Raises `StoreUnavailable`.
    """
    if database.is_sqlite:
        yield from _check_file(database)
    yield from _check_logs(database)
    with database.read() as conn:
        rows = conn.execute(select(series, run.c.public_id).join(run, run.c.run_id == series.c.run_id)).all()
    for row in rows:
        yield from _check_series(database, series_from(row), row.public_id)


def _check_file(database: Database) -> Iterator[Problem]:
    with database.read() as conn:
        findings = conn.execute(text("PRAGMA quick_check(20)")).scalars().all()
    for finding in findings:
        if finding != "ok":
            yield Problem(where=str(database.path), what=str(finding))


def _check_logs(database: Database) -> Iterator[Problem]:
    with database.read() as conn:
        rows = conn.execute(_LOGS).all()
    for row in rows:
        what = _log_problem(row)
        if what:
            yield Problem(where=f"run {row.public_id}, source {row.source_id}", what=what)


def _log_problem(row: Row[Any]) -> str | None:
    if row.folded_seq > row.acked_seq:
        return f"folded up to {row.folded_seq}, but acknowledged only up to {row.acked_seq}"
    if row.num_frames and row.lowest <= row.folded_seq:
        return f"the log still holds record {row.lowest}, which is folded"
    if row.num_frames and row.highest > row.acked_seq:
        return f"the log holds record {row.highest}, which was never acknowledged"
    # Refused records are acknowledged but not in the log; the run counts them.
    missing = row.acked_seq - row.folded_seq - row.num_frames
    if missing > row.rejected_records:
        return f"{missing} records are acknowledged, not folded and not in the log; {row.rejected_records} were refused"
    return None


def _check_series(database: Database, one: Series, run_id: str) -> Iterator[Problem]:
    rank = "" if one.rank is None else f", rank {one.rank}"
    where = f"run {run_id}, {one.key}{rank}, attempt {one.attempt}"
    find = {"of_run": one.run_key, "of_series": one.series_id}
    with database.read() as conn:
        totals, row = conn.execute(_TOTALS, find).one(), conn.execute(_SERIES_ROW, find).one()
    for name in ("num_points", "first_step", "last_step", "num_nonfinite"):
        if getattr(row, name) != getattr(totals, name):
            what = f"its row says {name} {getattr(row, name)}, its chunks say {getattr(totals, name)}"
            yield Problem(where=where, what=what)
    for name in ("min", "max"):
        if unpack_float(getattr(row, name)) != getattr(totals, name):
            yield Problem(where=where, what=f"its row and its chunks differ in {name}")
    yield from _check_chunks(database, one, where)


def _check_chunks(database: Database, one: Series, where: str) -> Iterator[Problem]:
    after, end = -1, -1
    while True:
        with database.read() as conn:
            rows = conn.execute(
                _CHUNKS, {"of_run": one.run_key, "of_series": one.series_id, "after": after}
            ).all()
        for row in rows:
            block = Block(**row._mapping)
            if block.step0 <= end:
                yield Problem(
                    where=f"{where}, chunk at step {block.step0}", what=f"overlaps the one that ends at {end}"
                )
            what = problem_of(block, one.width)
            if what:
                yield Problem(where=f"{where}, chunk at step {block.step0}", what=what)
            after, end = block.step0, max(end, block.step1)
        if len(rows) < _CHUNKS_A_READ:
            return


def backup(database: Database, path: Path) -> None:
    """Copy a SQLite database to a new file, consistent, while the server runs.

    Raises:
        ConfigurationError: not SQLite, or the target exists or cannot be written.
        StoreUnavailable: the copy failed; no target is left behind.
    """
    if database.path is None:
        raise ConfigurationError(
            "PostgreSQL is not backed up by Gradiometer.", remedy=f"Use pg_dump on {database.name}."
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


def _copy(origin: Path, target: Path) -> None:
    # In one step: it holds one snapshot, so writers need not wait and the copy never starts over.
    target.unlink(missing_ok=True)
    with closing(sqlite3.connect(origin)) as reader, closing(sqlite3.connect(target)) as writer:
        reader.backup(writer, pages=-1)
