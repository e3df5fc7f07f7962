"""Which runs are running, however many there are: those that fall silent are told apart, on both engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import update

from gradiometer_server.clock import SystemClock
from gradiometer_server.store import run_rows, runs
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.tables import run
from tests.integration.stores import info

MANY = run_rows.MAX_PAGE + 200


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = open_database(database_url, clock=SystemClock())
    yield made
    made.close()


def test_the_oldest_of_many_running_runs_is_among_them(database: Database) -> None:
    with database.write() as conn:
        for number in range(MANY):
            runs.ensure_run(conn, info(f"r{number}", created_s=float(number)), 1000.0)
    with database.read() as conn:
        assert run_rows.list_running(conn, 1010.0) == {f"r{number}" for number in range(MANY)}
    silent, ended = "r0", "r1"
    with database.write() as conn:
        conn.execute(update(run).where(run.c.public_id == silent).values(heartbeat_s=900.0))
        conn.execute(update(run).where(run.c.public_id == ended).values(outcome="failed"))
    with database.read() as conn:
        found = run_rows.list_running(conn, 1010.0)
        assert len(found) == MANY - 2
        assert not found & {silent, ended}
        assert run_rows.get_run(conn, silent, 1010.0).state == "lost"
    with database.write() as conn:
        runs.ensure_run(conn, info(silent), 1010.0)
    with database.read() as conn:
        assert silent in run_rows.list_running(conn, 1010.0)
        assert run_rows.get_run(conn, silent, 1010.0).state == "running"
