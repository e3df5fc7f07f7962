"""Backup while the server writes, and what it refuses."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from gradiometer_server.clock import SystemClock
from gradiometer_server.errors import ConfigurationError, StoreUnavailable
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.maintenance import backup, check


def test_a_backup_during_writes_is_whole(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/a.db", clock=SystemClock())
    stop, started = threading.Event(), threading.Event()

    def write_pairs() -> None:
        number = 0
        while not stop.is_set():
            with database.write() as conn:
                rows = [{"n": number, "k": key, "s": "x" * 2000} for key in ("a", "b")]
                conn.execute(text("INSERT INTO rule_state VALUES (:n, 'r', :k, :s)"), rows)
            number += 1
            if number > 5:
                started.set()

    thread = threading.Thread(target=write_pairs)
    thread.start()
    try:
        assert started.wait(30)
        # A second door to the same file, as `gradiometer db backup` opens it: without the server's lock.
        beside = Database(f"sqlite:///{tmp_path}/a.db")
        backup(beside, tmp_path / "copy.db")
        beside.close()
    finally:
        stop.set()
        thread.join(30)
    database.close()
    copy = open_database(f"sqlite:///{tmp_path}/copy.db", clock=SystemClock())
    with copy.read() as conn:
        odd = "SELECT count(*) FROM (SELECT run_id FROM rule_state GROUP BY run_id HAVING count(*) <> 2)"
        assert conn.execute(text(odd)).scalar_one() == 0
        assert conn.execute(text("SELECT count(*) FROM rule_state")).scalar_one() >= 12
    # The rows stand for no run, which is all that may be wrong with them.
    assert [problem.where for problem in check(copy)] == ["table rule_state"]
    copy.close()


def test_a_backup_never_overwrites_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/a.db", clock=SystemClock())
    (tmp_path / "there.db").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"there\.db exists"):
        backup(database, tmp_path / "there.db")
    assert (tmp_path / "there.db").read_text() == "mine"
    with pytest.raises(StoreUnavailable, match="no/such"):
        backup(database, tmp_path / "no/such/copy.db")
    database.close()
    with pytest.raises(ConfigurationError, match="no database"):
        backup(Database(f"sqlite:///{tmp_path}/missing.db"), tmp_path / "copy.db")
    with pytest.raises(ConfigurationError, match="pg_dump") as caught:
        backup(Database("postgresql://u:secret@h/d"), tmp_path / "copy.db")
    assert "secret" not in str(caught.value)


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/a.db", clock=SystemClock())
    with database.write() as conn:
        rows = [{"n": n, "s": "x" * 3000} for n in range(200)]
        conn.execute(text("INSERT INTO rule_state VALUES (:n, 'r', '', :s)"), rows)
    database.close()
    path = tmp_path / "a.db"
    data = bytearray(path.read_bytes())
    for page in range(30, 60):
        data[page * 4096 : page * 4096 + 64] = b"\xa5" * 64
    path.write_bytes(data)
    damaged = Database(f"sqlite:///{path}")
    try:
        found = [problem.what for problem in check(damaged)]
    except StoreUnavailable as error:
        found = [error.message]
    assert found
    damaged.close()
