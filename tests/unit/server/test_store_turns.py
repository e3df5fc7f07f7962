"""Who writes when many want to."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from gradiometer_server.clock import SystemClock
from gradiometer_server.store.database import open_database
from gradiometer_server.store.turns import WriteTurns
from tests.support.eventually import eventually


def test_urgent_writers_go_first_but_not_twice_in_a_row() -> None:
    turns, order = WriteTurns(), []

    def write(name: str, urgent: bool) -> None:
        with turns.turn(urgent=urgent):
            order.append(name)

    wanted = [("flush 1", False), ("flush 2", False), ("log 1", True), ("log 2", True), ("log 3", True)]
    threads = [threading.Thread(target=write, args=one) for one in wanted]
    with turns.turn(urgent=False):
        for thread, (_, urgent) in zip(threads, wanted, strict=True):
            before = turns._num_waiting[urgent]
            thread.start()
            eventually(lambda: turns._num_waiting[urgent] > before, what="it waits")  # noqa: B023
    for thread in threads:
        thread.join(10)
    kinds = [name.split()[0] for name in order]
    assert kinds == ["log", "flush", "log", "flush", "log"]


def test_a_turn_ends_with_an_error_too() -> None:
    turns = WriteTurns()
    with pytest.raises(KeyError), turns.turn(urgent=True):
        raise KeyError
    with turns.turn(urgent=True):
        pass


def test_what_is_deleted_is_not_written_once_more(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/a.db", clock=SystemClock())
    with database.write() as conn:
        assert conn.execute(text("PRAGMA secure_delete")).scalar_one() == 0
    database.close()
