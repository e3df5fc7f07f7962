"""R62, the server's log: a full disk refuses with a reason, reads go on, and it takes again once there is space."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradiometer.wire import RunInfo, SourceInfo
from gradiometer_server.clock import SystemClock
from gradiometer_server.errors import StoreUnavailable
from gradiometer_server.store import log, runs
from gradiometer_server.store.database import Database, open_database

WAIT_S = 20.0


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = open_database(f"sqlite:///{tmp_path}/full.db", clock=SystemClock())
    yield found
    found.close()


def limit_pages(database: Database, more: int | None) -> None:
    """Let the file grow by so many pages at most; None: without a limit. SQLite fails as it does on a full disk."""
    with database.write() as conn:
        pages = conn.exec_driver_sql("PRAGMA page_count").scalar_one()
        conn.exec_driver_sql(f"PRAGMA max_page_count = {2**30 if more is None else pages + more}")


def stored(database: Database, key: int) -> list[int]:
    with database.read() as conn:
        return [seq for seq, _ in log.read_frames(conn, key, 1, 0, 10**9)]


def submitted(writer: log.LogWriter, key: int, seq: int, num_bytes: int) -> Exception | None:
    """What came of one record: None if it was acknowledged."""
    future = writer.submit(key, 1, seq, [(seq, bytes(num_bytes))], seq)
    failure = future.exception(WAIT_S)
    assert failure is None or isinstance(failure, StoreUnavailable)
    return failure


def test_R62_a_full_disk_refuses_with_a_reason_and_nothing_acknowledged_is_lost(database: Database) -> None:
    with database.write() as conn:
        info = RunInfo(run_id="full", project="p", name="n", created_s=1.0)
        key = runs.ensure_run(conn, info, 1.0).run_key
        runs.ensure_source(conn, key, SourceInfo(rank=0, attempt=1), 1.0)
    writer = log.LogWriter(database)
    writer.start()
    try:
        writer.submit(key, 1, 1, [(1, bytes(10_000))], 1).result(WAIT_S)
        limit_pages(database, 10)
        acked = 1
        while (refused := submitted(writer, key, acked + 1, 10_000)) is None:
            acked += 1
            assert acked < 100, "the limit was never met"
        assert "full" in str(refused)
        assert "Free space on that disk" in str(refused)
        assert stored(database, key) == list(range(1, acked + 1)), "what was acknowledged, and nothing else"
        for _ in range(3):
            assert "full" in str(submitted(writer, key, acked + 1, 100_000))
        limit_pages(database, None)
        writer.submit(key, 1, acked + 1, [(acked + 1, b"x"), (acked + 2, b"y")], acked + 2).result(WAIT_S)
        assert stored(database, key) == list(range(1, acked + 3))
    finally:
        writer.stop(WAIT_S)
