"""Opening databases: where, by whom, and what is said when it cannot be done."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from gradiometer_server.clock import SystemClock
from gradiometer_server.errors import ConfigurationError, StoreUnavailable
from gradiometer_server.store.database import (
    Database,
    default_database_url,
    open_database,
    parse_database_url,
)


def opened(url: str) -> Database:
    return open_database(url, clock=SystemClock())


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgres://u:p@h/d", "postgresql+psycopg"),
        ("postgresql://u:p@h/d", "postgresql+psycopg"),
        ("postgresql+psycopg2://u:p@h/d", "postgresql+psycopg"),
        ("sqlite:////tmp/a.db", "sqlite"),
    ],
)
def test_urls_get_our_driver(url: str, driver: str) -> None:
    assert parse_database_url(url).drivername == driver


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "cannot be read"),
        ("mysql://h/d", "'mysql' are not supported"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_bad_urls_say_what_to_use(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        parse_database_url(url)
    assert "sqlite:////" in caught.value.remedy


def test_the_default_is_below_the_users_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "my data"))
    database = Database(default_database_url())
    assert database.path == tmp_path / "my data" / "gradiometer" / "gradiometer.db"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Database(default_database_url()).path == tmp_path / ".local/share/gradiometer/gradiometer.db"


def test_folders_are_made_and_sqlite_is_durable(tmp_path: Path) -> None:
    database = opened(f"sqlite:///{tmp_path}/new/deep er/a%23.db")
    assert database.path is not None
    assert database.path.exists()
    pragmas = {}
    with database.write() as conn:
        for name in ("journal_mode", "synchronous", "auto_vacuum"):
            pragmas[name] = conn.execute(text(f"PRAGMA {name}")).scalar_one()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "auto_vacuum": 2}
    database.close()


def test_passwords_are_not_shown() -> None:
    database = Database("postgresql://u:secret@127.0.0.1:1/d")
    assert "secret" not in database.name
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:1/d") as caught:
        opened("postgresql://u:secret@127.0.0.1:1/d")
    assert "secret" not in str(caught.value)
    assert caught.value.remedy


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match=r"file/below"):
        opened(f"sqlite:///{tmp_path}/file/below/a.db")
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(ConfigurationError, match=r"folder\.db is a folder\. Name a file"):
        opened(f"sqlite:///{tmp_path}/folder.db")


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, " * 1000)
    with pytest.raises(ConfigurationError, match="not a database") as caught:
        opened(f"sqlite:///{path}")
    assert "another file" in caught.value.remedy
    assert path.read_text() == "Dear reader, " * 1000


def test_a_second_server_on_the_same_file_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    first = opened(url)
    with pytest.raises(ConfigurationError, match=f"pid {os.getpid()}.*a.db") as caught:
        opened(url)
    assert "Stop that server" in caught.value.remedy
    first.close()
    opened(url).close()


def test_the_lock_of_a_killed_server_is_gone(tmp_path: Path) -> None:
    program = (
        "import os, signal; from gradiometer_server.store.database import open_database; "
        "from gradiometer_server.clock import SystemClock; "
        f"open_database('sqlite:///{tmp_path}/a.db', clock=SystemClock()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == -9
    opened(f"sqlite:///{tmp_path}/a.db").close()


def test_a_full_disk_is_said_and_nothing_is_half_written(tmp_path: Path) -> None:
    database = opened(f"sqlite:///{tmp_path}/a.db")
    with database.write() as conn:
        conn.execute(text("CREATE TABLE filler (data BLOB)"))
        pages = conn.execute(text("PRAGMA page_count")).scalar_one()
        conn.execute(text(f"PRAGMA max_page_count = {pages + 2}"))
    with pytest.raises(StoreUnavailable, match="disk is full") as caught, database.write() as conn:
        conn.execute(text("INSERT INTO filler VALUES (zeroblob(100)), (zeroblob(1000000))"))
    assert "Free space" in caught.value.remedy
    with database.read() as conn:
        assert conn.execute(text("SELECT count(*) FROM filler")).scalar_one() == 0
    with database.write() as conn:
        conn.execute(text("PRAGMA max_page_count = 1000000"))
        conn.execute(text("INSERT INTO filler VALUES (zeroblob(1000000))"))
    database.close()


def test_a_database_locked_by_another_program_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradiometer_server.store.database._BUSY_TIMEOUT_S", 0.05)
    database = opened(f"sqlite:///{tmp_path}/a.db")
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"), database.write() as conn:
        conn.execute(text("DELETE FROM run"))
    other.close()
    with database.write() as conn:
        conn.execute(text("DELETE FROM run"))
    database.close()


def test_a_snapshot_does_not_see_later_writes(tmp_path: Path) -> None:
    database = opened(f"sqlite:///{tmp_path}/a.db")
    count = text("SELECT count(*) FROM rule_state")
    with database.read() as conn:
        assert conn.execute(count).scalar_one() == 0
        with database.write() as other:
            other.execute(text("INSERT INTO rule_state VALUES (1, 'a', 'b', '{}')"))
        assert conn.execute(count).scalar_one() == 0
    with database.read() as conn:
        assert conn.execute(count).scalar_one() == 1
    database.close()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    database = opened(f"sqlite:///{tmp_path}/a.db")
    with database.write() as conn:
        conn.execute(text("INSERT INTO rule_state VALUES (1, 'a', '', '0')"))

    def add() -> None:
        for _ in range(20):
            with database.write() as conn:
                now = int(conn.execute(text("SELECT state FROM rule_state")).scalar_one())
                conn.execute(text("UPDATE rule_state SET state = :n"), {"n": str(now + 1)})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with database.read() as conn:
        assert conn.execute(text("SELECT state FROM rule_state")).scalar_one() == "80"
    database.close()
