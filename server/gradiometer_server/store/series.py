"""Layouts and series: identities given out per run, and the statistics that each flush keeps up to date."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from sqlalchemy import Connection, Row, bindparam, select

from gradiometer_server.domain.folded import Layout
from gradiometer_server.domain.series import Series
from gradiometer_server.errors import NotFound
from gradiometer_server.store.run_writes import lock_run, update_run
from gradiometer_server.store.tables import layout, series
from gradiometer_server.store.values import dump_json, load_json, unpack_float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesKey:
    """What makes a series one series within an attempt. `width` is 1 for a scalar, the number of layers otherwise."""

    key: str
    rank: int | None = None
    kind: Literal["scalar", "layer"] = "scalar"
    width: int = 1
    layout_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRow:
    """A series with the statistics of its chunks (points not yet flushed are not in them).

    `last` is None for layer series. `min` and `max` are over finite values of all columns, None if there are none;
    `num_nonfinite` counts NaN and infinities of all columns; absent values are in none of them.
    """

    series: Series
    num_points: int
    first_step: int | None
    last_step: int | None
    last: float | None
    min: float | None
    max: float | None
    num_nonfinite: int


_LAYOUTS = select(layout).where(layout.c.run_id == bindparam("of_run")).order_by(layout.c.layout_id)
_LAYOUT_BY_DIGEST = select(layout.c.layout_id).where(
    layout.c.run_id == bindparam("of_run"), layout.c.digest == bindparam("digest")
)
_OF_RUN = select(series).where(series.c.run_id == bindparam("of_run")).order_by(series.c.series_id)
_OF_ATTEMPT = select(series).where(
    series.c.run_id == bindparam("of_run"), series.c.attempt == bindparam("ordinal")
)
_OF_KEY = (
    select(series)
    .where(series.c.run_id == bindparam("of_run"), series.c.key == bindparam("metric"))
    .order_by(series.c.series_id)
)


def ensure_layout(conn: Connection, run_key: int, names: Sequence[str], numels: Sequence[int]) -> Layout:
    """The run's layout with exactly these layers in this order; made if it is new. Raises `NotFound` (run)."""
    if len(names) != len(numels):
        raise ValueError(f"{len(names)} layer names but {len(numels)} element counts")
    row = lock_run(conn, run_key)
    names_text, numels_text = dump_json(list(names)), dump_json(list(numels))
    digest = blake2b(f"{names_text}\n{numels_text}".encode(), digest_size=16).hexdigest()
    layout_id = conn.execute(_LAYOUT_BY_DIGEST, {"of_run": run_key, "digest": digest}).scalar()
    if layout_id is None:
        layout_id = row.next_layout_id
        columns = {
            "run_id": run_key,
            "layout_id": layout_id,
            "digest": digest,
            "names": names_text,
            "numels": numels_text,
        }
        conn.execute(layout.insert(), columns)
        update_run(conn, run_key, next_layout_id=layout_id + 1)
    return Layout(layout_id=layout_id, names=tuple(names), numels=tuple(numels))


def list_layouts(conn: Connection, run_key: int) -> tuple[Layout, ...]:
    """All layouts of a run, in order of appearance."""
    return tuple(
        Layout(
            layout_id=row.layout_id, names=tuple(load_json(row.names)), numels=tuple(load_json(row.numels))
        )
        for row in conn.execute(_LAYOUTS, {"of_run": run_key})
    )


def get_layout(conn: Connection, run_key: int, layout_id: int) -> Layout:
    """One layout. Raises `NotFound`."""
    for found in list_layouts(conn, run_key):
        if found.layout_id == layout_id:
            return found
    raise NotFound("layout", str(layout_id))


def ensure_series(
    conn: Connection, run_key: int, attempt: int, keys: Iterable[SeriesKey]
) -> dict[SeriesKey, Series]:
    """The series of an attempt (its ordinal) for these keys; missing ones are made. One call for many keys.

    Raises:
        NotFound: the run does not exist.
    """
    wanted = list(dict.fromkeys(keys))
    row = lock_run(conn, run_key)
    rows = conn.execute(_OF_ATTEMPT, {"of_run": run_key, "ordinal": attempt})
    known = {_identity(found): found for found in map(series_from, rows)}
    missing = [key for key in wanted if (key.key, key.rank, key.layout_id) not in known]
    made = [
        Series(
            run_key=run_key, series_id=row.next_series_id + place, attempt=attempt, key=key.key, rank=key.rank,
            kind=key.kind, width=key.width, layout_id=key.layout_id,
        )
        for place, key in enumerate(missing)
    ]  # fmt: skip
    if made:
        conn.execute(series.insert(), [_new_row(found) for found in made])
        update_run(conn, run_key, next_series_id=row.next_series_id + len(made))
    known.update((_identity(found), found) for found in made)
    return {key: known[key.key, key.rank, key.layout_id] for key in wanted}


def _identity(found: Series) -> tuple[str, int | None, int | None]:
    return found.key, found.rank, found.layout_id


def _new_row(found: Series) -> dict[str, object]:
    return {
        "run_id": found.run_key, "series_id": found.series_id, "attempt": found.attempt, "key": found.key, "rank": found.rank,
        "kind": found.kind, "width": found.width, "layout_id": found.layout_id, "version": 0, "num_points": 0, "num_nonfinite": 0,
    }  # fmt: skip


def list_series(conn: Connection, run_key: int) -> list[SeriesRow]:
    """All series of a run, all attempts and ranks, in order of appearance."""
    return [series_row_from(row) for row in conn.execute(_OF_RUN, {"of_run": run_key})]


def list_series_of_key(conn: Connection, run_key: int, key: str) -> list[SeriesRow]:
    """The series of one metric, all attempts and ranks."""
    return [series_row_from(row) for row in conn.execute(_OF_KEY, {"of_run": run_key, "metric": key})]


def series_from(row: Row[Any]) -> Series:
    """A row of table `series` as an identity."""
    return Series(
        run_key=row.run_id, series_id=row.series_id, attempt=row.attempt, key=row.key, rank=row.rank,
        kind=row.kind, width=row.width, layout_id=row.layout_id,
    )  # fmt: skip


def series_row_from(row: Row[Any]) -> SeriesRow:
    """A row of table `series` with its statistics."""
    return SeriesRow(
        series=series_from(row), num_points=row.num_points, first_step=row.first_step, last_step=row.last_step,
        last=unpack_float(row.last), min=unpack_float(row.min), max=unpack_float(row.max),
        num_nonfinite=row.num_nonfinite,
    )  # fmt: skip
