"""Every migration, down and up again with data in: what both revisions know stays to the last byte, on both engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, Table, inspect, select, update

from gradiometer_server.clock import SystemClock
from gradiometer_server.store import deletion, migrate, thinning
from gradiometer_server.store.checking import check
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.definitions import define_metric
from gradiometer_server.store.edits import RunEdit, edit_run
from gradiometer_server.store.query import SeriesReader
from gradiometer_server.store.series import ensure_layout
from gradiometer_server.store.tables import run, source, source_schema
from tests.integration.stores import LOSS, flush, new_run, new_series, tail
from tests.integration.test_migrations import fill
from tests.support.wire_client import layer_schema

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = open_database(database_url, clock=SystemClock())
    yield made
    made.close()


def revisions(database: Database) -> list[str]:
    """All of them, oldest first."""
    with database.read() as conn:
        script = ScriptDirectory.from_config(migrate.alembic_config(conn))
    return [one.revision for one in script.walk_revisions()][::-1]


def everything(database: Database) -> Rows:
    """Every row of every table, as the database itself describes them."""
    with database.read() as conn:
        names = sorted(set(inspect(conn).get_table_names()) - {"alembic_version"})
        tables = [Table(name, MetaData(), autoload_with=conn) for name in names]
        return {
            table.name: sorted((dict(row._mapping) for row in conn.execute(select(table))), key=repr)
            for table in tables
        }


def common(rows: Rows, other: Rows) -> Rows:
    """Of `rows`, the tables and columns that `other` has too."""
    return {
        name: sorted(
            ({key: value for key, value in row.items() if key in other[name][0]} for row in found), key=repr
        )
        for name, found in rows.items()
        if other.get(name)
    }


def test_what_both_revisions_know_survives_each_step_down_and_up(database: Database) -> None:
    fill(database)
    with database.write() as conn:
        key = deletion.key_of("r")
        edit_run(conn, "r", RunEdit(tags=["x"], config={"nan": float("nan")}), 1.0)
        define_metric(conn, key, {"name": "train/*", "summary": "min"})
        ensure_layout(conn, key, ["a"], [4])
        schema = {"run_id": key, "source_id": 1, "seq": 1, "data": layer_schema(("a", 4), schema_id=1)}
        conn.execute(source_schema.insert(), schema)
        conn.execute(update(source).values(acked_seq=1))
    doomed = new_run(database, "doomed")
    with database.write() as conn:
        deletion.begin_delete(conn, "doomed", 99.0)
    while deletion.purge_batch(database, doomed):
        pass
    known = revisions(database)
    full = everything(database)
    assert all(full.values()), {name for name, rows in full.items() if not rows}
    for older in known[-2::-1]:
        migrate.downgrade(database, older)
        down = everything(database)
        assert set(down) < set(full)
        assert common(full, down) == common(down, full), older
    assert older == known[0]
    for newer in known[1:]:
        migrate.upgrade(database, newer)
        up = everything(database)
        assert common(up, down) == common(down, up), newer
    assert set(everything(database)) == set(full)
    assert list(check(database)) == []
    points, values = SeriesReader(database, lambda _key: {}).raw(key, LOSS.key)
    assert len(points) == 9_999
    assert np.array_equal(values[:, 0], np.random.default_rng(0).standard_normal(9_999))


def test_thinned_chunks_do_not_reach_a_version_that_cannot_read_them(database: Database) -> None:
    key, other = new_run(database), new_run(database, "other")
    for run_key in (key, other):
        (one,) = new_series(database, run_key, 1, LOSS)
        flush(database, run_key, (one, tail(np.arange(10_000), np.arange(10_000.0))))
    with database.write() as conn:
        conn.execute(update(run).values(outcome="finished"))
    thinning.thin_batch(database, key, (-1, -1), 1e9)
    (one,) = new_series(database, key, 1, LOSS)
    flush(database, key, (one, tail([20_000, 20_001], [-1.0, float("nan")])))
    before = everything(database)["series"]
    migrate.downgrade(database, "0003")
    rows = {row["run_id"]: row for row in everything(database)["series"]}
    assert rows[other] == next(row for row in before if row["run_id"] == other)
    thinned = rows[key]
    assert (thinned["num_points"], thinned["first_step"], thinned["last_step"], thinned["num_nonfinite"]) == (
        2, 20_000, 20_001, 1,
    )  # fmt: skip
    assert thinned["min"] == thinned["max"] == np.float64(-1.0).tobytes()
    assert [row for row in everything(database)["chunk"] if not len(row["data"])] == []
    migrate.upgrade(database)
    assert list(check(database)) == []
