"""What runs occupy, and giving freed pages of a SQLite file back to the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Table, bindparam, func, select, text

from gradiometer_server.store.database import Database
from gradiometer_server.store.tables import chunk, detail, frame, run
from gradiometer_server.store.values import load_json

RELEASE_PAGES: Final = 1024
"""Most pages given back in one transaction: 4 MiB."""
_RELEASE_S: Final = 0.02
KEEP_PAGES: Final = 256
"""Free pages that stay in the file, for what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpace:
    """A run as retention sees it.

    Attributes:
        updated_s: its last sign of life or change of state.
        is_thinned: nothing has come since all its raw points were dropped.
        raw_bytes: points that thinning would give up; `detail_bytes`: rings and histograms of single ranks;
            `rest_bytes`: summaries and the log. All zero when they were not asked for.
    """

    run_key: int
    run_id: str
    tags: tuple[str, ...]
    updated_s: float
    is_thinned: bool
    raw_bytes: int = 0
    detail_bytes: int = 0
    rest_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All together."""
        return self.raw_bytes + self.detail_bytes + self.rest_bytes


_RUNS = select(run.c.run_id, run.c.public_id, run.c.tags, run.c.updated_s, run.c.thinned_s).order_by(
    run.c.updated_s, run.c.run_id
)


def _length(column: ColumnElement[Any]) -> ColumnElement[int]:
    return func.coalesce(func.length(column), 0)


def _sum(table: Table, *columns: ColumnElement[Any]) -> Any:
    total = sum((_length(column) for column in columns[1:]), _length(columns[0]))
    return (
        select(func.coalesce(func.sum(total), 0))
        .where(table.c.run_id == bindparam("of_run"))
        .scalar_subquery()
    )


_BYTES = select(
    _sum(chunk, chunk.c.data, chunk.c.steps).label("raw_bytes"),
    _sum(detail, detail.c.data, detail.c.steps, detail.c.times).label("detail_bytes"),
    (_sum(chunk, chunk.c.summary) + _sum(frame, frame.c.data)).label("rest_bytes"),
)


def list_space(database: Database, *, with_bytes: bool) -> Iterator[RunSpace]:
    """All runs, the one longest silent first. Measuring them reads a row of every chunk. Raises `StoreUnavailable`."""
    with database.read() as conn:
        rows = conn.execute(_RUNS).all()
    for row in rows:
        sizes: dict[str, int] = {}
        if with_bytes:
            # A snapshot for each run: one over all of them would hold SQLite's WAL.
            with database.read() as conn:
                found = conn.execute(_BYTES, {"of_run": row.run_id}).one()
                sizes = {name: int(size) for name, size in found._mapping.items()}
        yield RunSpace(
            run_key=row.run_id,
            run_id=row.public_id,
            tags=tuple(load_json(row.tags)),
            updated_s=row.updated_s,
            is_thinned=row.thinned_s is not None and row.thinned_s >= row.updated_s,
            **sizes,
        )


def used_bytes(database: Database) -> int:
    """What the database occupies, free pages of a SQLite file and its WAL left out. Raises `StoreUnavailable`."""
    with database.read() as conn:
        if database.path is None:
            return int(conn.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
        pages = _pragma(conn, "page_count") - _pragma(conn, "freelist_count")
        return pages * _pragma(conn, "page_size")


def free_bytes(conn: Connection, database: Database) -> int:
    """Free pages of a SQLite file; 0 on PostgreSQL, which keeps its own account of them."""
    if database.path is None:
        return 0
    return _pragma(conn, "freelist_count") * _pragma(conn, "page_size")


def file_bytes(path: Path) -> int:
    """Size of a file; 0 if it is not there."""
    return path.stat().st_size if path.exists() else 0


def release_batch(database: Database, *, keep_pages: int = KEEP_PAGES) -> int:
    """Give free pages of a SQLite file back to the disk in one short transaction; returns how many bytes.

    0: there is nothing to give back, the engine is PostgreSQL, or the file was made without `auto_vacuum`.
    Raises `StoreUnavailable`.
    """
    if database.path is None:
        return 0
    with database.write() as conn:
        before = _pragma(conn, "freelist_count")
        if before <= keep_pages:
            return 0
        pages = min(RELEASE_PAGES, before - keep_pages)
        # The statement frees a page with each step and has no columns: the driver steps such a one only once.
        cursor: Any = conn.connection.cursor()
        until_s = time.perf_counter() + _RELEASE_S
        for _ in range(pages):
            cursor.execute("PRAGMA incremental_vacuum(1)")
            if time.perf_counter() > until_s:
                break
        cursor.close()
        freed = before - _pragma(conn, "freelist_count")
        return freed * _pragma(conn, "page_size")


def _pragma(conn: Connection, name: str) -> int:
    return int(conn.execute(text(f"PRAGMA {name}")).scalar_one())
