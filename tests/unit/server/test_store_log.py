"""The log writer when things go wrong: a full queue, a broken database, a stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection

from gradiometer.wire import RunInfo, SourceInfo
from gradiometer_server.clock import SystemClock
from gradiometer_server.errors import StoreUnavailable
from gradiometer_server.store import log, runs
from gradiometer_server.store.database import Database, open_database

WAIT_S = 30.0


class Gate(Database):
    """A real database whose writes can be held up or made to fail."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.open = threading.Event()
        self.open.set()
        self.fails = False

    @contextmanager
    def write(self, *, urgent: bool = False) -> Iterator[Connection]:
        self.open.wait(WAIT_S)
        if self.fails:
            raise StoreUnavailable("the disk is full.")
        with super().write(urgent=urgent) as conn:
            yield conn


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Gate, int]]:
    url = f"sqlite:///{tmp_path}/a.db"
    open_database(url, clock=SystemClock()).close()
    database = Gate(url)
    with database.write() as conn:
        key = runs.ensure_run(conn, RunInfo(run_id="r", project="p", name="n", created_s=1.0), 1.0).run_key
        runs.ensure_source(conn, key, SourceInfo(rank=0, attempt=1), 1.0)
    yield database, key
    database.close()


def stored(database: Database, key: int) -> list[int]:
    with database.read() as conn:
        return [seq for seq, _ in log.read_frames(conn, key, 1, 0, 10**9)]


def test_a_full_queue_refuses_and_takes_again_later(place: tuple[Gate, int]) -> None:
    database, key = place
    writer = log.LogWriter(database, queue_bytes=10_000)
    writer.start()
    database.open.clear()
    futures = [writer.submit(key, 1, 1, [(1, bytes(20_000))], 1)]
    with pytest.raises(log.Busy, match="bytes wait") as caught:
        writer.submit(key, 1, 2, [(2, b"x")], 2)
    assert isinstance(caught.value, StoreUnavailable)
    assert writer.queued_bytes > 20_000
    database.open.set()
    futures[0].result(WAIT_S)
    writer.submit(key, 1, 2, [(2, b"x")], 2).result(WAIT_S)
    writer.stop(WAIT_S)
    assert writer.queued_bytes == 0
    assert stored(database, key) == [1, 2]


def test_a_failed_commit_fails_its_futures_and_those_that_would_leave_a_hole(place: tuple[Gate, int]) -> None:
    database, key = place
    writer = log.LogWriter(database)
    writer.start()
    database.fails = True
    with pytest.raises(StoreUnavailable, match="full"):
        writer.submit(key, 1, 1, [(1, b"a")], 1).result(WAIT_S)
    database.fails = False
    with pytest.raises(StoreUnavailable, match="previous batch failed"):
        writer.submit(key, 1, 2, [(2, b"b")], 2).result(WAIT_S)
    writer.submit(key, 1, 1, [(1, b"a"), (2, b"b")], 2).result(WAIT_S)
    writer.stop(WAIT_S)
    assert stored(database, key) == [1, 2]
    assert writer.num_failures == 1


def test_an_unforeseen_error_does_not_end_the_writer(
    place: tuple[Gate, int], caplog: pytest.LogCaptureFixture
) -> None:
    database, key = place
    writer = log.LogWriter(database)
    writer.start()
    poison: list[tuple[int, bytes]] = [(2**70, b"a")]
    with pytest.raises(StoreUnavailable, match="the log failed"):
        writer.submit(key, 1, 1, poison, 1).result(WAIT_S)
    writer.submit(key, 1, 1, [(1, b"a")], 1).result(WAIT_S)
    writer.stop(WAIT_S)
    assert "not written" in caplog.text


def test_stop_commits_what_is_queued(place: tuple[Gate, int]) -> None:
    database, key = place
    writer = log.LogWriter(database)
    writer.start()
    futures = [writer.submit(key, 1, seq, [(seq, b"x")], seq) for seq in range(1, 50)]
    writer.stop(WAIT_S)
    assert all(future.done() and future.exception() is None for future in futures)
    assert stored(database, key) == list(range(1, 50))
    with pytest.raises(StoreUnavailable, match="stops"):
        writer.submit(key, 1, 50, [(50, b"x")], 50)


def test_stop_gives_up_at_its_deadline_and_says_so(
    place: tuple[Gate, int], caplog: pytest.LogCaptureFixture
) -> None:
    database, key = place
    writer = log.LogWriter(database)
    writer.start()
    database.open.clear()
    first = writer.submit(key, 1, 1, [(1, b"x")], 1)
    while not first.running():
        threading.Event().wait(0.001)
    second = writer.submit(key, 1, 2, [(2, b"x")], 2)
    writer.stop(0.05)
    with pytest.raises(StoreUnavailable, match="stops"):
        second.result(0)
    assert "1 submissions uncommitted" in caplog.text
    database.open.set()
    first.result(WAIT_S)
    writer._thread.join(WAIT_S)


def test_a_cancelled_submission_is_not_written(place: tuple[Gate, int]) -> None:
    database, key = place
    writer = log.LogWriter(database)
    future = writer.submit(key, 1, 1, [(1, b"x")], 1)
    assert future.cancel()
    writer.start()
    writer.submit(key, 1, 1, [(1, b"y")], 1).result(WAIT_S)
    writer.stop(WAIT_S)
    assert writer.queued_bytes == 0
    assert stored(database, key) == [1]
