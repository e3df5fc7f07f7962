"""A full check of a database: everything that is stored is read, decoded and held against what else says the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Row, bindparam, func, select, text

from gradiometer_server.domain.series import Series
from gradiometer_server.store.chunks import BLOCK_COLUMNS
from gradiometer_server.store.database import Database
from gradiometer_server.store.deletion import num_orphans
from gradiometer_server.store.details import detail_problem
from gradiometer_server.store.series import series_from
from gradiometer_server.store.tables import chunk, detail, dump, frame, run, series, source, source_schema
from gradiometer_server.store.values import unpack_float
from gradiometer_server.summaries.blocks import Block, problem_of

_CHUNKS_A_READ: Final = 64
_DETAILS_A_READ: Final = 16


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
_DETAIL_KEY: Final = ("of_run", "of_source", "of_seq")
_DETAIL_PLACES = (
    select(detail.c.run_id, detail.c.source_id, detail.c.seq, run.c.public_id)
    .join(run, run.c.run_id == detail.c.run_id)
    .order_by(detail.c.run_id, detail.c.source_id, detail.c.seq)
)
_DETAIL = select(detail).where(
    detail.c.run_id == bindparam("of_run"),
    detail.c.source_id == bindparam("of_source"),
    detail.c.seq == bindparam("of_seq"),
)
_WITH_SCHEMAS = select(source_schema.c.run_id, source_schema.c.source_id).distinct()
_LOST_DUMPS = (
    select(dump.c.source_id, dump.c.step, run.c.public_id)
    .join(run, run.c.run_id == dump.c.run_id)
    .outerjoin(source, (source.c.run_id == dump.c.run_id) & (source.c.source_id == dump.c.source_id))
    .where(source.c.source_id.is_(None))
)


def check(database: Database) -> Iterator[Problem]:
    """Everything that is wrong, as it is found; nothing: all is well.

    Every chunk decodes (checksum), equals its summary and its row, and overlaps no other; every series agrees with
    its chunks; every source's log holds what was acknowledged and is not folded; every detail of a single rank decodes
    and can be named; no row belongs to a run that is not there. Raises `StoreUnavailable`.
    """
    if database.is_sqlite:
        yield from _check_file(database)
    yield from _check_orphans(database)
    yield from _check_logs(database)
    yield from _check_details(database)
    yield from _check_dumps(database)
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


def _check_orphans(database: Database) -> Iterator[Problem]:
    with database.read() as conn:
        counts = num_orphans(conn)
    for name, count in counts.items():
        yield Problem(where=f"table {name}", what=f"{count} rows belong to runs that are not there")


def _check_details(database: Database) -> Iterator[Problem]:
    with database.read() as conn:
        places = conn.execute(_DETAIL_PLACES).all()
        schemas = {(row.run_id, row.source_id) for row in conn.execute(_WITH_SCHEMAS)}
    for begin in range(0, len(places), _DETAILS_A_READ):
        with database.read() as conn:
            rows = [
                (place, conn.execute(_DETAIL, dict(zip(_DETAIL_KEY, place[:3], strict=True))).one_or_none())
                for place in places[begin : begin + _DETAILS_A_READ]
            ]
        for place, row in rows:
            where = f"run {place.public_id}, source {place.source_id}, detail {place.seq}"
            if row is None:
                # Retention dropped it meanwhile.
                continue
            what = detail_problem(row)
            if what is None and (place.run_id, place.source_id) not in schemas:
                what = "its source has declared no schema, so nobody knows what its values are"
            if what is not None:
                yield Problem(where=where, what=what)


def _check_dumps(database: Database) -> Iterator[Problem]:
    with database.read() as conn:
        rows = conn.execute(_LOST_DUMPS).all()
    for row in rows:
        yield Problem(
            where=f"run {row.public_id}, dump of step {row.step}",
            what=f"its source {row.source_id} is not there",
        )


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
