"""`gradiometer db ...` on both engines: which databases it refuses, what it finds, what it gives back."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import delete, text, update

from gradiometer import wire
from gradiometer_server import cli
from gradiometer_server.clock import SystemClock
from gradiometer_server.store import details, dumps, migrate, space, thinning
from gradiometer_server.store.checking import check
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.tables import chunk, detail, dump, run, source_schema
from tests.integration.stores import LOSS, flush, new_run, new_series, tail
from tests.support.server import Server
from tests.support.wire_client import WireClient, frame, layer_schema, scalar_schema

LOOKING = ["stats", "check", "vacuum", "export r {folder}/x"]
MEGABYTE = 1024 * 1024


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = open_database(database_url, clock=SystemClock())
    assert made.lock is None or made.path is not None
    yield made
    made.close()


def db(url: str, *arguments: str) -> int:
    return cli.main(["db", *arguments, "--database", url, "--quiet"])


def commands(tmp_path: Path, *more: str) -> list[list[str]]:
    return [command.format(folder=tmp_path).split() for command in [*LOOKING, *more]]


def test_a_newer_database_is_refused_by_every_command(
    database: Database, database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with database.write() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9f00'"))
    database.close()
    more = ("backup {folder}/b.db", "upgrade", "downgrade base", "vacuum --full")
    for command in commands(tmp_path, *more):
        assert db(database_url, *command) == 2, command
        told = capsys.readouterr().err
        assert "9f00" in told, command
        assert "newer" in told, command
        assert "Upgrade gradiometer" in told, command
    assert not list(tmp_path.glob("x*"))
    assert not list(tmp_path.glob("b.db*"))


def test_an_older_database_is_refused_until_it_is_migrated_but_can_be_backed_up(
    database: Database, database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_run(database)
    migrate.downgrade(database, "0003")
    is_file = database.path is not None
    database.close()
    for command in commands(tmp_path):
        assert db(database_url, *command) == 2, command
        assert "revision 0003; this version needs 0" in capsys.readouterr().err, command
    assert db(database_url, "backup", str(tmp_path / "b.db")) == (0 if is_file else 2)
    assert db(database_url, "upgrade") == 0
    assert db(database_url, "check") == 0
    capsys.readouterr()
    assert db(database_url, "stats") == 0
    assert "num_runs       1\n" in capsys.readouterr().out


@pytest.mark.postgres
def test_postgresql_is_backed_up_by_its_own_tool(
    postgres_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_database(postgres_url, clock=SystemClock()).close()
    secret = postgres_url.replace("@", ":hidden-word@", 1)
    assert db(secret, "backup", str(tmp_path / "b.dump")) == 2
    told = capsys.readouterr().err
    assert "pg_dump --format=custom" in told
    assert str(tmp_path / "b.dump") in told
    assert "pg_restore" in told
    assert "hidden-word" not in told


def with_details(database: Database) -> int:
    key = new_run(database)
    with database.write() as conn:
        schema = layer_schema(("a", 4))
        conn.execute(source_schema.insert(), {"run_id": key, "source_id": 1, "seq": 1, "data": schema})
        ring = wire.decode_record(frame({1: [1.0] * 7, 2: [2.0] * 7}, schema_id=2))
        assert isinstance(ring, wire.Frame)
        sent = wire.Detail(
            kind="ring", reason="r", schema_id=2, steps=ring.steps, times=ring.times, values=ring.values
        )
        counts = np.ones(256, "<u4").tobytes()
        histogram = wire.Detail(
            kind="histogram", reason="h", schema_id=2, steps=(5,), times=(1.0,), values=counts
        )
        details.add_details(conn, key, [(1, 2, sent), (1, 3, histogram)])
        dumps.add_dump(conn, key, 1, 5, 1.0, {"path": "/p", "reason": "r"})
    return key


def found(database: Database) -> list[str]:
    return [f"{problem.where}: {problem.what}" for problem in check(database)]


def test_damaged_details_and_rows_of_nobody_are_found(
    database: Database, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_details(database)
    assert found(database) == []
    damages = [
        (detail.c.kind == "ring", {"data": b"\x01\x01rubbish"}, "detail 2: stored data is damaged"),
        (detail.c.kind == "histogram", {"data": b""}, "detail 3: stored data is damaged"),
        (detail.c.kind == "ring", {"step1": 9}, "detail 2: its steps are 1 to 2, but its row says 1 to 9"),
        (detail.c.kind == "ring", {"num_bytes": 1}, "detail 2: it holds 112 bytes, but its row says 1"),
    ]
    with database.read() as conn:
        kept = [dict(row._mapping) for row in conn.execute(detail.select())]
    for which, columns, told in damages:
        with database.write() as conn:
            conn.execute(update(detail).where(which).values(**columns))
        (problem,) = found(database)
        assert told in problem
        with database.write() as conn:
            conn.execute(delete(detail))
            conn.execute(detail.insert(), kept)
    with database.write() as conn:
        conn.execute(delete(source_schema))
        conn.execute(update(dump).values(source_id=7))
        conn.execute(dump.insert(), {"run_id": 42, "source_id": 1, "step": 1, "rank": 0, "host": "", "path": "",
                                     "reason": "", "num_bytes": 0, "saved_s": 0.0})  # fmt: skip
    problems = found(database)
    assert [problem for problem in problems if "declared no schema" in problem] == problems[1:3]
    assert "table dump: 1 rows belong to runs that are not there" in problems[0]
    assert "its source 7 is not there" in problems[3]
    database.close()
    assert db(database_url, "check") == 1
    assert "4 problems found" in capsys.readouterr().out


def test_stats_count_what_there_is(
    database: Database, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = with_details(database)
    with database.write() as conn:
        conn.execute(update(run).values(outcome="finished"))
    thinning.thin_batch(database, key, (-1, -1), 1e9)
    database.close()
    assert db(database_url, "stats") == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    names = ("num_details", "num_dumps", "num_thinned", "num_purging")
    assert [int(lines[name]) for name in names] == [2, 1, 1, 0]
    assert int(lines["detail_bytes"]) > 0


def big(database: Database) -> int:
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    flush(database, key, (one, tail(np.arange(500_000), np.random.default_rng(2).standard_normal(500_000))))
    with database.write() as conn:
        conn.execute(update(run).values(outcome="finished"))
    return key


def test_vacuum_gives_back_what_thinning_freed_beside_a_running_server(
    server: Callable[..., Server], database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = server(database_url)
    database = Database(database_url)
    key = big(database)
    place: tuple[int, int] | None = (-1, -1)
    while place is not None:
        place, _ = thinning.thin_batch(database, key, place, 1e9)
    with WireClient(made.url, "live") as agent:
        agent.hello()
        agent.send(scalar_schema("loss"), frame({1: [1.0]}))
        assert db(database_url, "vacuum") == 0
        agent.send(frame({2: [1.0]}))
    told = capsys.readouterr().out
    if database.path is not None:
        assert int(told.split()[3]) > 2 * MEGABYTE
        with database.read() as conn:
            assert space.free_bytes(conn, database) == 0
    assert db(database_url, "vacuum") == 0
    assert db(database_url, "check") == 0, capsys.readouterr().out
    database.close()


def test_a_file_that_cannot_shrink_in_steps_is_written_anew(
    tmp_path: Path, sqlite_url: str, server: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gradiometer.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum = NONE")
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        connection.commit()
    database = open_database(sqlite_url, clock=SystemClock())
    big(database)
    with database.write() as conn:
        conn.execute(delete(chunk))
    database.close()
    before = path.stat().st_size
    assert db(sqlite_url, "vacuum") == 2
    assert "--full" in capsys.readouterr().err
    made = server(sqlite_url)
    assert db(sqlite_url, "vacuum", "--full") == 2
    assert f"pid {made.pid}" in capsys.readouterr().err
    made.stop()
    assert db(sqlite_url, "vacuum", "--full") == 0
    assert path.stat().st_size < before - 2 * MEGABYTE
    assert db(sqlite_url, "vacuum") == 0


@pytest.mark.postgres
def test_postgresql_writes_everything_anew_when_asked(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    database = open_database(postgres_url, clock=SystemClock())
    big(database)
    with database.write() as conn:
        conn.execute(delete(chunk))
    database.close()
    assert db(postgres_url, "vacuum", "--full") == 0
    assert int(capsys.readouterr().out.split()[3]) > 2 * MEGABYTE
