"""Migrations go up, down and up again with data, and build exactly the tables that the code uses, on both engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, select, text

from gradiometer import wire
from gradiometer.wire import RunInfo, SourceInfo
from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.series import Tail
from gradiometer_server.errors import ConfigurationError
from gradiometer_server.store import chunks, details, dumps, migrate, runs, series, tables
from gradiometer_server.store.database import Database, open_database


def fill(database: Database) -> None:
    with database.write() as conn:
        run = runs.ensure_run(conn, RunInfo(run_id="r", project="p", name="n", created_s=1.0), 1.0)
        runs.ensure_source(conn, run.run_key, SourceInfo(rank=0, attempt=1), 1.0)
        key = series.SeriesKey(key="train/loss")
        one = series.ensure_series(conn, run.run_key, 1, [key])[key]
        conn.execute(
            tables.frame.insert(), {"run_id": run.run_key, "source_id": 1, "seq": 1, "data": b"\x00\xff"}
        )
        steps = wire.Detail(kind="ring", reason="r", schema_id=1, steps=(1,), times=(1.0,), values=bytes(56))
        details.add_details(conn, run.run_key, [(1, 2, steps)])
        dumps.add_dump(conn, run.run_key, 1, 5, 1.0, {"path": "/p", "reason": "r", "host": "h", "bytes": 3})
        conn.execute(
            tables.alert.insert(),
            {"run_id": run.run_key, "alert_id": "a", "attempt": 1, "rule": "x", "state": "firing", "severity": "error",
             "opened_s": 1.0, "first_step": 1, "episode": "{}"},
        )  # fmt: skip
    tail = Tail(steps_N=np.arange(1, 10_000), values_NW=np.random.default_rng(0).standard_normal((9_999, 1)))
    plan = chunks.plan_flush(database, run.run_key, [(one, tail)])
    with database.write() as conn:
        chunks.commit_flush(conn, plan, folded={}, rule_states={("x", ""): {"seen": 1}})


def row_counts(database: Database) -> dict[str, int]:
    with database.read() as conn:
        return {
            name: len(conn.execute(select(table)).all()) for name, table in tables.metadata.tables.items()
        }


def test_up_down_and_up_again_with_data(database_url: str) -> None:
    database = open_database(database_url, clock=SystemClock())
    for _ in range(2):
        fill(database)
        filled = row_counts(database)
        assert filled["chunk"] == 3
        assert all(
            filled[name]
            for name in ("run", "source", "series", "frame", "alert", "rule_state", "detail", "dump")
        )
        migrate.downgrade(database, "base")
        with database.read() as conn:
            assert set(inspect(conn).get_table_names()) == {"alembic_version"}
        migrate.upgrade(database)
        assert not any(row_counts(database).values())
    database.close()


def test_opening_again_keeps_the_data(database_url: str) -> None:
    database = open_database(database_url, clock=SystemClock())
    fill(database)
    before = row_counts(database)
    database.close()
    again = open_database(database_url, clock=SystemClock())
    assert row_counts(again) == before
    again.close()


def test_migrations_and_tables_agree(database_url: str) -> None:
    database = open_database(database_url, clock=SystemClock())
    with database.read() as conn:
        context = MigrationContext.configure(conn, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []
    database.close()


@pytest.mark.postgres
def test_postgresql_keeps_blobs_uncompressed_and_out_of_line(postgres_url: str) -> None:
    database = open_database(postgres_url, clock=SystemClock())
    query = text(
        "SELECT c.relname, a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid "
        "WHERE a.attstorage = 'e' AND c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace"
    )
    with database.read() as conn:
        assert {tuple(row) for row in conn.execute(query)} == set(tables.BLOBS)
    database.close()


def test_a_newer_database_is_refused_and_left_alone(database_url: str) -> None:
    database = open_database(database_url, clock=SystemClock())
    fill(database)
    with database.write() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9f00'"))
    before = row_counts(database)
    database.close()
    with pytest.raises(ConfigurationError, match="revision 9f00") as caught:
        open_database(database_url, clock=SystemClock())
    assert "Upgrade gradiometer" in caught.value.remedy
    name = database.path.name if database.path else str(database.url.database)
    assert name in caught.value.message
    untouched = Database(database_url)
    assert row_counts(untouched) == before
    untouched.close()


def test_a_failed_migration_leaves_the_database_as_it_was(database_url: str) -> None:
    database = Database(database_url)
    with database.write() as conn:
        conn.execute(text("CREATE TABLE layout (stranger INTEGER)"))
    with pytest.raises(Exception, match="layout"):
        migrate.upgrade(database)
    with database.read() as conn:
        assert "run" not in inspect(conn).get_table_names()
    database.close()


def test_the_package_finds_its_migrations() -> None:
    folder = migrate.migrations_folder()
    assert (folder / "versions" / "0001_first_tables.py").is_file()
    assert isinstance(folder, Path)
